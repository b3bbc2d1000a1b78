"""The presets by name, and the pages of rows that came from one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradlane.lab.runs.rows import Row
from gradlane_papers.experiments.bandwidth import BANDWIDTH
from gradlane_papers.experiments.scaling import SCALING
from gradlane_papers.experiments.slices import SWEEP
from gradlane_papers.experiments.utilization import UTILIZATION

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
