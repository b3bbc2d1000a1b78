"""The order of urgency: what the first training forward uses first travels first."""

from __future__ import annotations

from collections.abc import Sequence

from gradlane.training.core import Channel
from gradlane.training.model.stages.stage import StepStage
from gradlane.training.model.stages.step_start import StepStart
from gradlane.training.model.step_layout import StepLayout
from gradlane.training.modules.forward_order import ForwardOrder


class ForwardPriorities(StepStage):
    """Notes the first training forward on rank 0, and has all ranks send in its order."""

    def __init__(self, channel: Channel, layout: StepLayout) -> None:
        """Start with nothing noted.

        Args:
            channel: the model's.
            layout: the tensors that take part.
        """
        super().__init__("order of urgency", "rank 0: all ranks send in the order of its forward")
        self._channel = channel
        self._layout = layout
        self._order: ForwardOrder | None = ForwardOrder()
        self.notes_forwards = True

    def forward(self, indices: Sequence[int], *, training: bool) -> None:
        """Note that a module is about to use some tensors."""
        if self._order is not None:
            self._order.note(indices, training=training)

    def begin(self, start: StepStart) -> None:
        """Tell the order, once there is one."""
        if self._order is not None and not self._order.is_empty:
            priorities, self._order = self._priorities(self._order), None
            self.notes_forwards = False
            start.on_channel.append(lambda step: self._channel.switch_priorities(priorities))

    def _priorities(self, order: ForwardOrder) -> list[int]:
        """Return the priority of each tensor of the channel."""
        layout = self._layout
        priorities = order.priorities(layout.table_size + layout.extras)
        # Statuses are asked for before any update, and buffers by the first module that has some.
        priorities[layout.table_size :] = [0] * layout.extras
        for number, group in enumerate(layout.groups, layout.table_size):
            priorities[number] = max(priorities[index] for index in group.members)
        return priorities
