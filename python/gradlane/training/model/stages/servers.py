"""Updates on the servers: the averaged gradients stay there, and parameters come back."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NoReturn

from gradlane.errors import SessionFailedError, UsageError
from gradlane.training.core import RankChannel
from gradlane.training.model.arrived_gradients import ArrivedGradients
from gradlane.training.model.failure_latch import FailureLatch
from gradlane.training.model.lazy_parameters import Exemption
from gradlane.training.model.rank_status import StepEnding
from gradlane.training.model.server_updates import ServerUpdates
from gradlane.training.model.stages.stage import StepStage, Touch
from gradlane.training.model.stages.step_start import StepStart
from gradlane.training.model.update_set import UpdateSet

_ON_SERVERS = (
    'with update="server" the averaged gradients stay on the servers, so nothing can be clipped '
    'or read; use update="worker" for that'
)


class Servers(StepStage):
    """Tells the servers the settings of each step, and refuses looks at what is not here."""

    keeps_means = True

    def __init__(
        self,
        channel: RankChannel,
        server: ServerUpdates,
        updates: UpdateSet,
        failure: FailureLatch,
        exempt: Exemption,
    ) -> None:
        """Start before the first step.

        Args:
            channel: the model's.
            server: knows the settings, and counts.
            updates: the model's optimizers.
            failure: the model's.
            exempt: threads in it read parameters without waiting.
        """
        super().__init__("servers", 'update="server": the servers step the parameters')
        self._channel = channel
        self._server = server
        self._updates = updates
        self._failure = failure
        self._exempt = exempt
        self._settings = ""
        self._adds_up_on_means = False

    def begin(self, start: StepStart) -> None:
        """Tell the servers the optimizer's settings: their updates begin with the first mean."""
        settings = self._settings = self._exempt.run(self._server.checked_rows)
        start.on_channel.append(lambda step: self._channel.set_optimizer(step, settings))

    def local(self, *, by_hand: bool) -> None:
        """Note whether gradients begin to add up on means, which are not here."""
        self._adds_up_on_means = not by_hand and self.hides_gradients
        if not by_hand:
            self.hides_gradients = False

    def before_update(self, number: int, step: int) -> None:
        """Warn of gradients that were to add up over steps."""
        if self._adds_up_on_means:
            warnings.warn(
                "zero_grad() was not called since the last optimizer.step(); with "
                'update="server" gradients stay on the servers, so they do not add up over steps',
                UserWarning,
                stacklevel=5,
            )

    def recorded(self, stepped: Sequence[int], step: int) -> None:
        """Check that the settings are those that the servers were told.

        Raises:
            SessionFailedError: they were changed since.
        """
        if self._exempt.run(self._server.checked_rows) != self._settings:
            self._failure.fail_and_raise(
                SessionFailedError(
                    f"hyper-parameters were changed between the first gradient and "
                    f'optimizer.step() of step {step}: with update="server" the update has '
                    "already begun; step schedulers after optimizer.step()",
                    step - 1,
                )
            )

    def arrived(self, arrived: ArrivedGradients) -> None:
        """Count the steps that tensors have taken."""
        for index in arrived.averaged:
            self._server.note_update(index)
            self._updates.stepped_elsewhere(index)

    def ended(self, ending: StepEnding) -> None:
        """Refuse looks at means from now on, until the program resets them."""
        if ending is StepEnding.STEPPED:
            self.hides_gradients = True

    def reset(self) -> None:
        """Let `.grad` be looked at: there is nothing in it."""
        self.hides_gradients = False

    def touched(self, touch: Touch, name: str, step: int) -> None:
        """Refuse what the servers have begun to change, or what is there alone."""
        if touch is Touch.FORWARD:
            _refuse_begun("a forward after backward() and before optimizer.step()", step)
        elif touch is Touch.VALUE:
            what = f"parameter {name!r} is used between backward() and optimizer.step()"
            _refuse_begun(what, step, "its")
        elif touch is Touch.STATE:
            _refuse_begun("the optimizer's state between backward() and optimizer.step()", step)
        elif touch is Touch.RESET:
            _refuse_begun("zero_grad() after backward()", step)
        else:
            before = touch is Touch.GRADIENT
            when = "between backward() and" if before else "after"
            raise UsageError(
                f".grad of {name!r} is touched {when} optimizer.step() in step {step}: "
                f"{_ON_SERVERS}"
            )


def _refuse_begun(what: str, step: int, whose: str = "the") -> NoReturn:
    raise UsageError(
        f'{what} in step {step}: with update="server" {whose} update has already begun; '
        "call optimizer.step() first"
    )
