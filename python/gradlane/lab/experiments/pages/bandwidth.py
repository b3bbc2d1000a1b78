"""The page of the bandwidth experiment: throughput against bandwidth, and what it shows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gradlane.formats.rates import format_rate
from gradlane.lab.experiments import findings
from gradlane.lab.runs.cells import CEILING
from gradlane.lab.runs.evidence import NO_EVIDENCE
from gradlane.lab.runs.strategy import parse_strategy
from gradlane.report.curves import Points, curve_plot
from gradlane.report.page import Block, Cell, Figure, Figures, Paragraph, Section, Table
from gradlane.report.plots import Plot
from gradlane.training.options.options import STRATEGIES as ENGINE_STRATEGIES

Row = Mapping[str, Any]
TITLE = "Throughput against bandwidth"
DDP = "best DDP"
BOUND = "bound"
COLORS: Mapping[str, int | str] = {
    **{name: number for number, name in enumerate(ENGINE_STRATEGIES)},
    DDP: "text",
}
GAIN = "p3"
"""The strategy whose gains the page tells first."""


def page_of(rows: Sequence[Row]) -> tuple[str, str, list[Section]]:
    """Return title, summary and sections.

    Raises:
        ValueError: nothing was measured.
    """
    evidence = findings.measured(rows)
    if not evidence:
        raise ValueError("no row is evidence: measure on an idle machine")
    workloads = list(dict.fromkeys(str(row["workload"]) for row in evidence))
    sections = [Section("In short", in_short(rows))]
    sections += [_network(rows, workload) for workload in workloads]
    sections.append(Section("Order of the strategies", _order(rows)))
    return TITLE, summary_of(rows), sections


def summary_of(rows: Sequence[Row]) -> str:
    """Say in a sentence where the largest gain was."""
    gains = findings.gains(rows, GAIN)
    if not gains:
        return ""
    best = max(gains, key=lambda gain: gain.ratio)
    return (
        f"{GAIN} trains up to {best.ratio:.2f} times as fast as the best DDP: "
        f"{best.row['workload']} at {format_rate(float(best.row['rate_bps']))}, where its step is "
        f"{_over(best.row)} the bound."
    )


def _over(row: Row) -> str:
    if not row.get("bound_step_s"):
        return "compared with"
    return f"{float(row['step_s_median']) / float(row['bound_step_s']) - 1.0:+.1%} to"


def in_short(rows: Sequence[Row]) -> list[Block]:
    """Return key figures, and the sentences that belong to them."""
    figures: list[Figure] = []
    gains = findings.gains(rows, GAIN)
    if gains:
        best = max(gains, key=lambda gain: gain.ratio)
        worst = min(gains, key=lambda gain: gain.ratio)
        figures.append(Figure(f"{best.ratio:.2f}×", f"{GAIN} over the best DDP, at most", "good"))
        figures.append(
            Figure(
                f"{worst.ratio:.2f}×",
                f"{GAIN} over the best DDP, at least",
                "good" if worst.ratio > 1.0 - findings.TOLERANCE else "bad",
            )
        )
    distances = findings.over_bound(rows, GAIN)
    if distances:
        near = [ratio for _, ratio in distances if ratio <= findings.GOAL_OVER_BOUND]
        figures.append(
            Figure(
                f"{len(near)} of {len(distances)}",
                f"clusters with {GAIN} within 5 % of the bound",
                "good" if len(near) == len(distances) else "bad",
            )
        )
        middle = statistics.median(ratio for _, ratio in distances)
        figures.append(Figure(f"{middle - 1.0:+.1%}", f"{GAIN} to the bound, median"))
    errors = findings.prediction_errors(rows)
    if errors:
        middle = statistics.median(abs(error) for _, error in errors)
        figures.append(Figure(f"{middle:.1%}", "error of the simulator's steps, median"))
    blocks: list[Block] = [Figures(figures)]
    beaten = findings.faster_than_bound(rows)
    if beaten:
        names = ", ".join(f"{row['strategy']} ({_where(row)})" for row in beaten)
        blocks.append(Paragraph(f"Faster than their bound, so something is wrong: {names}."))
    blocks.append(
        Paragraph(
            "Each dot is a run of real processes, sockets and bytes between emulated nodes; the "
            "accelerators are replayed. Each line is the simulator's. The bound is what perfect "
            "overlap of compute and communication would reach, so no exact strategy can be above "
            "it. DDP is PyTorch's own, over Gloo, at the best of its bucket sizes."
        )
    )
    return blocks


def _where(row: Row) -> str:
    return f"{row['workload']} at {format_rate(float(row['rate_bps']))}"


def _network(rows: Sequence[Row], workload: str) -> Section:
    own = [row for row in rows if row["workload"] == workload]
    return Section(workload, [_throughput(own, workload), _distance(own, workload), _table(own)])


def _throughput(rows: Sequence[Row], workload: str) -> Plot:
    evidence, simulated = findings.measured(rows), findings.simulated(rows)
    measured = {
        name: _points([row for row in evidence if row["strategy"] == name], rows)
        for name in ENGINE_STRATEGIES
        if any(row["strategy"] == name for row in evidence)
    }
    best = [findings.best_baseline(rows, cluster) for cluster in findings.clusters_of(evidence)]
    if any(best):
        measured[DDP] = _points([row for row in best if row is not None], rows)
    curves = {
        name: _points([row for row in simulated if row["strategy"] == name], rows)
        for name in ENGINE_STRATEGIES
        if any(row["strategy"] == name for row in simulated)
    }
    rates = sorted({float(row["rate_bps"]) for row in evidence})
    return curve_plot(
        f"Throughput of {workload}",
        measured,
        curves,
        _limits(rows),
        x_label="rate of every port, Gbit/s",
        y_label="samples/s, all workers",
        colors=COLORS,
        x_ticks={rate / 1e9: f"{rate / 1e9:g}" for rate in rates},
        is_log=True,
        note="Dots: measured. Lines: simulated. Dashed: the perfect-overlap bound. Click a name to "
        "hide or show it.",
    )


def _limits(rows: Sequence[Row]) -> dict[str, Points]:
    """The bound over the rates, from simulated rows where there are any, since they are denser."""
    source = findings.simulated(rows) or findings.measured(rows)
    by_rate = {
        float(row["rate_bps"]): row
        for row in source
        if row.get("bound_step_s") and row["strategy"] != CEILING
    }
    chosen = [by_rate[rate] for rate in sorted(by_rate)]
    samples = [int(row["workers"]) * int(row["batch_size"]) for row in chosen]
    bounds_s = [float(row["bound_step_s"]) for row in chosen]
    ys = [count / bound_s for count, bound_s in zip(samples, bounds_s, strict=True)]
    texts = [
        f"<b>bound</b> at {format_rate(float(row['rate_bps']))}<br>{y:.1f} samples/s, step "
        f"{bound_s * 1e3:.1f} ms"
        for row, y, bound_s in zip(chosen, ys, bounds_s, strict=True)
    ]
    return {BOUND: Points([float(row["rate_bps"]) / 1e9 for row in chosen], ys, texts)}


def _points(rows: Sequence[Row], all_rows: Sequence[Row]) -> Points:
    ordered = sorted(rows, key=lambda row: float(row["rate_bps"]))
    return Points(
        [float(row["rate_bps"]) / 1e9 for row in ordered],
        [float(row["samples_per_s"]) for row in ordered],
        [tooltip(row, all_rows) for row in ordered],
    )


def tooltip(row: Row, rows: Sequence[Row]) -> str:
    """Return what a row's point says when it is pointed at."""
    source = "simulated" if row.get("source") == "simulated" else "measured"
    lines = [
        f"<b>{row['strategy']}</b>, {source}, {format_rate(float(row['rate_bps']))}",
        f"{float(row['samples_per_s']):.1f} samples/s",
        f"step {float(row['step_s_median']) * 1e3:.1f} ms",
    ]
    if row.get("bound_step_s"):
        over = float(row["step_s_median"]) / float(row["bound_step_s"])
        lines.append(f"{over - 1.0:+.1%} to the bound")
    baseline = findings.best_baseline(rows, findings.cluster_of(row))
    if baseline is not None and source == "measured":
        ratio = float(baseline["step_s_median"]) / float(row["step_s_median"])
        lines.append(f"{ratio:.2f}× {baseline['strategy']}")
    if row.get("link_utilization") is not None:
        lines.append(f"ports used {float(row['link_utilization']):.0%}")
    return "<br>".join(lines)


def _distance(rows: Sequence[Row], workload: str) -> Plot:
    names = [name for name in ENGINE_STRATEGIES if findings.over_bound(rows, name)]
    series: dict[str, Points] = {}
    for name in names:
        series[name] = _distances(findings.over_bound(rows, name), rows)
    evidence = findings.measured(rows)
    best = [findings.best_baseline(rows, cluster) for cluster in findings.clusters_of(evidence)]
    known = [row for row in best if row is not None and row.get("bound_step_s")]
    if known:
        series[DDP] = _distances(
            [(row, float(row["step_s_median"]) / float(row["bound_step_s"])) for row in known], rows
        )
    rates = sorted({float(row["rate_bps"]) / 1e9 for row in evidence})
    goal = 100.0 * (findings.GOAL_OVER_BOUND - 1.0)
    return curve_plot(
        f"Distance of {workload} to the bound",
        series,
        {},
        {"5 %": Points(rates, [goal] * len(rates), ["5 % over the bound"] * len(rates))},
        x_label="rate of every port, Gbit/s",
        y_label="step over the bound, %",
        colors=COLORS,
        x_ticks={rate: f"{rate:g}" for rate in rates},
        is_log=True,
        note="Measured; lower is better.",
    )


def _distances(pairs: Sequence[tuple[Row, float]], rows: Sequence[Row]) -> Points:
    ordered = sorted(pairs, key=lambda pair: float(pair[0]["rate_bps"]))
    return Points(
        [float(row["rate_bps"]) / 1e9 for row, _ in ordered],
        [100.0 * (ratio - 1.0) for _, ratio in ordered],
        [tooltip(row, rows) for row, _ in ordered],
    )


def _table(rows: Sequence[Row]) -> Table:
    columns = (
        "rate, Gbit/s",
        "strategy",
        "samples/s",
        "step, ms",
        "to bound, %",
        "× best DDP",
        "simulated, ms",
        "error, %",
        "ports, %",
        "CPU, %",
        "no evidence",
    )
    body: list[list[Cell]] = []
    highlight: set[int] = set()
    own = [row for row in rows if row.get("source") != "simulated"]
    own.sort(key=lambda row: (float(row["rate_bps"]), _rank(str(row["strategy"]))))
    for row in own:
        if row["strategy"] == _fastest(own, row):
            highlight.add(len(body))
        body.append(_line(row, rows))
    caption = (
        "Medians of the measured steps, nominal. × best DDP: how many times as fast as the fastest "
        "DDP of the same cluster. Error: simulated over measured step, minus one. Ports: share of "
        f"the goodput used. CPU: of all processors of this machine; * {NO_EVIDENCE}. "
        "The fastest that communicates is set off."
    )
    used = [index for index in range(len(columns)) if any(line[index] is not None for line in body)]
    return Table(
        [columns[index] for index in used],
        [[line[index] for index in used] for line in body],
        caption,
        frozenset(highlight),
    )


def _rank(strategy: str) -> int:
    order = (CEILING, *ENGINE_STRATEGIES)
    return order.index(strategy) if strategy in order else len(order)


def _fastest(rows: Sequence[Row], row: Row) -> str | None:
    peers = [
        other
        for other in findings.measured(rows)
        if findings.cluster_of(other) == findings.cluster_of(row) and other["strategy"] != CEILING
    ]
    best = min(peers, key=lambda other: float(other["step_s_median"]), default=None)
    return None if best is None else str(best["strategy"])


def _line(row: Row, rows: Sequence[Row]) -> list[Cell]:
    step_s = float(row["step_s_median"])
    communicates = parse_strategy(str(row["strategy"])).communicates
    baseline = findings.best_baseline(rows, findings.cluster_of(row))
    simulated = findings.counterpart(row, rows)
    simulated_s = None if simulated is None else float(simulated["step_s_median"])
    return [
        float(row["rate_bps"]) / 1e9,
        str(row["strategy"]),
        round(float(row["samples_per_s"]), 1),
        round(step_s * 1e3, 1),
        round(100.0 * (step_s / float(row["bound_step_s"]) - 1.0), 1)
        if communicates and row.get("bound_step_s")
        else None,
        round(float(baseline["step_s_median"]) / step_s, 3) if communicates and baseline else None,
        None if simulated_s is None else round(simulated_s * 1e3, 1),
        None if simulated_s is None else round(100.0 * (simulated_s / step_s - 1.0), 1),
        round(100.0 * float(row["link_utilization"]), 1) if communicates else None,
        round(100.0 * float(row["cpu_share"]), 1) if row.get("cpu_share") is not None else None,
        True if row["cpu_bound"] else None,
    ]


def _order(rows: Sequence[Row]) -> list[Block]:
    expected = "; ".join(
        f"{first} before {second} ({reason})" for first, second, reason in findings.ORDER
    )
    blocks: list[Block] = [
        Paragraph(
            f"By what the strategies do, this order is expected: {expected}. Steps that differ by "
            f"less than {findings.TOLERANCE:.0%} count as equal."
        )
    ]
    found = findings.reversals(rows)
    if not found:
        blocks.append(Paragraph("Every measured cluster has this order."))
        return blocks
    columns = ("network", "rate, Gbit/s", "slower than expected", "than", "by, %", "what is known")
    body: list[list[Cell]] = [
        [
            str(it.slower["workload"]),
            float(it.slower["rate_bps"]) / 1e9,
            str(it.slower["strategy"]),
            str(it.faster["strategy"]),
            round(100.0 * (it.ratio - 1.0), 1),
            it.explanation,
        ]
        for it in found
    ]
    blocks.append(Table(columns, body, "Where the measured order is another."))
    return blocks
