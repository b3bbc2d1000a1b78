"""Free memory of this machine, and how its processors spent their time, as the kernel tells."""

from __future__ import annotations

from pathlib import Path

IDLE, WAITING, SOFTIRQ, STOLEN = 3, 4, 6, 7
"""Places of `machine_ticks`: with nothing to do, waiting for a disk, in network interrupts and the
like, and (of a virtual machine) had by others of the same host."""


def machine_ticks() -> list[int]:
    """Return clock ticks of all processors since the start, by what they were spent on."""
    first = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0]
    return [int(field) for field in first.split()[1:9]]


def available_bytes(source: Path = Path("/proc/meminfo")) -> float:
    """Return what new programs can take without swapping, as the kernel estimates it.

    Args:
        source: where the kernel says so. Without a limit there, everything is taken to fit.
    """
    for line in source.read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return 1024.0 * int(rest.split()[0])
    return float("inf")
