"""What a preset prints at its end; the page and the rows say more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from gradlane.lab.cells import CEILING
from gradlane.lab.presets import findings
from gradlane.lab.rates import format_rate

Row = Mapping[str, Any]


def plain_table(title: str, *headings: str) -> Table:
    """Return an empty table whose first column is text and whose others are numbers."""
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    return table


def print_bandwidth(console: Console, rows: Sequence[Row]) -> None:
    """Print a line for each measured cluster: the fastest strategy, the best DDP and the bound."""
    table = plain_table(
        "throughput against bandwidth, samples/s",
        "cluster",
        "p3",
        "fastest",
        "best DDP",
        "p3 x DDP",
        "p3 to bound",
        "simulated",
    )
    evidence = findings.measured(rows)
    for cluster in findings.clusters_of(evidence):
        own = [row for row in evidence if findings.cluster_of(row) == cluster]
        sending = [row for row in own if row["strategy"] != CEILING]
        if not sending:
            continue
        p3 = next((row for row in own if row["strategy"] == "p3"), None)
        fastest = min(sending, key=lambda row: float(row["step_s_median"]))
        ddp = findings.best_baseline(own, cluster)
        simulated = None if p3 is None else findings.counterpart(p3, rows)
        table.add_row(
            f"{cluster[0]} at {format_rate(cluster[2])}",
            _throughput(p3),
            str(fastest["strategy"]),
            _throughput(ddp),
            _ratio(ddp, p3),
            _over_bound(p3),
            _throughput(simulated),
        )
    console.print(table)


def _throughput(row: Row | None) -> str:
    return "-" if row is None else f"{float(row['samples_per_s']):.1f}"


def _ratio(slower: Row | None, faster: Row | None) -> str:
    if slower is None or faster is None:
        return "-"
    return f"{float(slower['step_s_median']) / float(faster['step_s_median']):.3f}"


def _over_bound(row: Row | None) -> str:
    if row is None or not row.get("bound_step_s"):
        return "-"
    return f"{float(row['step_s_median']) / float(row['bound_step_s']) - 1.0:+.1%}"
