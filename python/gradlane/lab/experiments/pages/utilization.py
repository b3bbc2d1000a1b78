"""The page of the utilization experiment: what ports and ranks did, interval after interval."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gradlane.formats.rates import format_rate
from gradlane.lab.experiments import findings
from gradlane.lab.experiments.activity import (
    IDLE_BELOW,
    busiest_port,
    is_communication_bound,
    least_unused,
    ports_of,
    summed,
)
from gradlane.lab.runs.cells import CEILING
from gradlane.report.page import Block, Cell, Figure, Figures, Paragraph, Section, Table
from gradlane.report.plots import Plot

Row = Mapping[str, Any]
TITLE = "Use of the network over time"
GOAL_IDLE = 0.05
STEPS_SHOWN = 2
"""Steps in the plots; the rows have them all."""
CPU_TOGETHER = 5
"""Intervals whose processor time is shown as one: the kernel hands it out in larger pieces."""


def page_of(rows: Sequence[Row]) -> tuple[str, str, list[Section]]:
    """Return title, summary and sections.

    Raises:
        ValueError: no row that communicates has its activity.
    """
    evidence = [
        row for row in findings.measured(rows) if "activity" in row and row["strategy"] != CEILING
    ]
    if not evidence:
        raise ValueError("no row has the activity of its ports: measure on an idle machine")
    sections = [Section("In short", _in_short(evidence))]
    for cluster in findings.clusters_of(evidence):
        own = [row for row in evidence if findings.cluster_of(row) == cluster]
        title = f"{cluster[0]} at {format_rate(cluster[2])}"
        blocks: list[Block] = [_idle_table(own)]
        for row in own:
            blocks += [_port_plot(row), _cpu_plot(row)]
        blocks.append(_balance_table(own))
        sections.append(Section(title, blocks))
    return TITLE, _summary(evidence), sections


def _bound_rows(rows: Sequence[Row], strategy: str) -> list[Row]:
    return [row for row in rows if row["strategy"] == strategy and is_communication_bound(row)]


def _summary(rows: Sequence[Row]) -> str:
    parts = []
    for strategy in dict.fromkeys(str(row["strategy"]) for row in rows):
        own = _bound_rows(rows, strategy)
        if own:
            idle = statistics.fmean(busiest_port(row).idle_share for row in own)
            parts.append(f"{idle:.1%} with {strategy}")
    if not parts:
        return ""
    return f"Idle time of the busiest port where communication is the limit: {', '.join(parts)}."


def _in_short(rows: Sequence[Row]) -> list[Block]:
    figures = []
    for strategy in dict.fromkeys(str(row["strategy"]) for row in rows):
        own = _bound_rows(rows, strategy)
        if not own:
            continue
        worst = max(own, key=lambda row: busiest_port(row).idle_share)
        idle = busiest_port(worst).idle_share
        tone = ("good" if idle < GOAL_IDLE else "bad") if strategy == "p3" else ""
        where = f"{worst['workload']} at {format_rate(float(worst['rate_bps']))}"
        figures.append(
            Figure(f"{idle:.1%}", f"{strategy}: busiest port idle, at worst ({where})", tone)
        )
    return [
        Figures(figures),
        Paragraph(
            "Every port was read every 10 ms of real time in both directions. An interval in which "
            f"a port carries less than {IDLE_BELOW:.0%} of its goodput counts as idle; what is "
            "unused is all that it could have carried and did not. Only steps whose bound is above "
            "compute are counted: elsewhere a port has to be idle. Where late gradients of layers "
            "that are needed early set the bound, even perfect overlap leaves ports unused."
        ),
    ]


def _idle_table(rows: Sequence[Row]) -> Table:
    columns = (
        "strategy",
        "step, ms",
        "to bound, %",
        "busiest port",
        "idle, %",
        "unused, %",
        "unused at the bound, %",
        "limit",
    )
    body: list[list[Cell]] = []
    for row in rows:
        port = busiest_port(row)
        least = least_unused(row)
        body.append(
            [
                str(row["strategy"]),
                round(float(row["step_s_median"]) * 1e3, 1),
                None
                if not row.get("bound_step_s")
                else round(100 * (float(row["step_s_median"]) / float(row["bound_step_s"]) - 1), 1),
                f"node {port.node}, {port.direction}",
                round(100 * port.idle_share, 1),
                round(100 * port.unused_share, 1),
                None if least is None else round(100 * least, 1),
                "communication" if is_communication_bound(row) else "compute",
            ]
        )
    return Table(columns, body, "Idle and unused: of the port and direction that carried most.")


def _port_plot(row: Row) -> Plot:
    activity = row["activity"]
    dilation = float(row["dilation"])
    interval_s = float(activity["wall_interval_s"]) / dilation
    count = _shown(activity, interval_s)
    times_s = [round((index + 0.5) * interval_s, 5) for index in range(count)]
    traces: list[dict[str, Any]] = []
    for node in range(len(activity["sent_bytes"])):
        for name, key, color in (("out", "sent_bytes", 1), ("in", "received_bytes", 0)):
            rates = [
                round(8 * moved / interval_s / 1e9, 3) for moved in activity[key][node][:count]
            ]
            trace: dict[str, Any] = {
                "type": "scatter",
                "mode": "lines",
                "name": f"node {node} {name}",
                "x": times_s,
                "y": rates,
                "line": {"width": 1.25},
                "meta": {"color": color + 2 * node},
                "hovertemplate": "%{y:.2f} Gbit/s",
            }
            if node > 0:
                trace["visible"] = "legendonly"
            traces.append(trace)
    traces.append(_level("goodput", times_s, float(row["goodput_bps"]) / 1e9))
    layout = _layout("nominal time, s", "Gbit/s")
    layout["shapes"] = [
        {
            "type": "line",
            "x0": start_s,
            "x1": start_s,
            "y0": 0,
            "y1": 1,
            "yref": "paper",
            "line": {"width": 1, "dash": "dot", "color": "gray"},
        }
        for start_s in activity["step_starts_s"]
        if start_s <= (times_s[-1] if times_s else 0.0)
    ]
    return Plot(
        f"{row['strategy']}: bytes in and out of a port",
        traces,
        layout,
        "Dotted: a step begins on the slowest rank. Click a name for the ports of other nodes. An "
        "interval may be above the goodput where a sample came late.",
        is_low=True,
    )


def _shown(activity: Mapping[str, Any], interval_s: float) -> int:
    starts_s = activity["step_starts_s"]
    end_s = starts_s[min(STEPS_SHOWN, len(starts_s) - 1)]
    return min(len(activity["sent_bytes"][0]), max(1, int(end_s / interval_s)))


def _level(name: str, times_s: Sequence[float], value: float) -> dict[str, Any]:
    ends = [times_s[0], times_s[-1]] if times_s else []
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": ends,
        "y": [round(value, 3)] * len(ends),
        "line": {"width": 1.25, "dash": "dash"},
        "meta": {"color": "text"},
        "hoverinfo": "skip",
    }


def _cpu_plot(row: Row) -> Plot:
    activity = row["activity"]
    interval_s = float(activity["wall_interval_s"])
    dilation = float(row["dilation"])
    count = _shown(activity, interval_s / dilation)
    traces = []
    together_s = CPU_TOGETHER * interval_s
    for rank, used_s in enumerate(activity["rank_cpu_s"]):
        sums = summed(used_s[:count], CPU_TOGETHER)
        middles_s = [(index + 0.5) * together_s / dilation for index in range(len(sums))]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"rank {rank}",
                "x": [round(middle_s, 5) for middle_s in middles_s],
                "y": [round(100 * value / together_s, 1) for value in sums],
                "line": {"width": 1.25},
                "meta": {"color": 2 * rank},
                "hovertemplate": "%{y:.0f} %",
            }
        )
    note = (
        f"Share of one processor, over {1e3 * CPU_TOGETHER * interval_s:g} ms of real time each. "
        f"Compute is asleep here, so this is what communication costs, with time {dilation:g} "
        "times as long as it nominally is."
    )
    layout = _layout("nominal time, s", "% of a processor")
    return Plot(f"{row['strategy']}: processors", traces, layout, note, is_low=True)


def _layout(x_label: str, y_label: str) -> dict[str, Any]:
    return {
        "xaxis": {"title": {"text": x_label}, "automargin": True},
        "yaxis": {"title": {"text": y_label}, "automargin": True, "rangemode": "tozero"},
    }


def _balance_table(rows: Sequence[Row]) -> Table:
    columns = (
        "strategy",
        "node",
        "out, MB/step",
        "in, MB/step",
        "out to mean, %",
        "in to mean, %",
        "idle out, %",
        "idle in, %",
        "CPU s/step",
    )
    body: list[list[Cell]] = []
    for row in rows:
        ports = ports_of(row)
        means = {
            direction: statistics.fmean(
                port.bytes_per_step for port in ports if port.direction == direction
            )
            for direction in ("in", "out")
        }
        used_s = row["activity"]["rank_cpu_s"]
        for node in range(len(row["activity"]["sent_bytes"])):
            here = {port.direction: port for port in ports if port.node == node}
            out, into = here["out"], here["in"]
            body.append(
                [
                    str(row["strategy"]),
                    node,
                    round(out.bytes_per_step / 1e6, 1),
                    round(into.bytes_per_step / 1e6, 1),
                    _from_mean(out.bytes_per_step, means["out"]),
                    _from_mean(into.bytes_per_step, means["in"]),
                    round(100 * out.idle_share, 1),
                    round(100 * into.idle_share, 1),
                    round(sum(used_s[node]) / int(row["steps"]), 3) if used_s else None,
                ]
            )
    return Table(columns, body, "Balance over the nodes; processor seconds are real.")


def _from_mean(value: float, mean: float) -> float | None:
    return round(100 * (value / mean - 1), 1) if mean > 0 else None
