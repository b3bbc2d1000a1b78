"""Sums of the staleness that the core has counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class StalenessSums:
    """The staleness of one rank's gradients.

    Attributes:
        pushes: gradient slices that were applied.
        total: sum of their stalenesses, in updates.
        largest: the largest of them.
        histogram: pushes by staleness; the last entry that the core has counts all above, too.
    """

    pushes: int = 0
    total: float = 0.0
    largest: int = 0
    histogram: list[int] = field(default_factory=list)

    def add(self, reading: Mapping[str, Any]) -> None:
        """Add a reading of the core."""
        self.pushes += reading["pushes"]
        self.total += reading["mean"] * reading["pushes"]
        self.largest = max(self.largest, reading["max"])
        counts = reading["histogram"]
        missing = len(counts) - len(self.histogram)
        self.histogram += [0] * max(0, missing)
        for staleness, count in enumerate(counts):
            self.histogram[staleness] += count

    def to_json(self) -> dict[str, Any]:
        """Return `pushes`, `mean`, `max` and `histogram`."""
        return {
            "pushes": self.pushes,
            "mean": self.total / max(self.pushes, 1),
            "max": self.largest,
            "histogram": list(self.histogram),
        }
