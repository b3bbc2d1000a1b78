"""A page from the rows of a lab run: what was fastest, how near the bound, and what the link did.

Only fields that a row has are shown, so rows of older versions and of other tools still make a
page. Medians over repeats are taken here; ratios are taken within a repeat first.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradlane.formats.rates import format_rate
from gradlane.lab.runs.balance import balance_notes
from gradlane.lab.runs.cells import CEILING
from gradlane.lab.runs.columns import ROW_COLUMNS
from gradlane.lab.runs.evidence import NO_EVIDENCE
from gradlane.lab.runs.factor_notes import factor_notes
from gradlane.lab.runs.straggler_notes import loss_over_time
from gradlane.report.page import (
    Block,
    Cell,
    Measurement,
    Section,
    Table,
    measured_here,
    write_report,
)
from gradlane.report.plots import Plot, Series, bar_plot, line_plot, utilization_plot

Row = Mapping[str, Any]
BASELINE = "ddp"
"""Strategies whose names begin so are what others are compared with."""
DIGEST_CHARACTERS = 12


def report_from_results(
    results: Sequence[Row], path: str | Path, *, title: str = "", command: str | None = None
) -> None:
    """Write a page about the rows of a lab run.

    Args:
        results: rows with the fields of `results.json`; times in nominal seconds.
        path: the HTML file to write.
        title: heading; made from workloads and workers where it is empty.
        command: what was run; this process' own command line where it is None.

    Raises:
        ValueError: if there are no rows, or a row lacks its workload, strategy or step time.
        OSError: if the file cannot be written.
    """
    sections = sections_from_results(results)
    sections.append(Section("Measurement", [_measurement(results, command)]))
    workloads = ", ".join(_distinct(results, "workload"))
    workers = ", ".join(str(count) for count in _distinct(results, "workers"))
    title = title or f"{workloads} on {workers} workers"
    write_report(path, title, sections, summary=_summary(results))


def sections_from_results(results: Sequence[Row]) -> list[Section]:
    """Make the sections of a page about rows: one for each workload, and one with all rows.

    Raises:
        ValueError: if there are no rows, or a row lacks its workload, strategy or step time.
    """
    if not results:
        raise ValueError("there are no result rows to report")
    for number, row in enumerate(results):
        for key in ("workload", "strategy", "rate_bps", "step_s_median"):
            if row.get(key) is None:
                raise ValueError(f"result row {number} has no '{key}'")
    colors = {name: index for index, name in enumerate(_distinct(results, "strategy"))}
    sections = []
    for workload in _distinct(results, "workload"):
        rows = [row for row in results if row["workload"] == workload]
        blocks: list[Block] = [_overview(rows), *_plots(rows, colors)]
        rates = _distinct(rows, "rate_bps")
        title = f"{workload} at {format_rate(rates[0])}" if len(rates) == 1 else str(workload)
        sections.append(Section(title, blocks))
    sections.append(Section("All rows", [_all_rows(results)]))
    return sections


def _distinct(rows: Sequence[Row], key: str) -> list[Any]:
    """Values of a field in the order of first appearance."""
    return list(dict.fromkeys(row[key] for row in rows if row.get(key) is not None))


def _median(rows: Sequence[Row], key: str) -> float | None:
    values = [float(row[key]) for row in rows if row.get(key) is not None]
    return statistics.median(values) if values else None


def _at(rows: Sequence[Row], **fields: Any) -> list[Row]:
    return [row for row in rows if all(row.get(key) == value for key, value in fields.items())]


def _speedup(rows: Sequence[Row], strategy: str) -> float | None:
    """Median over repeats of the best baseline's step time over this strategy's."""
    ratios = []
    for row in _at(rows, strategy=strategy):
        peers = [
            float(other["step_s_median"])
            for other in _at(rows, repeat=row.get("repeat"))
            if _is_baseline(str(other["strategy"]))
        ]
        if peers:
            ratios.append(min(peers) / float(row["step_s_median"]))
    return statistics.median(ratios) if ratios else None


def _summary(results: Sequence[Row]) -> str:
    """One sentence: the largest gain over the baseline, and where it was."""
    best: tuple[float, str] | None = None
    for workload in _distinct(results, "workload"):
        for rate in _distinct(results, "rate_bps"):
            rows = _at(results, workload=workload, rate_bps=rate)
            for strategy in _distinct(rows, "strategy"):
                if strategy == CEILING or _is_baseline(str(strategy)):
                    continue
                speedup = _speedup(rows, strategy)
                if speedup is not None and (best is None or speedup > best[0]):
                    best = (
                        speedup,
                        f"{strategy} took {1 / speedup:.2f} of the step time of the best DDP "
                        f"({speedup:.2f} times as fast) on {workload} at {format_rate(rate)}",
                    )
    if best is None:
        return ""
    return f"Largest difference: {best[1]}."


def _overview(rows: Sequence[Row]) -> Table:
    columns = (
        "rate",
        "strategy",
        "step, s",
        "samples/s",
        "\N{MULTIPLICATION SIGN} DDP",
        "\N{MULTIPLICATION SIGN} bound",
        "link, %",
        "CPU, %",
        "last loss",
        "ranks equal",
    )
    body: list[list[Cell]] = []
    highlight: set[int] = set()
    for rate in _distinct(rows, "rate_bps"):
        here = _at(rows, rate_bps=rate)
        fastest = min(
            (str(row["strategy"]) for row in here if row["strategy"] != CEILING),
            key=lambda name: _median(_at(here, strategy=name), "step_s_median") or 0.0,
            default=None,
        )
        for strategy in _distinct(here, "strategy"):
            if strategy == fastest:
                highlight.add(len(body))
            body.append(_overview_row(here, strategy, format_rate(rate)))
    caption = (
        "Medians over repeats; nominal seconds. \N{MULTIPLICATION SIGN} DDP: how many times as "
        "fast as the best DDP of the same repeat. \N{MULTIPLICATION SIGN} bound: step time over "
        "the perfect-overlap bound. Link: share of the goodput used. CPU: share of all processors "
        "of the machine. The fastest that communicates is set off."
    )
    if any(row.get("cpu_bound") for row in rows):
        caption += f" * {NO_EVIDENCE}."
    for rate in _distinct(rows, "rate_bps"):
        at_rate = _at(rows, rate_bps=rate)
        caption = " ".join([caption, *factor_notes(at_rate), *balance_notes(at_rate)])
    used = [
        index
        for index in range(len(columns))
        if any(row[index] is not None for row in body)
        and (index > 0 or len(_distinct(rows, "rate_bps")) > 1)
    ]
    return Table(
        [columns[index] for index in used],
        [[row[index] for index in used] for row in body],
        caption,
        frozenset(highlight),
    )


def _overview_row(rows: Sequence[Row], strategy: str, rate: str) -> list[Cell]:
    own = _at(rows, strategy=strategy)
    step_s, bound_s = _median(own, "step_s_median"), _median(own, "bound_step_s")
    losses = [row["loss"][-1] for row in own if _has_losses(row)]
    equal = [bool(row["params_equal"]) for row in own if row.get("params_equal") is not None]
    communicates = strategy != CEILING
    mark = " *" if any(row.get("cpu_bound") for row in own) else ""
    return [
        rate,
        f"{strategy}{mark}",
        step_s,
        _median(own, "samples_per_s"),
        _speedup(rows, strategy),
        step_s / bound_s if step_s and bound_s and communicates else None,
        _percent(_median(own, "link_utilization")),
        _percent(_median(own, "cpu_share")),
        statistics.median(losses) if losses else None,
        all(equal) if equal and communicates else None,
    ]


def _is_baseline(strategy: str) -> bool:
    """Whether others are compared with this: DDP that encodes nothing."""
    return strategy.startswith(BASELINE) and "+" not in strategy


def _percent(share: float | None) -> float | None:
    return None if share is None else round(100.0 * share, 1)


def _has_losses(row: Row) -> bool:
    """Whether a row has losses worth showing: those of replays are all zero."""
    losses = row.get("loss")
    return isinstance(losses, Sequence) and len(losses) > 0 and any(losses)


def _plots(rows: Sequence[Row], colors: Mapping[str, int]) -> list[Plot]:
    rates = _distinct(rows, "rate_bps")
    plots = [_rate_plot(rows, rates, colors)] if len(rates) > 1 else []
    plots.append(_step_bars(rows, rates, colors))
    for rate in rates:
        suffix = f" at {format_rate(rate)}" if len(rates) > 1 else ""
        here = _at(rows, rate_bps=rate)
        first = [_at(here, strategy=name)[0] for name in _distinct(here, "strategy")]
        losses: Series = {
            row["strategy"]: (range(len(row["loss"])), row["loss"])
            for row in first
            if _has_losses(row) and row["strategy"] != CEILING
        }
        if losses:
            plots.append(
                line_plot(
                    f"Loss{suffix}", losses, x_label="step", y_label="training loss", colors=colors
                )
            )
        over_time: Series = {
            row["strategy"]: loss_over_time(row)
            for row in first
            if _has_losses(row) and row.get("straggler") is not None
        }
        if over_time:
            plots.append(
                line_plot(
                    f"Loss over time{suffix}",
                    over_time,
                    x_label="time, s",
                    y_label="training loss",
                    colors=colors,
                )
            )
        steps: Series = {
            row["strategy"]: (range(len(row["step_s"])), row["step_s"])
            for row in first
            if isinstance(row.get("step_s"), Sequence)
        }
        if steps:
            plots.append(
                line_plot(
                    f"Step times{suffix}",
                    steps,
                    x_label="measured step",
                    y_label="step, s",
                    colors=colors,
                    y_from_zero=True,
                )
            )
        plots.extend(_link_plots(first, colors, suffix))
    return plots


def _step_bars(rows: Sequence[Row], rates: Sequence[Any], colors: Mapping[str, int]) -> Plot:
    """Bars grouped by rate, or one bar a strategy where there is one rate only."""
    names = _distinct(rows, "strategy")
    communicating = [row for row in rows if row["strategy"] != CEILING]
    bars: dict[str, list[float | None]] = {}
    if len(rates) == 1:
        categories = names
        for name in names:
            median = _median(_at(rows, strategy=name), "step_s_median")
            bars[name] = [median if other == name else None for other in names]
        bounds = [_median(_at(communicating, strategy=name), "bound_step_s") for name in names]
    else:
        categories = [format_rate(rate) for rate in rates]
        for name in names:
            bars[name] = [
                _median(_at(rows, rate_bps=rate, strategy=name), "step_s_median") for rate in rates
            ]
        bounds = [_median(_at(communicating, rate_bps=rate), "bound_step_s") for rate in rates]
    return bar_plot(
        "Step time",
        categories,
        bars,
        y_label="step, s (lower is better)",
        limits={"perfect-overlap bound": bounds} if any(bounds) else None,
        colors=colors,
        stacked=len(rates) == 1,
        shows_names=len(rates) > 1,
        note="Nominal seconds, dilation divided out; medians over repeats.",
    )


def _rate_plot(rows: Sequence[Row], rates: Sequence[Any], colors: Mapping[str, int]) -> Plot:
    rates = sorted(rates)
    series: Series = {
        name: (
            [rate / 1e9 for rate in rates],
            [_median(_at(rows, rate_bps=rate, strategy=name), "samples_per_s") for rate in rates],
        )
        for name in _distinct(rows, "strategy")
    }
    return line_plot(
        "Throughput against bandwidth",
        series,
        x_label="port rate, Gbit/s",
        y_label="samples/s, all workers",
        colors=colors,
        dashed=(CEILING,),
        markers=True,
        y_from_zero=True,
    )


def _link_plots(rows: Sequence[Row], colors: Mapping[str, int], suffix: str) -> list[Plot]:
    shown = _fastest_of_each_kind(rows)
    plots = []
    for key, words in (("transmit", "outbound"), ("receive", "inbound")):
        series: Series = {
            row["strategy"]: (
                row["utilization_over_time"]["time_s"],
                row["utilization_over_time"][key],
            )
            for row in rows
            if row["strategy"] != CEILING
            and (row.get("utilization_over_time") or {}).get("time_s")
            and key in row["utilization_over_time"]
        }
        if series:
            plots.append(
                utilization_plot(
                    f"Use of the link over time, {words}{suffix}",
                    series,
                    colors=colors,
                    hidden=[name for name in series if name not in shown],
                    note="First repeat. Click a name in the legend to hide or show its line.",
                )
            )
    return plots


def _fastest_of_each_kind(rows: Sequence[Row]) -> list[str]:
    """The fastest baseline and the fastest other strategy: more lines at once hide each other."""
    ordered = sorted(
        (row for row in rows if row["strategy"] != CEILING),
        key=lambda row: float(row["step_s_median"]),
    )
    names = [str(row["strategy"]) for row in ordered]
    baselines = [name for name in names if _is_baseline(name)]
    others = [name for name in names if not _is_baseline(name)]
    return baselines[:1] + others[:1]


def _all_rows(results: Sequence[Row]) -> Table:
    columns = [key for key in ROW_COLUMNS if any(row.get(key) is not None for row in results)]
    body = [[_plain(key, row.get(key)) for key in columns] for row in results]
    return Table(columns, body, "Times ending in _s are nominal; only wall_ is real time.")


def _plain(key: str, value: Any) -> Cell:
    if key == "param_digest" and isinstance(value, str):
        return value[:DIGEST_CHARACTERS]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def _measurement(results: Sequence[Row], command: str | None) -> Measurement:
    """Facts that the rows carry, and this process' own for those that they lack."""
    here = measured_here(command)
    first = results[0]
    recorded: dict[str, str] = {}
    for key in ("versions", "machine"):
        facts = first.get(key)
        if isinstance(facts, Mapping):
            recorded.update({str(name): str(value) for name, value in facts.items()})
    # A page may be made elsewhere and later than its rows: what they say replaces what is here.
    facts = recorded if recorded else dict(here.facts)
    for key in ("dilation", "seed", "warmup", "goodput_bps"):
        values = _distinct(results, key)
        if values:
            facts[key] = ", ".join(f"{value:g}" for value in values)
    shares = [float(row["cpu_share"]) for row in results if row.get("cpu_share") is not None]
    if shares:
        facts["machine CPU, busiest row"] = f"{100 * max(shares):.0f} %"
    return Measurement(here.command, facts)
