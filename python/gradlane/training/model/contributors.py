"""Which steps go on without this rank, where late ranks are left out."""

from __future__ import annotations

from gradlane.training.core import Channel, CoreModule, RankChannel, rank_channel
from gradlane.training.model.failure_latch import FailureLatch
from gradlane.training.rendezvous.wait_notifier import WAIT_NOTIFIER


class Contributors:
    """Asks the channel of one model whose gradients its steps have; steps are the channel's."""

    def __init__(self, core: CoreModule, channel: Channel, failure: FailureLatch) -> None:
        """Ask nothing yet.

        Args:
            core: where the channel's errors come from.
            channel: the model's; it is asked where steps go on without late ranks alone.
            failure: the model's.
        """
        self._core = core
        self._channel = channel
        self._failure = failure

    @property
    def _ranks(self) -> RankChannel:
        return rank_channel(self._channel, "leaving out late ranks")

    def lack_this_rank(self, step: int) -> bool:
        """Return whether a step goes on without this rank; waits until that is known."""
        was_in, _, _ = self._ranks.participation(step)
        if was_in is None:
            doing = f"waiting for the contributors of step {step}"
            with self._failure.translating(self._core, doing), WAIT_NOTIFIER:
                self._ranks.wait_decided(step)
            was_in, _, _ = self._ranks.participation(step)
        return was_in is False

    def are_past(self, step: int) -> bool:
        """Return whether the others are in the step after this one already, or have ended it."""
        _, behind, decided = self._ranks.participation(step)
        return behind or decided > step

    def begin_without(self, step: int) -> None:
        """Begin a step without contributing to it."""
        self._ranks.step_pass(step)
