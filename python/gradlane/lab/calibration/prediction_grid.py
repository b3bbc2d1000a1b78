"""The grid's predictions beside its measurements, as a page; and the fit of the fitted constant.

One constant is fitted, how unequal the connections are that meet at a port, and on the rows of
ResNet-50 alone; the other workloads test it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from gradlane.formats.rates import format_rate
from gradlane.lab.calibration.grid import cells_of, in_grid_order
from gradlane.lab.calibration.prediction import (
    LeftOut,
    Prediction,
    can_predict,
    predict,
    predicted_ddp_step_s,
    summary_of,
)
from gradlane.lab.runs.cells import missing_strategies, with_compute_times
from gradlane.lab.runs.rows import Row, grouped, read_rows, text_of_no_evidence
from gradlane.lab.runs.strategy import LabStrategy, parse_strategy
from gradlane.planning.simulation.costs import MachineCosts, read_costs
from gradlane.report.console import print_written
from gradlane.report.markdown import filled, markdown_table
from gradlane.training.options.strategy import RING

FITTED_WORKLOAD = "resnet50"
"""The workload whose rows the fitted constant comes from."""
FITTED_CONSTANT = "share_spread"
MEDIAN_ERROR_TARGET = 0.03
WORST_ERROR_TARGET = 0.08
TEMPLATE = Path(__file__).with_name("predictions.md")
_TRIALS = tuple(round(0.025 * index, 3) for index in range(17))


def predict_grid(
    path: Path,
    *,
    workloads: Sequence[str],
    costs_path: Path | None,
    fit: bool,
    markdown: Path | None,
    console: Console,
    keep: Callable[[dict[str, Any]], None] = lambda content: None,
) -> dict[str, Any]:
    """Predict every measured run of the grid, write the page and print the table.

    Args:
        path: the file of measured rows.
        workloads: only these; all where none is named.
        costs_path: constants of the machine, or None for the simulator's own.
        fit: whether to fit the fitted constant first, and print it.
        markdown: where the page goes, or None.
        console: where to print.
        keep: told what is returned, before anything of it is printed.

    Returns:
        `rows`, `median_error`, `worst_error`, `by_workload`, `left_out`, and `fitted` where asked
        for.

    Raises:
        ValueError: there is nothing to predict, or a file makes no sense.
    """
    measured = read_rows(path)
    rows = with_compute_times(measured)
    chosen = [
        row
        for row in in_grid_order(rows)
        if can_predict(row) and (not workloads or row.workload in workloads)
    ]
    left_out = LeftOut.of(measured)
    costs = MachineCosts() if costs_path is None else read_costs(costs_path)
    content: dict[str, Any] = {}
    if fit:
        training = [
            row
            for row in chosen
            if row.workload == FITTED_WORKLOAD and not (_is_sealed(row) or _has_lanes(row))
        ]
        spread, error = fit_spread(training, costs, lambda text: console.print(text, style="dim"))
        console.print(
            f"{FITTED_CONSTANT} {spread:.3f} fits {len(training)} rows of {FITTED_WORKLOAD} best: "
            f"mean error {error * 100:.2f} %",
            highlight=False,
        )
        costs = with_spread(costs, spread)
        content["fitted"] = {FITTED_CONSTANT: spread, "mean_error": error}
    predictions = [
        predict(row, costs)
        for row in track(
            chosen, "simulating", console=console, transient=True, disable=not console.is_terminal
        )
    ]
    summary = summary_of(predictions, left_out)
    page = page_of(predictions, rows, text_of_no_evidence(measured))
    content = {
        **content,
        "rows": [it.to_json() for it in predictions],
        **summary,
        "by_workload": {
            name: summary_of(group)
            for name, group in grouped(predictions, lambda it: it.workload).items()
        },
        "left_out": left_out.to_json(),
    }
    keep(content)
    if markdown is not None:
        markdown.write_text(page, encoding="utf-8")
    if left_out.text:
        console.print(left_out.text, highlight=False)
    console.print(table_of(predictions), highlight=False, soft_wrap=True)
    console.print(verdict_of(predictions), highlight=False, soft_wrap=True)
    print_written(console, markdown)
    return content


def with_spread(costs: MachineCosts, spread: float) -> MachineCosts:
    """Return the constants with this value of the fitted one."""
    return replace(costs, network={**costs.network, FITTED_CONSTANT: spread})


def fit_spread(
    rows: Sequence[Row], costs: MachineCosts, on_trial: Callable[[str], None] = lambda text: None
) -> tuple[float, float]:
    """Return the spread with the smallest mean error without sign, and that error.

    Args:
        rows: measured rows, of one workload.
        costs: all other constants.
        on_trial: told about each value that was tried.

    Raises:
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError(f"nothing to fit: no rows of {FITTED_WORKLOAD} were measured")

    def error_at(spread: float) -> float:
        error = statistics.fmean(
            abs(predict(row, with_spread(costs, spread)).error) for row in rows
        )
        on_trial(f"{FITTED_CONSTANT} {spread:.3f}: mean error {error * 100:.2f} %")
        return error

    errors = {spread: error_at(spread) for spread in _TRIALS}
    best = min(errors, key=errors.__getitem__)
    return best, errors[best]


def _is_sealed(run: Row | Prediction) -> bool:
    return parse_strategy(run.strategy).sealed


def _has_lanes(run: Row | Prediction) -> bool:
    return parse_strategy(run.strategy).lanes is not None


def table_of(predictions: Sequence[Prediction]) -> str:
    """Return every cell as a table, a column for each strategy: measured, predicted, error."""
    strategies = list(dict.fromkeys(it.strategy for it in predictions))
    rows = []
    for (workload, rate_bps, dilation), group in grouped(
        predictions, lambda it: (it.workload, it.rate_bps, it.dilation)
    ).items():
        found = {it.strategy: "{} / {} ({})".format(*it.figures) for it in group}
        cells = (found.get(one, "-").replace(" ms", "").replace(" %", "") for one in strategies)
        rows.append((workload, format_rate(rate_bps), f"{dilation:g}", *cells))
    columns = ("workload", "rate", "dilation", *strategies)
    return markdown_table(columns, rows, numbers="-nn" + "n" * len(strategies))


def verdict_of(predictions: Sequence[Prediction]) -> str:
    """Return the errors of each workload and of those that nothing was fitted to, as a table."""
    rows = []
    groups = grouped(predictions, lambda it: it.workload)
    tested = [it for it in predictions if it.workload != FITTED_WORKLOAD]
    for name, group in [
        *(
            (f"{name} (fitted)" if name == FITTED_WORKLOAD else name, it)
            for name, it in groups.items()
        ),
        ("all that is sealed", [it for it in predictions if _is_sealed(it)]),
        ("all over several lanes", [it for it in predictions if _has_lanes(it)]),
        ("all that nothing was fitted to", tested),
        ("all", list(predictions)),
    ]:
        if group:
            summary = summary_of(group)
            errors = (summary["median_error"], summary["worst_error"])
            rows.append((name, len(group), *(f"{error * 100:.1f} %" for error in errors)))
    columns = ("workload", "runs", "median error", "worst error")
    return markdown_table(columns, rows, numbers="-nnn")


def page_of(predictions: Sequence[Prediction], rows: Sequence[Row], no_evidence: str = "") -> str:
    """Return the page: what was done, the errors, every cell, and what was measured beside it.

    Args:
        predictions: in the order of the grid.
        rows: all measured rows that are evidence, those of other strategies included.
        no_evidence: how many others there are, and why; empty where there is none.
    """
    summary = summary_of(predictions)
    first = rows[0]
    warmups = sorted({row.warmup for row in rows})
    busiest = max(row.cpu_share or 0.0 for row in rows)
    baselines = [row for row in rows if row.strategy.startswith("ddp")]
    sections = []
    found = auto_table(rows)
    if found:
        sections += [
            "## `auto` beside the fixed strategies",
            "What a session finds by itself in its first seven steps, measured after them and "
            "three more. It stands beside the best fixed strategy\nwith the same bits, "
            "`auto:any-rounding` beside the best of all; `auto` is to be over 2 % slower nowhere. "
            "A session takes ports for wires, where flows that meet queue; the lab's ports\nare "
            "token buckets, so where the network decides it expects steps a few per cent too "
            "long.",
            found,
        ]
    missing = _missing(rows)
    if missing:
        sections += ["## Not measured yet", "\n".join(missing)]
    if baselines:
        beside = f"{_ddp_verdict(baselines)} Below, the fastest that was measured in each cell."
        sections += ["## Beside them", beside, _baseline_table(baselines, predictions)]
    return filled(
        TEMPLATE,
        runs=len(predictions),
        median=f"{summary['median_error'] * 100:.1f}",
        worst=f"{summary['worst_error'] * 100:.1f}",
        wanted_median=f"{MEDIAN_ERROR_TARGET * 100:g}",
        wanted_worst=f"{WORST_ERROR_TARGET * 100:g}",
        verdict=verdict_of(predictions),
        constant=FITTED_CONSTANT,
        workload=FITTED_WORKLOAD,
        steps=first.steps,
        warmups=f"{warmups[0]} to {warmups[-1]}",
        processors=first.machine["processors"],
        kernel=first.versions["kernel"],
        torch=first.versions["torch"],
        busiest=f"{busiest * 100:.0f}",
        no_evidence=f"Left out, {no_evidence}." if no_evidence else "",
        cells=table_of(predictions),
        sections="\n\n".join(sections),
    )


def auto_table(rows: Sequence[Row]) -> str:
    """Return the rows of `auto` beside the best fixed strategy of their cells; empty for none."""
    usable = [row for row in rows if row.is_evidence and row.codec == "raw"]
    lines = []
    for row in usable:
        strategy = parse_strategy(row.strategy)
        if not strategy.is_planned:
            continue
        others = [one for one in usable if is_beside(one, row, strategy)]
        best = min(others, key=lambda one: one.step_s_median, default=None)
        plan = row.metrics.get("plan", {})
        over, fixed = "-", "-"
        if best is not None:
            over = f"{(row.step_s_median / best.step_s_median - 1.0) * 100:+.1f} %"
            fixed = f"{best.step_s_median * 1e3:.1f} ms ({best.strategy})"
        predicted_s = plan.get("prediction", {}).get("step_s")
        # A session plans for the cluster as it is, dilated and all.
        predicted = "-" if predicted_s is None else f"{predicted_s * 1e3 / row.dilation:.1f} ms"
        measured = f"{row.step_s_median * 1e3:.1f} ms"
        lines.append(
            (
                *(row.workload, format_rate(row.rate_bps), row.strategy),
                *(fixed, measured, over, predicted, _chosen(plan)),
            )
        )
    columns = ("workload", "rate", "strategy", "best fixed", "measured", "over it", "it expected")
    table = markdown_table((*columns, "it chose"), sorted(lines), numbers="-n-nnnn-")
    return table if lines else ""


def is_beside(one: Row, row: Row, strategy: LabStrategy) -> bool:
    """Return whether a row is a fixed strategy of gradlane's in the cluster of another row.

    Args:
        one: the row that is asked for.
        row: of a strategy that finds its own plan.
        strategy: that strategy.
    """
    fixed = parse_strategy(one.strategy)
    same_bits = fixed.sums_in_rank_order and not fixed.sends_factors
    comparable = same_bits or strategy.any_rounding
    is_fixed = fixed.family == "gradlane" and not fixed.is_planned and not fixed.is_asynchronous
    is_alike = (fixed.sealed, fixed.lanes) == (strategy.sealed, strategy.lanes)
    return is_fixed and is_alike and comparable and one.cluster == row.cluster


def _chosen(plan: Mapping[str, Any]) -> str:
    """Return what a plan chose, in a few words."""
    settings = plan.get("settings", {})
    words = [str(settings.get("strategy", "-"))]
    if plan.get("schemes") not in (None, "ps", RING):
        words.append(str(plan["schemes"]))
    if settings.get("slice_elems"):
        words.append(f"slices of {settings['slice_elems']:,}")
    return ", ".join(words)


def _missing(rows: Sequence[Row]) -> list[str]:
    """Return a line for each cell of the grid that lacks runs."""
    lines = []
    for cell in cells_of([]):
        missing = missing_strategies(cell, rows)
        if missing:
            names = "all" if len(missing) == len(cell.strategies) else ", ".join(missing)
            lines.append(f"- {cell.workload} at {format_rate(cell.rate_bps)}: {names}")
    return lines


def _baseline_table(baselines: Sequence[Row], predictions: Sequence[Prediction]) -> str:
    measured = {
        (it.workload, it.rate_bps): it.measured_step_s for it in predictions if it.strategy == "p3"
    }
    lines = []
    slowest_first = sorted(baselines, key=lambda it: it.step_s_median, reverse=True)
    fastest = {(it.workload, it.rate_bps): it for it in slowest_first}
    for key, row in sorted(fastest.items()):
        p3_s = measured.get(key)
        lines.append(
            (
                row.workload,
                format_rate(row.rate_bps),
                f"{row.compute_s * 1e3:.1f} ms",
                f"{row.step_s_median * 1e3:.1f} ms",
                f"{parse_strategy(row.strategy).bucket_mb:g} MB",
                f"{predicted_ddp_step_s(row) * 1e3:.1f} ms",
                f"{_ddp_error(row) * 100:+.1f} %",
                None if p3_s is None else f"{p3_s * 1e3:.1f} ms",
                None if p3_s is None else f"{row.step_s_median / p3_s:.2f}",
            )
        )
    columns = (
        *("workload", "rate", "compute", "DDP", "buckets", "predicted", "error"),
        *("p3", "DDP over p3"),
    )
    return markdown_table(columns, lines, numbers="-nnnnnnnn")


def _ddp_error(row: Row) -> float:
    return predicted_ddp_step_s(row) / row.step_s_median - 1.0


def _ddp_verdict(baselines: Sequence[Row]) -> str:
    errors = [abs(_ddp_error(row)) for row in baselines]
    tested = [abs(_ddp_error(row)) for row in baselines if row.workload != FITTED_WORKLOAD]
    text = (
        f"DDP over Gloo by its formula (`gradlane.planning.simulation.ddp`): {len(errors)} rows, "
        f"all bucket sizes, within {statistics.median(errors) * 100:.1f} % in the median and "
        f"{max(errors) * 100:.1f} % at worst"
    )
    if tested:
        text += (
            f"; the {len(tested)} that nothing was fitted to within "
            f"{statistics.median(tested) * 100:.1f} and {max(tested) * 100:.1f} %"
        )
    return text + "."
