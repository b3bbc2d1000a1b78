"""Throughput against bandwidth, as in figure 7 of the P3 paper (Jayarajan et al., SysML 2019).

Four networks from rates at which communication takes twice as long as compute to rates at which it
hides: every strategy of the engine, DDP with three bucket sizes of which the best counts, and
compute alone. The simulator fills in the curve between the measured rates.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from gradlane.formats.rates import format_rate
from gradlane.lab.runs.cells import dilation_by_load
from gradlane.lab.runs.page_parts import percent
from gradlane.lab.runs.rows import CEILING, NO_EVIDENCE, Row
from gradlane.report.curves import Points, curve_plot
from gradlane.report.page import Block, Cell, KeyFigure, Paragraph, Section, Table
from gradlane.report.plots import Plot
from gradlane.training.options.strategy import STRATEGIES as ENGINE_STRATEGIES
from gradlane_papers.experiments import findings, parts
from gradlane_papers.experiments.findings import Findings
from gradlane_papers.experiments.preset import GBIT, Preset
from gradlane_papers.experiments.simulated import Simulation, compute_times

QUICK_LIMIT_S = 15 * 60
LIMIT_S = 2 * 3600
"""Seconds that measuring may take on two cores; a test compares the estimates with it."""
SIMULATED_BETWEEN = 2
"""Simulated rates between two measured ones."""
DDP = "best DDP"
GAIN = "p3"
"""The strategy whose gains the page tells first."""
_TABLE = (
    parts.RATE,
    parts.STRATEGY,
    parts.SAMPLES,
    parts.STEP,
    parts.TO_BOUND,
    ("× best DDP", lambda row, found: _times_ddp(row, found)),
    parts.SIMULATED_MS,
    parts.ERROR,
    parts.PORTS,
    parts.CPU,
)
_CAPTION = (
    "Medians of the measured steps, nominal. × best DDP: how many times as fast as the fastest "
    "DDP of the same cluster. Error: simulated over measured step, minus one. Ports: share of "
    f"the goodput used. CPU: of all processors of this machine; * {NO_EVIDENCE}. "
    "The fastest that communicates is set off."
)


def curves(rows: Sequence[Row]) -> list[Simulation]:
    """Return what is simulated: all of the engine's strategies, at and between the measured rates.

    Args:
        rows: the rows so far; each network in them gets its curves.
    """
    found = []
    for workload, compute_s in compute_times(rows).items():
        own = [row for row in rows if row.workload == workload and not row.is_simulated]
        dilations = {row.rate_bps: row.dilation for row in own}
        strategies = dict.fromkeys(row.strategy for row in own if row.strategy in ENGINE_STRATEGIES)
        found += [
            Simulation(workload, strategy, own[0].workers, rate_bps, dilation, compute_s)
            for strategy in strategies
            for rate_bps, dilation in between(dilations).items()
        ]
    return found


def between(dilations: Mapping[int, float]) -> dict[int, float]:
    """Return rates at and between the given ones, at equal ratios, each with its dilation.

    Args:
        dilations: by rate. Between two rates, real ports are as fast as between theirs.
    """
    ordered = sorted(dilations)
    found: dict[int, float] = {}
    for low, high in itertools.pairwise(ordered):
        found[low] = dilations[low]
        for step in range(1, SIMULATED_BETWEEN + 1):
            share = step / (SIMULATED_BETWEEN + 1)
            rate_bps = round(low * (high / low) ** share / 1e6) * 10**6
            real_bps = (low / dilations[low]) ** (1 - share) * (high / dilations[high]) ** share
            found[rate_bps] = round(rate_bps / real_bps, 2)
    found.update({rate_bps: dilations[rate_bps] for rate_bps in ordered[-1:]})
    return found


def _summary(found: Findings) -> str:
    gains = found.gains(GAIN)
    if not gains:
        return ""
    best, ratio = max(gains, key=lambda gain: gain[1])
    over = best.over_bound
    distance = "compared with" if over is None else f"{over - 1.0:+.1%} to"
    return (
        f"{GAIN} trains up to {ratio:.2f} times as fast as the best DDP: "
        f"{best.cluster.title}, where its step is {distance} the bound."
    )


def _figures(found: Findings) -> Iterator[KeyFigure]:
    ratios = [ratio for _, ratio in found.gains(GAIN)]
    if ratios:
        tone = "good" if min(ratios) > 1.0 - findings.TOLERANCE else "bad"
        yield KeyFigure(f"{max(ratios):.2f}×", f"{GAIN} over the best DDP, at most", "good")
        yield KeyFigure(f"{min(ratios):.2f}×", f"{GAIN} over the best DDP, at least", tone)
    distances = [ratio for _, ratio in found.over_bound(GAIN)]
    if distances:
        near = [ratio for ratio in distances if ratio <= findings.GOAL_OVER_BOUND]
        yield KeyFigure(
            f"{len(near)} of {len(distances)}",
            f"clusters with {GAIN} within 5 % of the bound",
            "good" if len(near) == len(distances) else "bad",
        )
        middle = statistics.median(distances)
        yield KeyFigure(f"{middle - 1.0:+.1%}", f"{GAIN} to the bound, median")
    errors = found.prediction_errors()
    if errors:
        middle = statistics.median(map(abs, errors))
        yield KeyFigure(f"{middle:.1%}", "error of the simulator's steps, median")


def _remarks(found: Findings) -> Iterator[Block]:
    beaten = found.faster_than_bound()
    if beaten:
        names = ", ".join(f"{row.strategy} ({row.cluster.title})" for row in beaten)
        yield Paragraph(f"Faster than their bound, so something is wrong: {names}.")


def _sections(found: Findings) -> Iterator[Section]:
    for workload in dict.fromkeys(row.workload for row in found.measured):
        own = found.of_workload(workload)
        yield Section(workload, [_throughput(own, workload), _distance(own, workload), _rows(own)])
    yield Section("Order of the strategies", _order(found))


def _by_strategy(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each of the engine's strategies that has some."""
    groups = {name: [row for row in rows if row.strategy == name] for name in ENGINE_STRATEGIES}
    return {name: group for name, group in groups.items() if group}


def _throughput(found: Findings, workload: str) -> Plot:
    measured = _by_strategy(found.measured)
    if found.baselines:
        measured[DDP] = found.baselines

    def curve(rows: Sequence[Row]) -> Points:
        return parts.points(
            rows,
            lambda row: row.gbps,
            lambda row: row.samples_per_s,
            lambda row: parts.tooltip(row, found),
        )

    # The bound over the rates is from simulated rows where there are any: they are denser.
    source = found.simulated or found.measured
    bounds = {row.rate_bps: row for row in source if row.bound_step_s and row.communicates}
    bound = parts.points(
        bounds.values(),
        lambda row: row.gbps,
        parts.bound_samples,
        lambda row: (
            f"<b>bound</b> at {format_rate(row.rate_bps)}<br>"
            f"{parts.bound_samples(row):.1f} samples/s, step {(row.bound_step_s or 0) * 1e3:.1f} ms"
        ),
    )
    return curve_plot(
        f"Throughput of {workload}",
        {name: curve(rows) for name, rows in measured.items()},
        {name: curve(rows) for name, rows in _by_strategy(found.simulated).items()},
        {parts.BOUND: bound},
        x_label="rate of every port, Gbit/s",
        y_label="samples/s, all workers",
        colors={**parts.COLORS, DDP: "text"},
        x_ticks={rate: f"{rate:g}" for rate in sorted({row.gbps for row in found.measured})},
        is_log=True,
        note="Dots: measured. Lines: simulated. Dashed: the perfect-overlap bound. Click a name to "
        "hide or show it.",
    )


def _distance(found: Findings, workload: str) -> Plot:
    groups = {**_by_strategy(found.measured), DDP: found.baselines}
    known = {name: [row for row in rows if row.over_bound] for name, rows in groups.items()}
    rates = sorted({row.gbps for row in found.measured})
    goal = 100.0 * (findings.GOAL_OVER_BOUND - 1.0)
    return curve_plot(
        f"Distance of {workload} to the bound",
        {
            name: parts.points(
                rows,
                lambda row: row.gbps,
                lambda row: 100.0 * ((row.over_bound or 1.0) - 1.0),
                lambda row: parts.tooltip(row, found),
            )
            for name, rows in known.items()
            if rows
        },
        {},
        {"5 %": Points(rates, [goal] * len(rates), ["5 % over the bound"] * len(rates))},
        x_label="rate of every port, Gbit/s",
        y_label="step over the bound, %",
        colors={**parts.COLORS, DDP: "text"},
        x_ticks={rate: f"{rate:g}" for rate in rates},
        is_log=True,
        note="Measured; lower is better.",
    )


def _times_ddp(row: Row, found: Findings) -> float | None:
    speedup = found.speedup(row)
    return round(speedup, 3) if speedup is not None and row.communicates else None


def _fastest(rows: Sequence[Row]) -> Row | None:
    sending = [row for row in rows if row.communicates]
    return min(sending, key=lambda row: row.step_s_median, default=None)


def _rows(found: Findings) -> Table:
    fastest = {
        (cluster, best.strategy)
        for cluster, rows in found.clusters.items()
        if (best := _fastest(rows)) is not None
    }
    runs = [row for row in found.rows if not row.is_simulated]
    runs.sort(key=lambda row: (row.rate_bps, parts.strategy_order(row)))
    return parts.row_table(
        _TABLE, runs, found, _CAPTION, lambda row: (row.cluster, row.strategy) in fastest
    )


def _order(found: Findings) -> list[Block]:
    expected = "; ".join(
        f"{first} before {second} ({reason})" for first, second, reason in findings.ORDER
    )
    intro = Paragraph(
        f"By what the strategies do, this order is expected: {expected}. Steps that differ by "
        f"less than {findings.TOLERANCE:.0%} count as equal."
    )
    body: list[list[Cell]] = [
        [
            it.slower.workload,
            it.slower.gbps,
            it.slower.strategy,
            it.faster.strategy,
            percent(it.ratio - 1.0),
            it.explanation,
        ]
        for it in found.reversals()
    ]
    if not body:
        return [intro, Paragraph("Every measured cluster has this order.")]
    columns = ("network", "rate, Gbit/s", "slower than expected", "than", "by, %", "what is known")
    return [intro, Table(columns, body, "Where the measured order is another.")]


def _clusters(found: Findings) -> Table:
    """List for each measured cluster the fastest strategy, the best DDP and the bound."""
    body: list[list[Cell]] = []
    for cluster, rows in found.clusters.items():
        best = _fastest(rows)
        if best is None:
            continue
        ours = next((row for row in rows if row.strategy == GAIN), None)
        body.append(
            [
                cluster.title,
                parts.samples(ours),
                parts.marked(best),
                parts.samples(found.baseline(cluster)),
                None if ours is None else _times_ddp(ours, found),
                None if ours is None else percent(parts.to_bound(ours)),
                None if ours is None else parts.samples(found.counterpart(ours)),
            ]
        )
    columns = ("cluster", GAIN, "fastest", "best DDP", f"{GAIN} x DDP", f"{GAIN} to bound, %")
    return Table([*columns, "simulated"], body)


BANDWIDTH = Preset(
    name="bandwidth",
    title="Throughput against bandwidth",
    # The slowest is where a port needs over twice the compute time, the fastest where it is idle.
    rates_bps={
        "resnet50": tuple(round(rate * GBIT) for rate in (1.5, 3, 4, 6, 10)),
        "inception_v3": tuple(round(rate * GBIT) for rate in (1.5, 2.5, 3.2, 5, 8)),
        "sockeye": tuple(round(rate * GBIT) for rate in (2, 3, 4, 6, 8)),
        "vgg19": tuple(round(rate * GBIT) for rate in (5, 10, 15, 30)),
    },
    # The best of DDP's bucket sizes is what gradlane is compared with.
    strategies=(
        *(CEILING, "p3", "slicing", "wfbp", "kvstore", "deferred-pull"),
        *("ddp-gloo:25", "ddp-gloo:4", "ddp-gloo:1"),
    ),
    dilation=dilation_by_load,
    simulations=curves,
    overview=_clusters,
    summary=_summary,
    figures=_figures,
    remarks=_remarks,
    sections=_sections,
    text="Each dot is a run of real processes, sockets and bytes between emulated nodes; the "
    "accelerators are replayed. Each line is the simulator's. The bound is what perfect overlap of "
    "compute and communication would reach, so no exact strategy can be above it. DDP is PyTorch's "
    "own, over Gloo, at the best of its bucket sizes.",
)
QUICK = replace(
    BANDWIDTH,
    workloads=("resnet50", "sockeye"),
    rates_bps={
        **BANDWIDTH.rates_bps,
        "resnet50": tuple(round(rate * GBIT) for rate in (1.5, 4, 6)),
        "sockeye": tuple(round(rate * GBIT) for rate in (2, 4, 8)),
    },
    strategies=(CEILING, "p3", "kvstore", "ddp-gloo:25"),
)
"""Two networks, three rates and three strategies."""
