"""Means that `session.clip_grad_norm_()` clips as they arrive.

That waits for no mean: the norm is known once the last slice is *reduced*, and updates go on as
means arrive, during the next forward, as without clipping.
"""

from __future__ import annotations

from gradlane.errors import UsageError
from gradlane.training.model.arrived_gradients import ArrivedGradients
from gradlane.training.model.stages.stage import StepStage
from gradlane.training.model.stages.step_clipping import StepClipping
from gradlane.training.model.stages.step_start import StepStart
from gradlane.training.modules.gradient_intake import values_of
from gradlane.training.options.compatibility import Feature, refusal


class Clipping(StepStage):
    """Clips the gradients of steps for which the program has called for it."""

    def __init__(self, adding_up: str) -> None:
        """Clip nothing yet.

        Args:
            adding_up: the codec that adds gradients of several steps up with momentum, or empty.
        """
        super().__init__("clipping", "session.clip_grad_norm_(): means are clipped as they arrive")
        self._adding_up = adding_up
        self._step: StepClipping | None = None
        self.norms: tuple[float, ...] = ()
        """The norms that gradients of this step were clipped to, for all ranks to compare."""
        self._counted: dict[str, float] = {
            "clip_steps": 0,
            "clipped_steps": 0,
            "clip_factor": 1.0,
            "clip_factor_sum": 0.0,
        }
        self.counters = self._counted

    def count(self, factor: float) -> None:
        """Count a step, whose gradients are multiplied by a factor; NaN counts as 0."""
        factor = factor if factor >= 0.0 else 0.0
        self._counted["clip_factor"] = factor
        self._counted["clip_factor_sum"] += factor
        self._counted["clipped_steps"] += factor < 1.0
        self._counted["clip_steps"] += 1

    def clip_arriving(self, clipping: StepClipping) -> None:
        """Clip the means of this step as they arrive."""
        self._step = clipping
        self.changes_means = True

    def note_clipped(self, max_norm: float, norm_type: float) -> None:
        """Note that the gradients of this step are clipped, now or as they arrive."""
        self.norms += (max_norm, norm_type)

    def refuse_added_up(self, max_norm: float, step: int) -> None:
        """Refuse to clip means of what a codec has added up over several steps.

        Raises:
            UsageError: one does.
        """
        if self._adding_up:
            call = f"clip_grad_norm_({max_norm:g}) in step {step}"
            codec = f"codec {self._adding_up!r}"
            raise UsageError(refusal({Feature.CLIP: call}, {Feature.ADDS_UP: codec}))

    def begin(self, start: StepStart) -> None:
        """Have the norm measured if the last step was clipped: so do all ranks."""
        if self._step is not None:
            # Nothing needed it, but the program may still read it.
            self._step.factor()
            self.attached()
        if not self.norms:
            self._counted["clip_factor"] = 1.0
        start.measures |= bool(self.norms)
        if not start.shadow:
            self.norms = ()

    def arrived(self, arrived: ArrivedGradients) -> None:
        """Clip means; waits for the norm."""
        if self._step is not None:
            self._step.scale([values_of(gradient) for _, gradient in arrived.gradients])

    def attached(self) -> None:
        """Clip no more in this step."""
        self._step = None
        self.changes_means = False
