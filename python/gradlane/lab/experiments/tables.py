"""What a preset prints at its end; the page and the rows say more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from gradlane.formats.rates import format_rate
from gradlane.lab.experiments import findings
from gradlane.lab.experiments.activity import busiest_port, is_communication_bound, least_unused
from gradlane.lab.experiments.slices import STRATEGY, sweeps_of
from gradlane.lab.runs.balance import EVEN_BELOW
from gradlane.lab.runs.cells import CEILING
from gradlane.planning.simulation.scenarios import RING_FUSED
from gradlane.report.console import format_time

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


def print_utilization(console: Console, rows: Sequence[Row]) -> None:
    """Print a line for each measured run: how idle its busiest port was."""
    table = plain_table(
        "use of the network",
        "run",
        "step",
        "busiest port",
        "idle",
        "unused",
        "at bound",
        "CPU",
        "limit",
    )
    for row in findings.measured(rows):
        if "activity" not in row or row["strategy"] == CEILING:
            continue
        port, least = busiest_port(row), least_unused(row)
        table.add_row(
            f"{row['workload']} at {format_rate(float(row['rate_bps']))}, {row['strategy']}",
            format_time(float(row["step_s_median"])),
            f"node {port.node} {port.direction}",
            f"{port.idle_share:.1%}",
            f"{port.unused_share:.1%}",
            "-" if least is None else f"{least:.1%}",
            f"{float(row['cpu_share']):.0%}",
            "communication" if is_communication_bound(row) else "compute",
        )
    console.print(table)
    _print_ports(console, rows)


def _print_ports(console: Console, rows: Sequence[Row]) -> None:
    """Print what went through each port, of clusters in which some run's ports differ."""
    shown = [row for row in findings.measured(rows) if (row.get("balance") or {}).get("nodes")]
    shown = [row for row in shown if row["strategy"] != CEILING]
    uneven = [row for row in shown if float(row["balance"]["port_imbalance"]) >= EVEN_BELOW]
    clusters = {findings.cluster_of(row) for row in uneven}
    for cluster in sorted(clusters, key=str):
        here = [row for row in shown if findings.cluster_of(row) == cluster]
        count = max(len(row["balance"]["nodes"]) for row in here)
        table = plain_table(
            f"{cluster[0]} at {format_rate(cluster[2])}: MB a step out of and into each node",
            "strategy",
            *(f"node {node}" for node in range(count)),
            "largest / mean",
        )
        for row in here:
            cells = [
                f"{node['tx_bytes_per_step'] / 1e6:.0f} / {node['rx_bytes_per_step'] / 1e6:.0f}"
                for node in row["balance"]["nodes"]
            ]
            most = f"{float(row['balance']['port_imbalance']):.2f}"
            table.add_row(str(row["strategy"]), *cells, *[""] * (count - len(cells)), most)
        console.print(table)


def print_slices(console: Console, rows: Sequence[Row]) -> None:
    """Print a table for each sweep."""
    for sweep in sweeps_of(rows):
        table = plain_table(
            f"{sweep.cluster[0]} at {format_rate(sweep.cluster[2])} with {STRATEGY}",
            "elements of a slice",
            "samples/s",
            "step",
            "to best",
            "to bound",
            "simulated",
            "CPU",
        )
        best_s = float(sweep.best["step_s_median"])
        for row in sweep.rows:
            mark = " best" if row is sweep.best else ""
            mark += " planned" if row is sweep.planned else ""
            table.add_row(
                f"{int(row['slice_elems']):,}{mark}",
                _throughput(row),
                format_time(float(row["step_s_median"])),
                f"{float(row['step_s_median']) / best_s - 1:+.1%}",
                _over_bound(row),
                _throughput(findings.counterpart(row, rows)),
                f"{float(row['cpu_share']):.0%}",
            )
        console.print(table)


def print_scaling(console: Console, rows: Sequence[Row]) -> None:
    """Print a line for each number of workers and strategy."""
    table = plain_table(
        "throughput against the number of workers",
        "workload and strategy",
        "workers",
        "source",
        "samples/s",
        "of linear",
        "to bound",
    )
    for row in rows:
        if row["strategy"] == CEILING or row["cpu_bound"]:
            continue
        table.add_row(
            f"{row['workload']} with {row['strategy']}",
            f"{int(row['workers']):,}",
            str(row["source"]),
            _throughput(row),
            f"{float(row['compute_s']) / float(row['step_s_median']):.0%}",
            "-" if row["strategy"] == RING_FUSED else _over_bound(row),
        )
    console.print(table)
