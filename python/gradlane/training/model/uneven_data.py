"""Uneven data: ranks that have run out of batches go along with the others until all have.

A rank without data takes part in every step with nothing: its gradients count as zeros and the mean
still divides by the number of all ranks, as in DDP. It cannot do the others' updates, which may
follow on clipping, unscaling or schedulers of theirs; so it does none, and when the last rank has
run out, everyone gets the parameters, the optimizer's state and the buffers of a rank that was
there to the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NoReturn

from gradlane.errors import UnevenDataError, UsageError
from gradlane.training.model.kernel.phases import Phase
from gradlane.training.model.participation import Participation
from gradlane.training.model.prepared import PreparedModel

_FIRST_PAUSE_S = 0.0002
_LONGEST_PAUSE_S = 0.01


class Join:
    """A context around the loops of all ranks; made by `Session.join`."""

    def __init__(self, models: Sequence[PreparedModel], rank: int, throws: bool) -> None:
        """Prepare to go along in the steps of these models.

        Args:
            models: all that are connected, in the same order on every rank.
            rank: this rank.
            throws: whether all ranks break off when the first one has run out.
        """
        self.throws = throws
        self._models = models
        self._rank = rank
        self._participation: list[Participation] = []

    def __enter__(self) -> Join:
        """Begin.

        Raises:
            UsageError: one is open already, or updates run on the servers.
        """
        for model in self._models:
            if model.steps.in_join:
                raise UsageError("session.join() inside session.join(): one is enough")
        self._participation = [Participation(self.throws, self.stop) for _ in self._models]
        for model, participation in zip(self._models, self._participation, strict=True):
            model.steps.stages.consistency.enter_join(participation)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Go along until all ranks are here, and leave alike with all of them.

        Raises:
            UnevenDataError: it was to be raised, and a rank has run out before another.
            GradlaneError: a rank was lost, or the ranks do not train alike.
        """
        try:
            if error is None:
                self._go_along()
                if self.throws and any(one.uneven for one in self._participation):
                    raise UnevenDataError(self._describe())
                for model, participation in zip(self._models, self._participation, strict=True):
                    if participation.uneven:
                        model.broadcast_state(participation.last_there[0])
        finally:
            for model in self._models:
                model.steps.stages.consistency.leave_join()

    def stop(self) -> NoReturn:
        """Bring all ranks out of their loops: a rank has run out.

        Raises:
            UnevenDataError: always, after every rank has come to the same point.
        """
        for model in self._models:
            if model.steps.phases.phase in (Phase.BACKWARD, Phase.ATTACHED):
                model.steps.update.finish()
        self._go_along()
        raise UnevenDataError(self._describe())

    def _describe(self) -> str:
        return (
            "session.join(throw_on_early_termination=True): a rank has run out of data before "
            f"another one; rank {self._rank} stops with all others, and the step that was under "
            "way was not taken"
        )

    def _go_along(self) -> None:
        """Take part in the others' steps with nothing until nobody has any of their own."""
        steps_of = [model.steps.others for model in self._models]
        for steps in steps_of:
            steps.begin_shadow()
        pause = _Backoff()
        trained = list(zip(steps_of, self._participation, strict=True))
        while trained:
            # One model can be waited for; among several, the ones that the others are at.
            ready = trained if len(trained) == 1 else [it for it in trained if it[0].has_statuses()]
            if not ready:
                pause.sleep_longer()
                continue
            pause.reset()
            for model in list(ready):
                steps, participation = model
                steps.end_shadow()
                if participation.over:
                    trained.remove(model)
                else:
                    steps.begin_shadow()


class _Backoff:
    """Waits a little longer each time."""

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self._sleep = sleep
        self._length_s = _FIRST_PAUSE_S

    def sleep_longer(self) -> None:
        self._sleep(self._length_s)
        self._length_s = min(2 * self._length_s, _LONGEST_PAUSE_S)

    def reset(self) -> None:
        self._length_s = _FIRST_PAUSE_S
