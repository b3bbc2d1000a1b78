"""Times of adding one vector to another, which a ring pays for what it receives.

They are the AddEst of Zhang et al., "Is network the bottleneck of distributed training?" (2020),
section 3: `gradlane whatif --strategy ring-fused --additions` interpolates between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

ELEMENTS = tuple(int(10 ** (exponent / 2)) for exponent in range(6, 17))
"""Elements of the vectors, a thousand to a hundred million."""
REPEATS = 9
"""Measurements of each size, of which the shortest counts: other work on a machine only adds."""
TIMED_S = 1e-3
"""An addition is repeated within one measurement until that lasts so long, as clocks are coarse."""


@dataclass(frozen=True)
class Addition:
    """The time of adding one float32 vector to another, in place."""

    elements: int
    seconds: float


def measure_additions(
    device: torch.device,
    elements: Sequence[int] = ELEMENTS,
    on_measured: Callable[[Addition], None] = lambda addition: None,
) -> list[Addition]:
    """Measure additions of float32 vectors on a device.

    Args:
        device: the CPU, or an accelerator, which is waited for after each measurement.
        elements: lengths of the vectors.
        on_measured: called with each.

    Raises:
        torch.OutOfMemoryError: the device has no room for two vectors of the largest size.
    """
    found = []
    for count in elements:
        into = torch.zeros(count, dtype=torch.float32, device=device)
        other = torch.ones(count, dtype=torch.float32, device=device)
        additions = 1
        while _add(into, other, additions) < TIMED_S:
            additions *= 2
        runs = [_add(into, other, additions) / additions for _ in range(REPEATS)]
        found.append(Addition(count, min(runs)))
        on_measured(found[-1])
    return found


def write_additions(additions: Sequence[Addition], path: Path) -> None:
    """Write a CSV file that `whatif --additions` reads."""
    lines = ["elements,seconds", *(f"{one.elements},{one.seconds:.9g}" for one in additions)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _add(into: torch.Tensor, other: torch.Tensor, times: int) -> float:
    _wait_for(into.device)
    begin = time.perf_counter()
    for _ in range(times):
        into.add_(other)
    _wait_for(into.device)
    return time.perf_counter() - begin


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()
