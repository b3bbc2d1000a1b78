"""The order in which a training forward first uses each parameter: the order of urgency.

It is observed, not assumed: forwards for evaluation and those inside backward (activation
checkpointing) do not count.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def inside_backward() -> bool:
    """Whether this thread is inside backward, as in a gradient hook or a recomputation."""
    return torch._C._current_graph_task_id() != -1


class ForwardOrder:
    """Notes parameters as they are used."""

    def __init__(self) -> None:
        """Start with nothing noted."""
        self._position: dict[int, int] = {}

    def note(self, tensors: Iterable[int], *, training: bool) -> None:
        """Note that these tensors are used now, if this is a training forward."""
        if not training or not torch.is_grad_enabled() or inside_backward():
            return
        for tensor in tensors:
            self._position.setdefault(tensor, len(self._position))

    @property
    def is_empty(self) -> bool:
        """Whether no use was noted yet."""
        return not self._position

    def priorities(self, count: int) -> list[int]:
        """Return one priority a tensor: minus its position; larger is more urgent.

        Args:
            count: number of all tensors. Those that were not used come last, in their own order.
        """
        unused = (tensor for tensor in range(count) if tensor not in self._position)
        order = [*self._position, *unused]
        priorities = [0] * count
        for position, tensor in enumerate(order):
            priorities[tensor] = -position
        return priorities
