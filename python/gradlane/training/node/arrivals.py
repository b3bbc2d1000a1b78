"""What has landed of each tensor, and which tensors are ready."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradlane.training.node.shares import Part


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
        self._only_first = [row["role"] != "parameter" for row in rows]
        self._whole = [0] * len(rows)
        for part in parts:
            self._whole[part.tensor] += 1
        self._landed = [0] * len(rows)
        self._ready = [-1] * len(rows)
        self._news: deque[tuple[int, int, bool]] = deque()
        self.newest = 0
        """The tensor that became ready last."""

    def begin(self) -> None:
        """Count for another step."""
        with self._changed:
            self._landed = [0] * len(self._landed)

    def note(self, part: Part, step: int, *, absent: bool) -> None:
        """Note that a part is in its tensor."""
        tensor = part.tensor
        with self._changed:
            self._landed[tensor] += 1
            if self._landed[tensor] == self._whole[tensor]:
                self._ready[tensor] = step
                self.newest = tensor
                self._news.append((step, tensor, absent))
                self._changed.notify_all()

    def is_ready(self, tensor: int, step: int) -> bool:
        """Whether a tensor has its result of a step."""
        return self._ready[tensor] >= step

    def missing(self, tensors: Iterable[int], step: int) -> int | None:
        """Return the first of these that is not ready."""
        return next((one for one in tensors if self._ready[one] < step), None)

    def of_step(self, step: int) -> list[int]:
        """Return the tensors that take part in a step: some do in the first alone."""
        return [
            tensor
            for tensor, only_first in enumerate(self._only_first)
            if step == 0 or not only_first
        ]

    @property
    def news(self) -> int:
        """How many tensors became ready and were not taken."""
        return len(self._news)

    def take(self, step: int) -> list[tuple[int, bool]]:
        """Return (tensor, absent) for what became ready since the last call."""
        with self._changed:
            news, self._news = self._news, deque()
        return [(tensor, absent) for at, tensor, absent in news if at == step]

    @property
    def last_complete(self) -> int | None:
        """The last step that all tensors have their results of, None before any."""
        last = min((self._ready[tensor] for tensor in self.of_step(1)), default=-1)
        return last if last >= 0 else None
