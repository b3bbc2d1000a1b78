"""What the kernel says of how all processors of this machine have spent their time."""

from __future__ import annotations

from pathlib import Path

IDLE, WAITING, SOFTIRQ, STOLEN = 3, 4, 6, 7
"""Places of `machine_ticks`: with nothing to do, waiting for a disk, in network interrupts and the
like, and (of a virtual machine) had by others of the same host."""


def machine_ticks() -> list[int]:
    """Return clock ticks of all processors since the start, by what they were spent on."""
    first = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0]
    return [int(field) for field in first.split()[1:9]]
