"""The command `gradlane additions`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from gradlane.cli.options import write_json
from gradlane.planning.profiler.additions import (
    ELEMENTS,
    Addition,
    measure_additions,
    write_additions,
)
from gradlane.report.console import print_written


def run_additions(device: str, *, console: Console, path: Path, json_path: Path | None) -> None:
    """Measure additions, print each, and write them as CSV and, where asked for, as JSON.

    Raises:
        ValueError: torch has no such device.
    """
    found = _device(device)
    console.print(f"adding float32 vectors on {found}", style="dim", highlight=False)

    def tell(addition: Addition) -> None:
        rate = 4 * addition.elements / addition.seconds / 1e9
        console.print(
            f"{addition.elements:>11,} elements  {addition.seconds * 1e6:>12,.1f} µs  "
            f"{rate:>7.1f} GB/s of the sum",
            highlight=False,
        )

    measured = measure_additions(found, ELEMENTS, tell)
    write_additions(measured, path)
    write_json(json_path, {"device": str(found), "additions": [asdict(one) for one in measured]})
    print_written(console, path, json_path)


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, dtype=torch.float32, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"torch cannot use device {text!r} here: {reason}") from None
    return device
