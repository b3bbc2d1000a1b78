"""Use of every port and processor over time, as in figures 8 and 9 of the P3 paper.

Networks at rates at which communication takes longer than compute, so that a port that is idle
is time lost.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from gradlane.lab.cluster.counters import Recording
from gradlane.lab.runs.options import LabOptions
from gradlane.lab.runs.page_parts import percent
from gradlane.lab.runs.rows import CEILING, Row
from gradlane.lab.runs.run import LabProgress, run_lab
from gradlane.lab.runs.traffic import Activity, activity_of
from gradlane.report.page import Block, Cell, KeyFigure, Section, Table
from gradlane.report.plots import Plot, line_plot
from gradlane_papers.experiments import parts
from gradlane_papers.experiments.findings import Findings, clusters_of
from gradlane_papers.experiments.preset import GBIT, Preset

IDLE_BELOW = 0.05
"""A port that carries less than this share of its goodput in an interval is idle in it."""
GOAL_IDLE = 0.05
STEPS_SHOWN = 2
"""Steps in the plots; the rows have them all."""
CPU_TOGETHER = 5
"""Intervals whose processor time is shown as one: the kernel hands it out in larger pieces."""


@dataclass(frozen=True)
class PortUse:
    """One direction of one node's port over the measured steps."""

    node: int
    direction: str
    """`in` or `out`."""
    bytes_per_step: float
    idle_share: float
    """Share of the intervals in which it carried almost nothing."""
    unused_share: float
    """Share of what it could have carried that it did not."""


def _activity(row: Row) -> Activity:
    assert row.activity is not None, "only rows whose ports were sampled are shown"
    return row.activity


def ports_of(row: Row) -> list[PortUse]:
    """Return the use of every port and direction in a row with `activity`."""
    activity = _activity(row)
    carriable = row.goodput_bps / row.dilation / 8 * activity.wall_interval_s
    return [
        PortUse(
            node,
            direction,
            sum(moved) / row.steps,
            sum(count < IDLE_BELOW * carriable for count in moved) / len(moved),
            1.0 - sum(moved) / (carriable * len(moved)),
        )
        for direction, nodes in (("in", activity.received_bytes), ("out", activity.sent_bytes))
        for node, moved in enumerate(nodes)
    ]


def busiest_port(row: Row) -> PortUse:
    """Return the port and direction that carried the most bytes."""
    return max(ports_of(row), key=lambda port: port.bytes_per_step)


def is_communication_bound(row: Row) -> bool:
    """Return whether even perfect overlap leaves compute waiting: then a port need not be idle."""
    return row.bound_step_s is not None and row.bound_step_s > 1.001 * row.compute_s


def least_unused(row: Row) -> float | None:
    """Return the share of its capacity that the busiest port must leave unused even at the bound.

    It is above nothing where the bound is set by what comes late and is needed early.
    """
    if not row.bound_step_s:
        return None
    port_s = 8 * busiest_port(row).bytes_per_step / row.goodput_bps
    return max(0.0, 1.0 - port_s / row.bound_step_s)


def summed(values: Sequence[float], together: int) -> list[float]:
    """Return sums of so many neighbouring intervals; a rest at the end is left out."""
    whole = len(values) // together
    return [sum(values[index * together : (index + 1) * together]) for index in range(whole)]


def _limit(row: Row) -> str:
    return "communication" if is_communication_bound(row) else "compute"


def with_activity(row: Row, recording: Recording) -> Row:
    """Return a row with what was sampled for it."""
    return replace(row, activity=activity_of(recording, row.dilation))


def _run(
    options: LabOptions, *, progress: LabProgress, on_rows: Callable[[list[Row]], None]
) -> list[Row]:
    return run_lab(options, progress=progress, on_rows=on_rows, on_recording=with_activity)


def is_shown(row: Row) -> bool:
    """Return whether a row says what ports did."""
    return row.communicates and row.activity is not None


def _shown(found: Findings) -> list[Row]:
    return [row for row in found.measured if is_shown(row)]


def _bound_rows(found: Findings) -> dict[str, list[Row]]:
    """Return the rows by strategy in which communication is the limit."""
    bound = [row for row in _shown(found) if is_communication_bound(row)]
    names = dict.fromkeys(row.strategy for row in _shown(found))
    groups = {name: [row for row in bound if row.strategy == name] for name in names}
    return {name: rows for name, rows in groups.items() if rows}


def _summary(found: Findings) -> str:
    parts_found = [
        f"{statistics.fmean(busiest_port(row).idle_share for row in rows):.1%} with {strategy}"
        for strategy, rows in _bound_rows(found).items()
    ]
    if not parts_found:
        return ""
    text = ", ".join(parts_found)
    return f"Idle time of the busiest port where communication is the limit: {text}."


def _figures(found: Findings) -> Iterator[KeyFigure]:
    for strategy, rows in _bound_rows(found).items():
        worst = max(rows, key=lambda row: busiest_port(row).idle_share)
        idle = busiest_port(worst).idle_share
        tone = ("good" if idle < GOAL_IDLE else "bad") if strategy == "p3" else ""
        label = f"{strategy}: busiest port idle, at worst ({worst.cluster.title})"
        yield KeyFigure(f"{idle:.1%}", label, tone)


def _sections(found: Findings) -> Iterator[Section]:
    for cluster, rows in clusters_of(_shown(found)).items():
        plots = [plot(row) for row in rows for plot in (_port_plot, _cpu_plot)]
        blocks: list[Block] = [_idle_table(rows, found), *plots, _balance_table(rows)]
        yield Section(cluster.title, blocks)


def _idle_table(rows: Sequence[Row], found: Findings) -> Table:
    columns: tuple[parts.Column, ...] = (
        parts.STRATEGY,
        parts.STEP,
        parts.TO_BOUND,
        ("busiest port", lambda row, _: _name(busiest_port(row))),
        ("idle, %", lambda row, _: percent(busiest_port(row).idle_share)),
        ("unused, %", lambda row, _: percent(busiest_port(row).unused_share)),
        ("unused at the bound, %", lambda row, _: percent(least_unused(row))),
        ("limit", lambda row, _: _limit(row)),
    )
    body = [[cell(row, found) for _, cell in columns] for row in rows]
    caption = "Idle and unused: of the port and direction that carried most."
    return Table([heading for heading, _ in columns], body, caption)


def _name(port: PortUse) -> str:
    return f"node {port.node}, {port.direction}"


def _port_plot(row: Row) -> Plot:
    activity = _activity(row)
    interval_s = activity.wall_interval_s / row.dilation
    count = _count_shown(activity, interval_s)
    times_s = [round((index + 0.5) * interval_s, 5) for index in range(count)]
    series: dict[str, tuple[list[float], list[float]]] = {}
    colors: dict[str, int | str] = {"goodput": "text"}
    for node, both in enumerate(zip(activity.sent_bytes, activity.received_bytes, strict=True)):
        for direction, moved, color in zip(("out", "in"), both, (1, 0), strict=True):
            rates = [round(8 * one / interval_s / 1e9, 3) for one in moved[:count]]
            series[f"node {node} {direction}"] = (times_s, rates)
            colors[f"node {node} {direction}"] = 2 * node + color
    hidden = list(series)[2:]
    series["goodput"] = (times_s, [round(row.goodput_bps / 1e9, 3)] * count)
    plot = line_plot(
        f"{parts.marked(row)}: bytes in and out of a port",
        series,
        x_label="nominal time, s",
        y_label="Gbit/s",
        colors=colors,
        dashed=("goodput",),
        hidden=hidden,
        width=1.25,
        y_from_zero=True,
        note="Dotted: a step begins on the slowest rank. Click a name for the ports of other nodes."
        " An interval may be above the goodput where a sample came late.",
        is_low=True,
    )
    for trace in plot.traces[:-1]:
        trace["hovertemplate"] = "%{y:.2f} Gbit/s"
    plot.traces[-1]["hoverinfo"] = "skip"
    line = {"type": "line", "y0": 0, "y1": 1, "yref": "paper"}
    look = {"width": 1, "dash": "dot", "color": "gray"}
    plot.layout["shapes"] = [
        {**line, "x0": start_s, "x1": start_s, "line": look}
        for start_s in activity.step_starts_s
        if times_s and start_s <= times_s[-1]
    ]
    return plot


def _count_shown(activity: Activity, interval_s: float) -> int:
    starts_s = activity.step_starts_s
    end_s = starts_s[min(STEPS_SHOWN, len(starts_s) - 1)]
    return min(len(activity.sent_bytes[0]), max(1, int(end_s / interval_s)))


def _cpu_plot(row: Row) -> Plot:
    activity = _activity(row)
    count = _count_shown(activity, activity.wall_interval_s / row.dilation)
    together_s = CPU_TOGETHER * activity.wall_interval_s
    series = {}
    for rank, used_s in enumerate(activity.rank_cpu_s):
        sums = summed(used_s[:count], CPU_TOGETHER)
        middles_s = [
            round((index + 0.5) * together_s / row.dilation, 5) for index in range(len(sums))
        ]
        shares = [round(100 * value / together_s, 1) for value in sums]
        series[f"rank {rank}"] = (middles_s, shares)
    plot = line_plot(
        f"{parts.marked(row)}: processors",
        series,
        x_label="nominal time, s",
        y_label="% of a processor",
        colors={name: 2 * rank for rank, name in enumerate(series)},
        width=1.25,
        y_from_zero=True,
        note=f"Share of one processor, over {1e3 * together_s:g} ms of real time each. Compute is "
        "asleep here, so this is what communication costs, with time "
        f"{row.dilation:g} times as long as it nominally is.",
        is_low=True,
    )
    for trace in plot.traces:
        trace["hovertemplate"] = "%{y:.0f} %"
    return plot


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
        used_s = _activity(row).rank_cpu_s
        into = [port for port in ports if port.direction == "in"]
        out = [port for port in ports if port.direction == "out"]
        for node in range(len(out)):
            both = (out[node], into[node])
            body.append(
                [
                    parts.marked(row),
                    node,
                    *(round(port.bytes_per_step / 1e6, 1) for port in both),
                    *(_from_mean(port, all_) for port, all_ in zip(both, (out, into), strict=True)),
                    *(percent(port.idle_share) for port in both),
                    round(sum(used_s[node]) / row.steps, 3) if used_s else None,
                ]
            )
    return Table(columns, body, "Balance over the nodes; processor seconds are real.")


def _from_mean(port: PortUse, ports: Sequence[PortUse]) -> float | None:
    mean = statistics.fmean(one.bytes_per_step for one in ports)
    return percent(port.bytes_per_step / mean - 1) if mean > 0 else None


UTILIZATION = Preset(
    name="utilization",
    title="Use of the network over time",
    rates_bps={
        "resnet50": (round(1.5 * GBIT), 4 * GBIT),
        "sockeye": (4 * GBIT,),
        "vgg19": (10 * GBIT,),
    },
    strategies=(CEILING, "p3", "slicing", "kvstore", "ddp-gloo:25"),
    steps=3,
    run=_run,
    is_shown=is_shown,
    summary=_summary,
    figures=_figures,
    sections=_sections,
    text="Every port was read every 10 ms of real time in both directions. An interval in which "
    f"a port carries less than {IDLE_BELOW:.0%} of its goodput counts as idle; what is unused is "
    "all that it could have carried and did not. Only steps whose bound is above compute are "
    "counted: elsewhere a port has to be idle. Where late gradients of layers that are needed "
    "early set the bound, even perfect overlap leaves ports unused.",
)
