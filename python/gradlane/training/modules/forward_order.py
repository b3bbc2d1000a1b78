"""The order in which a training forward first uses each parameter: the order of urgency.

It is observed, not assumed: forwards for evaluation and those inside backward (activation
checkpointing) do not count. Reentrant checkpointing runs the forward without gradients: such a use
counts, the last one, for parameters that are not used in any other way.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gradlane.training.torch_internals import graph_task_id


def inside_backward() -> bool:
    """Whether this thread is inside backward, as in a gradient hook or a recomputation."""
    return graph_task_id() != -1


class ForwardOrder:
    """Notes the first use of each parameter in a training forward."""

    def __init__(self) -> None:
        """Start with nothing noted."""
        self._uses = 0
        self._first: dict[int, int] = {}
        self._without_gradients: dict[int, int] = {}

    def note(self, tensors: Iterable[int], *, training: bool) -> None:
        """Note that these tensors are used now, if this is a training forward."""
        if not training or torch.is_inference_mode_enabled() or inside_backward():
            return
        graded = torch.is_grad_enabled()
        for tensor in tensors:
            self._uses += 1
            if not graded:
                self._without_gradients[tensor] = self._uses
            elif tensor not in self._first:
                self._first[tensor] = self._uses

    @property
    def is_empty(self) -> bool:
        """Whether no use was noted yet."""
        return self._uses == 0

    def priorities(self, count: int) -> list[int]:
        """Return one priority a tensor: minus its position; larger is more urgent.

        Args:
            count: number of all tensors. Those that were not used come last, in their own order.
        """
        moment = {**self._without_gradients, **self._first}
        order = sorted(range(count), key=lambda tensor: moment.get(tensor, self._uses + 1))
        priorities = [0] * count
        for position, tensor in enumerate(order):
            priorities[tensor] = -position
        return priorities
