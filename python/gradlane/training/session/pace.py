"""Batches at the pace of the other ranks: a rank that was left behind leaves out what they did.

The step that a rank was left out of is its own all the same: it takes the result and trains on. But
where the others are in a later step by then, its next gradients would come too late, too, and so
would all after them. So before each batch it looks where the others are. Steps that were decided
without it, and one that the others are in the middle of, it passes: it takes their results, and
the batches that it would have had for them are left out. As many batches as steps go by on every
rank, so all come to the end together.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from gradlane.errors import UsageError

if TYPE_CHECKING:
    from gradlane.training.connection import SessionContext
    from gradlane.training.model.prepared import PreparedModel

BatchType = TypeVar("BatchType")


class Paced(Protocol):
    """A connected model as this file sees it."""

    @property
    def reads_averages(self) -> bool:
        """Whether the program reads averaged gradients between backward and step."""

    def pass_step(self) -> bool:
        """Take the result of the next step without a part in it, where there is reason to."""


def at_pace(
    batches: Iterable[BatchType],
    models: Callable[[], Sequence[Paced]],
    on_pass: Callable[[], object] | None,
) -> Iterator[BatchType]:
    """Yield the batches of those steps that this rank takes part in.

    Args:
        batches: one a step.
        models: returns the prepared models of the session.
        on_pass: called after each step that was passed.
    """
    warned = False
    for batch in batches:
        found = models()
        if len(found) != 1:
            raise UsageError(
                f"session.keep_pace() with {len(found)} prepared models: a batch is one step of "
                "one model; prepare one module that holds all"
            )
        model = found[0]
        if model.reads_averages:
            if not warned:
                warned = True
                warnings.warn(
                    "averaged gradients are read between backward() and optimizer.step(), as "
                    "clipping does; a step that is passed has no such moment, so this rank passes "
                    "none, and holds the others back when it is late",
                    UserWarning,
                    stacklevel=3,
                )
        elif model.pass_step():
            if on_pass is not None:
                on_pass()
            continue
        yield batch


class SessionPace:
    """The part of `Session` that goes at the others' pace."""

    _prepared: list[PreparedModel]
    _ctx: SessionContext

    def _check_open(self) -> None:
        raise NotImplementedError

    def keep_pace(
        self,
        batches: Iterable[BatchType],
        on_pass: Callable[[], object] | None = None,
    ) -> Iterator[BatchType]:
        """Yield batches at the pace of the other ranks, where steps go on without late ones.

        A rank that has fallen behind takes the results of the steps that it missed, and the batches
        that it would have had for them are left out. On all other ranks, and with
        `stragglers="wait"`, these are all batches. Each batch has to be one step, and all ranks
        have to give as many, so that all end with the same step and the same parameters. See
        `docs/stragglers.md`.

        Args:
            batches: this rank's, such as a data loader.
            on_pass: called after each step that was passed, such as `scheduler.step`, so that
                learning rates follow the steps.

        Raises:
            UsageError: not exactly one model is prepared, or its step has not ended.
            GradlaneError: the session has failed or is closed.
        """
        self._check_open()
        if not self._ctx.options.leaves_out or self._ctx.rank_info.world_size == 1:
            return iter(batches)
        return at_pace(batches, lambda: self._prepared, on_pass)
