"""The order of urgency: what the first training forward uses first travels first."""

from __future__ import annotations

from collections.abc import Sequence

from gradlane.training.model.stages.stage import StepStage
from gradlane.training.model.stages.step_start import StepStart
from gradlane.training.modules.forward_order import ForwardOrder


class ForwardPriorities(StepStage):
    """Notes the first training forward on rank 0, and has all ranks send in its order."""

    def __init__(self) -> None:
        """Start with nothing noted."""
        super().__init__("order of urgency", "rank 0: all ranks send in the order of its forward")
        self._order: ForwardOrder | None = ForwardOrder()
        self.notes_forwards = True

    def forward(self, indices: Sequence[int], *, training: bool) -> None:
        """Note that a module is about to use some tensors."""
        if self._order is not None:
            self._order.note(indices, training=training)

    def begin(self, start: StepStart) -> None:
        """Tell the order, once there is one."""
        if self._order is not None and not self._order.is_empty:
            start.order, self._order = self._order, None
            self.notes_forwards = False
