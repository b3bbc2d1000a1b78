"""How much memory this machine has left."""

from __future__ import annotations

from pathlib import Path


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
