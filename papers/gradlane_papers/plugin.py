"""What this distribution adds to the command line of gradlane."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradlane.cli.plugins import Plugin
from gradlane_papers.commands.accuracy import lab_accuracy
from gradlane_papers.commands.presets import (
    lab_bandwidth,
    lab_scaling,
    lab_slices,
    lab_utilization,
)
from gradlane_papers.commands.reproduce import reproduce


def _write_preset(content: Sequence[Any], path: Path) -> str:
    """Write the page of a preset's rows; return the note on runs that are no evidence."""
    from gradlane.lab.runs.rows import rows_of
    from gradlane_papers.experiments.findings import Findings
    from gradlane_papers.experiments.presets import report_from_preset

    rows = rows_of(content)
    report_from_preset(rows, path)
    return Findings(rows).note


def _write_accuracy(content: Sequence[Any], path: Path) -> str:
    """Write the page of the accuracy study."""
    from gradlane_papers.accuracy.page import write_page
    from gradlane_papers.accuracy.study import results_of

    write_page(results_of(content), path)
    return ""


PLUGIN = Plugin(
    commands={
        "reproduce": reproduce,
        "lab accuracy": lab_accuracy,
        "lab bandwidth": lab_bandwidth,
        "lab scaling": lab_scaling,
        "lab slices": lab_slices,
        "lab utilization": lab_utilization,
    },
    pages={
        "accuracy": _write_accuracy,
        **dict.fromkeys(("bandwidth", "scaling", "slices", "utilization"), _write_preset),
    },
)
