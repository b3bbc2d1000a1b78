"""Parameters that share memory, such as views of one flat parameter.

An update of one of them changes the others, so they are updated together, in one call of the
optimizer and in its own order, as if nothing had been deferred.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class SharedMemoryGroups:
    """Groups tensors that share memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Look for overlaps among these, by tensor number."""
        self._of: dict[int, tuple[int, ...]] = {}
        self._held: dict[int, tuple[int, Any]] = {}
        spans = sorted((*_span(tensor), index) for index, tensor in enumerate(tensors))
        cluster: list[int] = []
        end = 0
        for first, last, index in spans:
            if cluster and first >= end:
                self._keep(cluster)
                cluster = []
            cluster.append(index)
            end = max(end, last)
        self._keep(cluster)

    def _keep(self, cluster: list[int]) -> None:
        if len(cluster) > 1:
            members = tuple(sorted(cluster))
            self._of.update((index, members) for index in members)

    def whole(self, needed: list[int]) -> list[int]:
        """Return these tensor numbers and those of all tensors that share memory with them."""
        if not self._of:
            return needed
        every = {other for index in needed for other in self._of.get(index, (index,))}
        return sorted(every)

    def hold_back(
        self, arrived: list[tuple[int, Tensor]], pending: set[int]
    ) -> list[tuple[int, Tensor]]:
        """Return the gradients that can be applied: each with all those that share its memory.

        Args:
            arrived: tensor numbers and gradients.
            pending: numbers of tensors that are still to arrive.
        """
        if not self._of:
            return arrived
        self._held.update((index, (index, gradient)) for index, gradient in arrived)
        ready = [index for index in self._held if not pending.intersection(self._of.get(index, ()))]
        return [self._held.pop(index) for index in ready]

    @property
    def held(self) -> set[int]:
        """Numbers of the tensors whose gradients are held back."""
        return set(self._held)

    @property
    def members(self) -> list[int]:
        """All tensors that share memory with another one."""
        return sorted(self._of)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first and last address of a tensor's elements; without elements they are equal."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    reach = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return start, start + (reach + 1) * tensor.element_size()
