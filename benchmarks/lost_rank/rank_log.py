"""The file in which a rank records its steps, and its reading.

A line is one JSON object and one write, so a killed rank leaves at most a part of its last line.
Times are those of the machine's monotonic clock, which all processes share. A restarted rank goes
on in the same file. Nothing but the standard library is imported: a rank's start is measured.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

STARTED = "started"
BEGUN = "begun"
DONE = "done"


@dataclass(frozen=True)
class Event:
    """One line of a rank's file.

    Attributes:
        kind: `STARTED`: a process of this rank runs; `BEGUN`: a step's batch is taken; `DONE`: all
            parameters have that step's update.
        time_s: monotonic seconds.
        step: number of the step, from 0; -1 at a start.
        pid: the process.
        loss: this rank's loss of the step.
        checksum: CRC-32 of all parameters after the step.
    """

    kind: str
    time_s: float
    step: int = -1
    pid: int = 0
    loss: float = 0.0
    checksum: int = 0


def log_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's file."""
    return folder / f"rank-{rank}.jsonl"


class RankLog:
    """Writes a rank's file."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Open the file, and record the start of this process."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._descriptor = os.open(log_path(folder, rank), flags, 0o644)
        # The rank before may have been killed within a line.
        os.write(self._descriptor, b"\n")
        self._write(STARTED)

    def begin(self, step: int) -> None:
        """Record that a step begins."""
        self._write(BEGUN, step)

    def end(self, step: int, loss: float, checksum: int) -> None:
        """Record that a step is complete on this rank."""
        self._write(DONE, step, loss, checksum)

    def _write(self, kind: str, step: int = -1, loss: float = 0.0, checksum: int = 0) -> None:
        event = Event(kind, time.monotonic(), step, os.getpid(), loss, checksum)
        os.write(self._descriptor, (json.dumps(asdict(event)) + "\n").encode())


def read_log(path: Path) -> list[Event]:
    """Return the whole lines of a rank's file; none where it does not exist."""
    if not path.exists():
        return []
    events = []
    for line in path.read_bytes().split(b"\n"):
        try:
            events.append(Event(**json.loads(line)))
        except ValueError:
            continue  # a part of a line
    return events
