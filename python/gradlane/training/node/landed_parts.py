"""What has landed of each tensor, and which tensors are ready."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradlane.training.node.parts import Part


class LandedParts:
    """Counts the parts of tensors that have landed.

    The thread that listens to the node notes them, the program's threads ask and wait.
    """

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], parts: Sequence[Part], changed: threading.Condition
    ) -> None:
        """Nothing has landed.

        Args:
            rows: the plan's tensors.
            parts: what they are cut into.
            changed: notified when a tensor is ready.
        """
        self._changed = changed
        self._first_step_only = [row["role"] != "parameter" for row in rows]
        self._part_counts = [0] * len(rows)
        for part in parts:
            self._part_counts[part.tensor] += 1
        self._landed = [0] * len(rows)
        self._ready_step = [-1] * len(rows)
        self._unclaimed: deque[tuple[int, int, bool]] = deque()
        self.last_ready = 0
        """The tensor that became ready last."""

    def begin_step(self) -> None:
        """Count for another step."""
        with self._changed:
            self._landed = [0] * len(self._landed)

    def record(self, part: Part, step: int, *, absent: bool) -> None:
        """Note that a part is in its tensor."""
        tensor = part.tensor
        with self._changed:
            self._landed[tensor] += 1
            if self._landed[tensor] == self._part_counts[tensor]:
                self._ready_step[tensor] = step
                self.last_ready = tensor
                self._unclaimed.append((step, tensor, absent))
                self._changed.notify_all()

    def is_ready(self, tensor: int, step: int) -> bool:
        """Whether a tensor has its result of a step."""
        return self._ready_step[tensor] >= step

    def first_missing(self, tensors: Iterable[int], step: int) -> int | None:
        """Return the first of these that is not ready."""
        return next((one for one in tensors if self._ready_step[one] < step), None)

    def tensors_in_step(self, step: int) -> list[int]:
        """Return the tensors that take part in a step: some do in the first alone."""
        return [
            tensor
            for tensor, only_first in enumerate(self._first_step_only)
            if step == 0 or not only_first
        ]

    @property
    def unclaimed_count(self) -> int:
        """How many tensors became ready and were not taken."""
        return len(self._unclaimed)

    def take_ready(self, step: int) -> list[tuple[int, bool]]:
        """Return (tensor, absent) for what became ready since the last call."""
        with self._changed:
            unclaimed_count, self._unclaimed = self._unclaimed, deque()
        return [(tensor, absent) for at, tensor, absent in unclaimed_count if at == step]

    @property
    def last_complete(self) -> int | None:
        """The last step that all tensors have their results of, None before any."""
        last = min((self._ready_step[tensor] for tensor in self.tensors_in_step(1)), default=-1)
        return last if last >= 0 else None
