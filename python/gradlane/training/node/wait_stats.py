"""Wait times of this rank's program by tensor, in the format of the core's own rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class WaitStats:
    """Wait times of one channel."""

    def __init__(self, names: Sequence[str]) -> None:
        """Start without waits.

        Args:
            names: of the tensors, by number.
        """
        self._names = names
        self._rows: dict[int, dict[str, Any]] = {}
        self.waited_ns = 0

    def record(self, tensor: int, step: int, waited_ns: int, *, whole_step: bool) -> None:
        """Record a wait that is over.

        Args:
            tensor: that was waited for; of a whole step, the last one to arrive.
            step: of the channel.
            waited_ns: length of the wait.
            whole_step: whether it was a wait for the whole step.
        """
        self.waited_ns += waited_ns
        row = self._rows.setdefault(tensor, self._empty(tensor))
        waited_s = waited_ns * 1e-9
        if whole_step:
            row["last_of_step_count"] += 1
            row["last_of_step_wait_s"] += waited_s
        else:
            row["count"] += 1
            row["wait_s"] += waited_s
            row["wait_step_last"] = step
        # Initial values, in step 0, may take longer than any step, and are not of training.
        if waited_s > row["wait_s_max"] and (step or not whole_step):
            row["wait_s_max"], row["wait_step_max"] = waited_s, step

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each tensor that the program has waited for."""
        return [dict(row) for row in list(self._rows.values())]

    def _empty(self, tensor: int) -> dict[str, Any]:
        return {
            "name": self._names[tensor],
            "count": 0,
            "wait_s": 0.0,
            "wait_s_max": 0.0,
            "wait_step_max": 0,
            "wait_step_last": 0,
            "last_of_step_count": 0,
            "last_of_step_wait_s": 0.0,
        }
