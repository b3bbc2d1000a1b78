"""Means that `GradScaler` unscales as they arrive."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from gradlane.errors import UsageError
from gradlane.training.model.arrived_gradients import ArrivedGradients
from gradlane.training.model.stages.stage import StepStage
from gradlane.training.model.stages.step_start import StepStart
from gradlane.training.model.stages.step_unscaling import StepUnscaling
from gradlane.training.model.update_set import UpdateSet
from gradlane.training.modules.gradient_intake import values_of
from gradlane.training.options.compatibility import Feature, refusal

_DTYPES = {torch.float32, torch.float64, torch.bfloat16}
"""`GradScaler` refuses f16 gradients, and knows no complex ones."""


class Unscaling(StepStage):
    """Unscales the gradients of steps that a scaler has looked at."""

    def __init__(
        self, updates: UpdateSet, dtypes: Iterable[torch.dtype], count: int, adding_up: str
    ) -> None:
        """Unscale nothing yet.

        Args:
            updates: the model's optimizers.
            dtypes: of the trained parameters.
            count: of the trained parameters.
            adding_up: the codec that adds gradients of several steps up with momentum, or empty.
        """
        super().__init__("unscaling", "GradScaler: means are unscaled as they arrive")
        self._updates = updates
        self._may_unscale = _DTYPES.issuperset(dtypes)
        self._count = count
        self._adding_up = adding_up
        self._parts: list[StepUnscaling] = []
        self._groups: set[int] = set()
        """Lists of parameters that a scaler has seen in this step, by `id`."""

    def covers_all(self) -> bool:
        """Return whether a scaler unscales all means, before `optimizer.step()`."""
        return self._may_unscale and self._updates.is_guarded

    def note_group(self, group: int) -> bool:
        """Note a list of parameters, by `id`; return whether a scaler sees it first in this step"""
        is_first = group not in self._groups
        self._groups.add(group)
        return is_first

    def add(self, part: StepUnscaling) -> None:
        """Unscale some means of this step."""
        self._parts.append(part)
        self.changes_means = True

    def inverse_scale(self) -> float | None:
        """Return the one number that arriving means are multiplied with so far; None: not known.

        It is a power of two, so the norm of what is multiplied has the same bits.
        """
        if not self._parts:
            return 1.0
        factors = {part.factor for part in self._parts}
        if len(factors) > 1 or sum(part.count for part in self._parts) != self._count:
            return None
        factor = factors.pop()
        return factor if math.frexp(factor)[0] == 0.5 else None

    def refuse_scales(self, step: int) -> None:
        """Refuse scaled gradients where a codec adds up those of several steps.

        Raises:
            UsageError: one does.
        """
        if self._adding_up:
            words = {Feature.SCALER: f"GradScaler in step {step}"}
            raise UsageError(refusal(words, {Feature.ADDS_UP: f"codec {self._adding_up!r}"}))

    def begin(self, start: StepStart) -> None:
        """Have the norm measured if the last step was unscaled: so do all ranks."""
        self.attached()
        start.measures |= bool(self._groups) and self.covers_all()
        if not start.shadow:
            self._groups = set()

    def before_update(self, number: int, step: int) -> None:
        """Refuse an optimizer that unscales gradients itself where they are added up."""
        if self._adding_up and self._updates.is_scaled(number):
            self.refuse_scales(step)

    def arrived(self, arrived: ArrivedGradients) -> None:
        """Unscale means."""
        for part in self._parts:
            part.scale(
                values_of(mean) for index, mean in arrived.gradients if index in part.indices
            )

    def attached(self) -> None:
        """Unscale no more in this step."""
        self._parts = []
        self.changes_means = False
