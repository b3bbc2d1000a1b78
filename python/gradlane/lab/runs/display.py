"""Tables and progress of lab runs on a terminal.

What a table shows comes from rows alone, so a file of rows says the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from gradlane.formats.rates import format_rate
from gradlane.lab.runs.cells import CellsProgress
from gradlane.lab.runs.notes import balance_notes, bound_notes, factor_notes, loss_table, norm_notes
from gradlane.lab.runs.rows import Row, by_encoding, text_of_no_evidence
from gradlane.lab.runs.run import LabProgress
from gradlane.planning.simulation.bound import describe_binding
from gradlane.report.console import format_time, text_table
from gradlane.report.time_left import TimeLeft, format_duration
from gradlane.training.options.codec_options import RAW
from gradlane.training.options.server_places import servers_text


class _BarProgress(LabProgress):
    """Shows a lab run as a bar with the steps done and the time left."""

    def __init__(self, progress: Progress, total_steps: int) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=total_steps)

    def phase(self, text: str) -> None:
        """Show what is being done."""
        self._progress.update(self._task, description=text)
        if not self._progress.console.is_terminal:
            self._progress.console.print(text, style="dim", highlight=False)

    def advance(self, steps: int) -> None:
        """Move the bar."""
        self._progress.advance(self._task, steps)


class _RunsProgress(CellsProgress):
    """Shows the runs of a grid as a bar in estimated seconds, with the time left at this pace."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._console = progress.console
        self._task = progress.add_task("starting", total=None, counts="", left="")
        self._runs = self._ended = 0
        self._whole_s = self._within_s = 0.0
        self._time = TimeLeft(0.0)

    def plan(self, runs: int, estimate_s: float) -> None:
        """Show what is ahead."""
        self._runs, self._time = runs, TimeLeft(estimate_s)
        self._progress.update(self._task, total=estimate_s)
        if runs:
            self._console.print(
                f"{runs} runs to measure: {format_duration(estimate_s)}", highlight=False
            )
        self._show()

    def phase(self, text: str) -> None:
        """Show what is being done."""
        self._progress.update(self._task, description=text)
        if not self._console.is_terminal:
            self._console.print(text, style="dim", highlight=False)

    def within_run(self, estimate_s: float) -> None:
        """Move the bar."""
        self._within_s += estimate_s
        self._show()

    def run_ended(self, estimate_s: float) -> None:
        """Count a run, and put right what its steps made of it."""
        self._ended += 1
        self._whole_s, self._within_s = self._whole_s + estimate_s, 0.0
        self._show()
        if not self._console.is_terminal:
            self._console.print(f"{self._counts()}, {self._left()}", style="dim", highlight=False)

    def _counts(self) -> str:
        return f"{self._ended} of {self._runs} runs"

    def _left(self) -> str:
        return f"{format_duration(self._time.left_s)} left"

    def _show(self) -> None:
        self._time.done_s = self._whole_s + self._within_s
        self._progress.update(
            self._task, completed=self._time.done_s, counts=self._counts(), left=self._left()
        )


@contextmanager
def bar_progress(console: Console, total_steps: int) -> Iterator[LabProgress]:
    """Show a progress bar while the block runs.

    Args:
        console: where; on one that is no terminal each phase is a line, without a bar.
        total_steps: the bar's length.
    """
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        yield _BarProgress(progress, total_steps)


@contextmanager
def runs_progress(console: Console) -> Iterator[CellsProgress]:
    """Show a progress bar for the runs of a grid while the block runs.

    Args:
        console: where; on one that is no terminal each phase and each run is a line.
    """
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        yield _RunsProgress(progress)


def _optional(value: float | None, spelling: str) -> str:
    return "-" if value is None else format(value, spelling)


def _caption(row: Row, no_evidence: str) -> str:
    """Return what all lines of a table have in common."""
    repeats = row.over_repeats.repeats if row.over_repeats else 1
    text = (
        f"{row.workers} workers{_nodes_text(row)} at {format_rate(row.rate_bps)} "
        f"(goodput {format_rate(row.goodput_bps)}), dilation {row.dilation:g}, "
        f"{row.steps} steps, {repeats} repeat{'s' if repeats > 1 else ''}\n"
        f"compute {format_time(row.compute_s)} a step"
    )
    if row.straggler is not None:
        text += (
            f"; rank {row.straggler['rank']} stopped for {row.straggler['share']:.0%} of the time, "
            "times are those of the others"
        )
    if row.serving:
        text += f"; slices on {servers_text(None, row.serving)}"
    elif row.servers is not None:
        text += f"; slices on {row.servers} ranks"
    if row.bound_step_s is not None:
        text += f", bound {format_time(row.bound_step_s)}"
        if row.bound_binding is not None:
            text += f" ({describe_binding(row.bound_binding)})"
    if no_evidence:
        text += f"\n* {no_evidence}"
    return text


def _nodes_text(row: Row) -> str:
    """Return how workers share nodes, where they do."""
    if row.ranks_per_node == 1:
        return ""
    return f" on {row.workers // row.ranks_per_node} nodes of {row.ranks_per_node}"


def _nodes_caption(rows: Sequence[Row]) -> str:
    """Return what went through a node's port, and what should have; empty with a rank a node."""
    last = {row.strategy: row for row in rows if row.ranks_per_node > 1}
    plain = last.get("p3")
    lines = []
    for row in last.values():
        if row.expected_tx_bytes is None:
            continue
        sent_mb, expected_mb = row.tx_bytes_per_step / 1e6, row.expected_tx_bytes / 1e6
        line = f"\n{row.strategy}: {sent_mb:.1f} MB a step left a node's port with headers"
        line += f", {expected_mb:.1f} MB of gradients by the scheme's cost"
        if plain is not None and plain is not row:
            line += f"; {row.tx_bytes_per_step / plain.tx_bytes_per_step:.3f} of p3's"
        lines.append(line)
    return "".join(lines)


def summary_table(rows: Sequence[Row], title: str) -> Table:
    """Return a table with a line for each strategy of one workload at one rate.

    Args:
        rows: summarized rows of one encoding that differ in strategy and repeat only.
        title: the table's heading.
    """
    shows_loss = any(row.has_losses for row in rows)
    no_evidence = text_of_no_evidence(rows)
    notes = [*bound_notes(rows), *factor_notes(rows), *balance_notes(rows), *norm_notes(rows)]
    # Replays have no loss; with both columns the table would not fit 80 characters.
    last = "loss" if shows_loss else "MB/step"
    stopped = rows[0].straggler
    further = ("mean step", "left out") if stopped is not None else ()
    body = []
    for strategy in dict.fromkeys(row.strategy for row in rows):
        group = [row for row in rows if row.strategy == strategy]
        over = group[0].over_repeats
        assert over is not None, "summarize() comes before the table"
        body.append(
            [
                strategy,
                f"{over.samples_per_s:.1f}",
                format_time(over.step_s),
                *([] if stopped is None else _left_out(group, stopped["rank"])),
                _optional(over.step_over_bound, ".3f"),
                _optional(over.speedup_over_ddp, ".3f"),
                f"{over.link_utilization:.0%}",
                f"{over.cpu_share:.0%}" + ("*" if any(row.cpu_bound for row in group) else ""),
                f"{group[0].loss[-1]:.4f}"
                if shows_loss
                else f"{group[0].tx_bytes_per_step / 1e6:.1f}",
                _parameters(group),
            ]
        )
    headings = ("strategy", "samples/s", "step", *further, "/bound", "x DDP", "link", "CPU", last)
    caption = "\n".join([_caption(rows[0], no_evidence) + _nodes_caption(rows), *notes])
    return text_table(title, (*headings, "digest"), body, caption=caption)


def _left_out(group: Sequence[Row], rank: int) -> list[str]:
    """Return the mean step of all repeats, and the share of steps without a rank."""
    rows = [row.metrics.get("left_out") or [] for row in group]
    shares = [row[rank]["left_out_share"] for row in rows if rank < len(row)]
    mean_s = statistics.fmean(row.step_s_mean for row in group)
    return [format_time(mean_s), f"{statistics.fmean(shares):.0%}" if shares else "-"]


def _parameters(group: Sequence[Row]) -> str:
    """Return the beginning of the digest that all ranks and repeats share, or that they do not."""
    if not group[0].communicates:
        return "-"
    if not all(row.params_equal for row in group):
        return "ranks differ"
    digests = {row.param_digest for row in group}
    return str(group[0].param_digest)[:8] if len(digests) == 1 else "repeats differ"


def print_tables(console: Console, rows: Sequence[Row]) -> None:
    """Print a summary table for each rate in the rows, and for each encoding of gradients."""
    for rate_bps in dict.fromkeys(row.rate_bps for row in rows):
        at_rate = [row for row in rows if row.rate_bps == rate_bps]
        title = f"{at_rate[0].workload} at {format_rate(rate_bps)}"
        for encoding, own in by_encoding(at_rate).items():
            named = title if encoding == RAW else f"{title}, gradients in {encoding}"
            console.print(summary_table(own, named))
        losses = loss_table(at_rate)
        if losses is not None:
            console.print(losses)
