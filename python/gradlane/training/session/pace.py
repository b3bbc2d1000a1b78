"""Batches at the pace of the other ranks: a late rank leaves out the steps that it missed.

A rank that was left out of a step takes its result and trains on. If the others are in a later step
by then, the next gradients of the rank would be late, too, and so would all after them. Before each
batch the rank therefore looks where the others are. It passes steps that were decided without it,
and the step that the others are in: it takes their results and drops the batches for them. Every
rank consumes one batch a step, so all ranks end together.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from gradlane.training.model.prepared import PreparedModel

BatchType = TypeVar("BatchType")


def at_pace(
    batches: Iterable[BatchType],
    model_in_force: Callable[[], PreparedModel],
    on_pass: Callable[[], object] | None,
) -> Iterator[BatchType]:
    """Yield the batches of those steps that this rank takes part in.

    Args:
        batches: one a step.
        model_in_force: returns the prepared model of the session, or refuses.
        on_pass: called after each passed step.
    """
    warned = False
    for batch in batches:
        model = model_in_force()
        if model.reads_averages:
            if not warned:
                warned = True
                warnings.warn(
                    "the program reads averaged gradients between backward() and optimizer.step(), "
                    "as clipping does; a passed step has no such moment, so this rank passes none, "
                    "and the others wait for it when it is late",
                    UserWarning,
                    stacklevel=3,
                )
        elif model.pass_step():
            if on_pass is not None:
                on_pass()
            continue
        yield batch
