"""What leaving ranks out does to learning: losses by step and by time, for tables and plots.

Late ranks cost time under `wait`, and gradients under the other rules; only both curves tell which
is worth more.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from gradlane.lab.runs.results import Row

SPANS = 5
"""Parts of the steps whose mean loss is shown."""


def loss_over_time(row: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Return the nominal time, in seconds, at which each measured step was over, and its loss.

    Args:
        row: a row of the lab, as JSON has it, whose workload has losses.
    """
    times_s = list(itertools.accumulate(row["step_s"]))
    return times_s, list(row["loss"][-len(times_s) :])


def loss_table(rows: Sequence[Row]) -> Table | None:
    """Return mean losses by steps, and when the fastest strategy ended; None without a straggler.

    Args:
        rows: of one workload at one rate; of each strategy the first is shown.
    """
    first = {row.strategy: row for row in reversed(rows) if any(row.loss)}
    shown = [row for row in reversed(first.values()) if row.straggler is not None]
    if not shown:
        return None
    curves = {
        row.strategy: loss_over_time({"step_s": row.step_s, "loss": row.loss}) for row in shown
    }
    span = max(1, shown[0].steps // SPANS)
    end_s = min(times_s[-1] for times_s, _ in curves.values())
    table = Table(title="mean losses", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    starts = range(0, shown[0].steps - span + 1, span)
    for start in starts:
        table.add_column(f"{start + 1}-{start + span}", justify="right")
    table.add_column(f"after {end_s:.2f} s", justify="right")
    table.add_column("test accuracy", justify="right")
    for row in shown:
        times_s, losses = curves[row.strategy]
        cells = [statistics.fmean(losses[start : start + span]) for start in starts]
        done = sum(time_s <= end_s for time_s in times_s)
        cells.append(statistics.fmean(losses[max(0, done - span) : max(1, done)]))
        quality = (row.evaluation or {}).get("accuracy")
        accuracy = "-" if quality is None else f"{quality:.1%}"
        table.add_row(row.strategy, *(f"{loss:.3f}" for loss in cells), accuracy)
    return table
