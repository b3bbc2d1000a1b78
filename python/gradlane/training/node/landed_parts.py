"""Results that have landed, by part, and the tensors that are ready."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradlane.training.node.parts import TensorPart


class LandedParts:
    """Counts landed parts and tracks ready tensors.

    The node's listening thread records parts; the program's threads query and wait.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        parts: Sequence[TensorPart],
        changed: threading.Condition,
    ) -> None:
        """Start before the first step.

        Args:
            rows: the plan's tensors.
            parts: of the tensors.
            changed: notified when a tensor is ready.
        """
        self._changed = changed
        self._part_counts = [0] * len(rows)
        for part in parts:
            self._part_counts[part.tensor] += 1
        self._a_part_of = {part.tensor: part for part in parts}
        self._landed = [0] * len(rows)
        self._ready_step = [-1] * len(rows)
        self._unclaimed: deque[tuple[int, int, bool]] = deque()
        self.last_ready = 0
        """The tensor that became ready last."""

    def begin_step(self) -> None:
        """Reset the counts for another step."""
        with self._changed:
            self._landed = [0] * len(self._landed)

    def record(self, part: TensorPart, step: int, *, absent: bool) -> None:
        """Record that a part is in its tensor."""
        tensor = part.tensor
        with self._changed:
            self._landed[tensor] += 1
            if self._landed[tensor] == self._part_counts[tensor]:
                self._ready_step[tensor] = step
                self.last_ready = tensor
                self._unclaimed.append((step, tensor, absent))
                self._changed.notify_all()

    def is_ready(self, tensor: int, step: int) -> bool:
        """Return whether a tensor has its result of a step."""
        return self._ready_step[tensor] >= step

    def first_missing(self, tensors: Iterable[int], step: int) -> int | None:
        """Return the first given tensor that is not ready, or None."""
        return next((one for one in tensors if self._ready_step[one] < step), None)

    def tensors_in_step(self, step: int) -> list[int]:
        """Return the tensors of a step."""
        return sorted(one for one, part in self._a_part_of.items() if part.takes_part(step))

    @property
    def unclaimed_count(self) -> int:
        """Number of ready tensors that `take_ready` has not returned."""
        return len(self._unclaimed)

    def take_ready(self, step: int) -> list[tuple[int, bool]]:
        """Return (tensor, absent) of each tensor that became ready since the last call."""
        with self._changed:
            unclaimed_count, self._unclaimed = self._unclaimed, deque()
        return [(tensor, absent) for at, tensor, absent in unclaimed_count if at == step]

    @property
    def last_complete(self) -> int | None:
        """The last step whose tensors all have their results; None before any."""
        last = min((self._ready_step[tensor] for tensor in self.tensors_in_step(1)), default=-1)
        return last if last >= 0 else None
