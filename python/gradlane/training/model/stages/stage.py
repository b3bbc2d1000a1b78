"""The interface of a stage: what a step does beside sending gradients and applying their means.

The kernel calls the stages of a model in the order of its list, each at the moments that it has a
method for. A new one is a file, and a line in `build.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

from torch import Tensor

from gradlane.training.model.arrived_gradients import ArrivedGradients
from gradlane.training.model.rank_status import Statuses, StepEnding
from gradlane.training.model.stages.step_start import StepStart


class Touch(enum.Enum):
    """What a program touches that a stage may refuse."""

    FORWARD = "a forward between backward and optimizer.step()"
    VALUE = "a parameter between backward and optimizer.step()"
    GRADIENT = "`.grad` between backward and optimizer.step()"
    STATE = "the optimizer's state between backward and optimizer.step()"
    RESET = "zero_grad() between backward and optimizer.step()"
    OLD_GRADIENT = "`.grad` after optimizer.step()"


class StepStage:
    """Does something at some moments of a step; this one does nothing, the exchange knows it."""

    keeps_means: ClassVar[bool] = False
    """Whether means never come to `.grad`, and updates begin before `optimizer.step()`."""

    changes_means = False
    """Whether means of this step are changed as they arrive, by what is not known yet: another
    backward before `optimizer.step()` has them attached first."""
    hides_gradients = False
    """Whether `.grad` may not be touched though the step has ended."""
    notes_forwards = False
    """Whether `forward` is to be called."""

    counters: Mapping[str, float] = MappingProxyType({})
    """Numbers for `session.metrics()`, by names that are keys there."""

    def __init__(self, name: str, reason: str) -> None:
        """Name the stage.

        Args:
            name: as `session.explain()` shows it.
            reason: which option, call or tensor it is in force for.
        """
        self.name = name
        self.reason = reason

    def before_step(self, step: int) -> None:
        """See that a step is about to begin; everything of the one before is settled."""

    def begin(self, start: StepStart) -> None:
        """Say what the step that is about to begin is like."""

    def local(self, *, by_hand: bool) -> None:
        """See that gradients begin to add up here; `by_hand`: the program has put them there."""

    def before_send(self, index: int, gradient: Tensor) -> None:
        """Change a tensor's fresh gradient in place."""

    def before_send_all(self, gradients: Sequence[Tensor]) -> None:
        """Change all gradients of a step in place: none leaves before the last one is there."""

    def submitted(
        self, wait_for_statuses: Callable[[], Statuses], discard: Callable[[], None]
    ) -> None:
        """See that a whole step is on its way.

        Args:
            wait_for_statuses: returns those of all ranks in this step.
            discard: drops the step here.
        """

    def arrived(self, arrived: ArrivedGradients) -> None:
        """Change means that have arrived in place."""

    def attached(self) -> None:
        """See that all means of a step are in `.grad`."""

    def completed(self, step: int) -> None:
        """See that all of a step of the channel has come back, which may lack this rank."""

    def before_update(self, number: int, step: int) -> None:
        """See that an optimizer is about to step."""

    def recorded(self, stepped: Sequence[int], step: int) -> None:
        """See that the step of an optimizer was recorded; `stepped`: those that have, of several"""

    def ended(self, ending: StepEnding) -> None:
        """See how a step has ended here."""

    def reset(self) -> None:
        """See that the program has called `zero_grad()`."""

    def after_step(
        self, wait_for_statuses: Callable[[], Statuses], training_step_of: Callable[[int], int]
    ) -> None:
        """See that `optimizer.step()` is about to return; no lock is held.

        Args:
            wait_for_statuses: returns those of all ranks in this step.
            training_step_of: returns the training step of a step of the channel.
        """

    def forward(self, indices: Sequence[int], *, training: bool) -> None:
        """See which tensors a module is about to use, while `notes_forwards`."""

    def touched(self, touch: Touch, name: str, step: int) -> None:
        """Refuse what the program touches, or let it.

        Args:
            touch: what.
            name: the parameter's, or empty.
            step: the number of the step.

        Raises:
            UsageError: it may not be touched.
        """

    def waited(self, step: int, why: str) -> None:
        """See that a line of the program waits for all means of a step.

        Args:
            step: the number of the step.
            why: what the line does, in words that follow its name.
        """
