"""Outcomes of runs: how each rank ended, and what it left."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class RankEnd:
    """How one rank ended.

    Attributes:
        rank: its number.
        code: exit status; None: it had not ended at the deadline.
        after_s: seconds from the fault to its end; before the fault negative.
        events: what it wrote down.
        traces: where its threads stood at the deadline, of one that had not ended.
        errors: what it wrote to standard error.
    """

    rank: int
    code: int | None = None
    after_s: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list)
    traces: str = ""
    errors: str = ""

    @property
    def error(self) -> dict[str, Any] | None:
        """Return the error that ended it, if one did."""
        return next((event for event in self.events if event["event"] == "error"), None)

    @property
    def is_done(self) -> bool:
        """Return whether its program came to its end."""
        return any(event["event"] == "done" for event in self.events)

    @property
    def last_step(self) -> int:
        """Return the last step that its program came through, 0 if none."""
        return max((one["step"] for one in self.events if one["event"] == "step"), default=0)

    def digests(self) -> dict[int, str]:
        """Return the digests that it wrote, by step."""
        return {one["step"]: one["digest"] for one in self.events if one["event"] == "digest"}


@dataclass
class Outcome:
    """The outcome of one run.

    Attributes:
        ends: of all ranks.
        is_reached: whether the drawn moment was reached.
        is_late: whether the program did not come by it, and the fault came two steps later.
        complete_before: steps of the checkpoints that were complete when the fault came.
        left_over: processes, shared memory and temporary files that were left.
        fault_s: monotonic seconds of the first fault; infinity before.
    """

    ends: list[RankEnd]
    is_reached: bool = False
    is_late: bool = False
    complete_before: list[int] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    fault_s: float = float("inf")

    @property
    def errors(self) -> list[str]:
        """Return each rank's error, or an empty text."""
        return [
            f"{end.error['type']}: {end.error['text']}" if end.error else "" for end in self.ends
        ]


def complete_checkpoints(root: Path) -> dict[int, Path]:
    """Return the folders of all checkpoints that are presented as complete, by step."""
    found = {}
    for manifest in sorted(root.glob("step-*/manifest.json")):
        # One may be replaced by a later one meanwhile.
        with contextlib.suppress(FileNotFoundError):
            found[int(json.loads(manifest.read_bytes())["step"])] = manifest.parent
    return dict(sorted(found.items()))
