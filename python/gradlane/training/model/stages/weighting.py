"""Means over all samples in place of over ranks: `session.weight()`.

Each rank multiplies its gradients with its number of samples as they leave; means are multiplied
with one more factor as they arrive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence

import torch

from gradlane.errors import UsageError
from gradlane.training.model.arrived_gradients import ArrivedGradients
from gradlane.training.model.kernel.phases import Phase, Phases
from gradlane.training.model.rank_status import Statuses, StepEnding
from gradlane.training.model.stages.stage import StepStage
from gradlane.training.model.stages.step_start import StepStart
from gradlane.training.modules.gradient_intake import raw_grad, values_of
from gradlane.training.options.compatibility import Feature, refusal
from gradlane.training.rendezvous.tensor_table import TensorEntry


class Weighting(StepStage):
    """Weighs the gradients of steps for which the program has told its samples."""

    def __init__(self, trained: Sequence[TensorEntry], captured: Collection[int]) -> None:
        """Weigh nothing yet.

        Args:
            trained: table entries of the trained parameters, by tensor number.
            captured: those that travel as factors.
        """
        super().__init__("weighting", "session.weight(): a mean over samples, where it is called")
        self._trained = trained
        self._captured = captured
        self._samples: int | None = None
        """Behind this rank's gradients of the next step; None: the program has not said."""
        self._in_force: int | None = None
        """The same of the step that was begun last."""
        self.factor: Callable[[], float] | None = None
        """Waits for all ranks' samples; returns what means of this step are multiplied with."""

    def weigh(self, samples: int, phases: Phases, step: int) -> None:
        """Have the next step average over samples in place of over ranks.

        Args:
            samples: behind this rank's gradients.
            phases: of the model.
            step: number of the current step.

        Raises:
            UsageError: gradients of a step are under way, or it does not go with how they travel.
            GradlaneError: the session has failed.
        """
        with phases.lock:
            phases.failure.raise_failure()
            if phases.phase is Phase.BACKWARD or (
                phases.phase is Phase.ATTACHED and self._are_kept
            ):
                raise UsageError(
                    f"session.weight() after backward() in step {step}: gradients have begun to "
                    "leave unweighted; call it before the first backward() whose gradients leave"
                )
            if why := refusal({Feature.WEIGHT: Feature.WEIGHT.label}, self._features):
                raise UsageError(why)
            self._samples = samples

    @property
    def _are_kept(self) -> bool:
        """Whether the program has not thrown all gradients of the step away."""
        return any(raw_grad(one.tensor) is not None for one in self._trained)

    @property
    def _features(self) -> dict[Feature, str]:
        half = [one.name for one in self._trained if one.dtype is torch.float16]
        found = {Feature.HALF: f"parameter {half[0]!r} of float16"} if half else {}
        for index in self._captured:
            name = self._trained[index].name
            found[Feature.FACTOR_LAYER] = f"{name!r}, which travels as factors"
        return found

    def begin(self, start: StepStart) -> None:
        """Have this step's gradients weighted, if the program has said so."""
        if not start.shadow:
            self._in_force, self._samples = self._samples, None
            start.weight = self._in_force
        # The mean over N ranks has divided by N in place of by the samples of all ranks.
        waits = start.weight is not None
        self.factor = functools.cache(lambda: _factor(start.wait_for_statuses())) if waits else None

    def arrived(self, arrived: ArrivedGradients) -> None:
        """Weigh means."""
        if self.factor is not None:
            with torch.no_grad(), torch.inference_mode(False):
                for _, gradient in arrived.gradients:
                    values_of(gradient).mul_(self.factor())

    def attached(self) -> None:
        """Weigh no more in this step."""
        self.factor = None

    def ended(self, ending: StepEnding) -> None:
        """Weigh what adds up on means, which are averaged again in the same step of training."""
        if ending is StepEnding.CARRIED_ON and self._samples is None:
            self._samples = self._in_force


def _factor(statuses: Statuses) -> float:
    """Return the number of ranks over the samples of all of them."""
    return len(statuses) / sum(status.weight or 0 for status in statuses.values())
