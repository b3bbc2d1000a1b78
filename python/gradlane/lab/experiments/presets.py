"""The presets by name, and the pages of rows that came from one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradlane.lab.experiments.bandwidth import BANDWIDTH
from gradlane.lab.experiments.scaling import SCALING
from gradlane.lab.experiments.slices import SWEEP
from gradlane.lab.experiments.utilization import UTILIZATION
from gradlane.lab.runs.rows import Row

PRESETS = {preset.name: preset for preset in (BANDWIDTH, SCALING, SWEEP, UTILIZATION)}


def report_from_preset(rows: Sequence[Row], path: str | Path) -> None:
    """Write the page of the preset that the rows are of.

    Args:
        rows: measured and simulated rows, each with the `preset` that it belongs to.
        path: the HTML file to write.

    Raises:
        ValueError: there are no rows, or they are of no preset or several.
        OSError: the file cannot be written.
    """
    names = {str(row.preset) for row in rows}
    if len(names) != 1 or not names <= PRESETS.keys():
        raise ValueError(
            f"rows of one preset make a page, these are of {', '.join(names) or 'none'}"
        )
    PRESETS[names.pop()].write_page(rows, path)


def is_of_preset(content: Sequence[Any]) -> bool:
    """Return whether the rows of a file came from a preset, and not from `lab run`."""
    return bool(content) and isinstance(content[0], Mapping) and "preset" in content[0]
