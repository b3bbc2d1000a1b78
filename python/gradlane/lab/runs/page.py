"""A page from the rows of a lab run: what was fastest, how near the bound, and what the link did.

Only fields that a row has are shown, so rows of older versions and of other tools still make a
page. Medians over repeats are taken here; ratios are taken within a repeat first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gradlane.formats.rates import format_rate
from gradlane.lab.runs.notes import balance_notes, factor_notes, loss_over_time
from gradlane.lab.runs.page_parts import measurement, percent, plain_cell, used_columns
from gradlane.lab.runs.rows import (
    CEILING,
    ROW_COLUMNS,
    Row,
    by_encoding,
    grouped,
    median_or_none,
    text_of_no_evidence,
)
from gradlane.report.page import Cell, Section, Table, write_report
from gradlane.report.plots import Plot, Series, bar_plot, line_plot, utilization_plot
from gradlane.training.options.codec_options import RAW

BASELINE = "ddp"
"""Strategies whose names begin so are what others are compared with."""
_TIMES = "\N{MULTIPLICATION SIGN}"


def report_from_results(
    rows: Sequence[Row], path: str | Path, *, title: str = "", command: str | None = None
) -> None:
    """Write a page about the rows of a lab run.

    Args:
        rows: of one or several runs.
        path: the HTML file to write.
        title: heading; made from workloads and workers where it is empty.
        command: what was run; this process' own command line where it is None.

    Raises:
        ValueError: there are no rows.
        OSError: the file cannot be written.
    """
    sections = sections_from_results(rows)
    sections.append(Section("Measurement", [measurement(rows, command)]))
    workers = ", ".join(str(count) for count in dict.fromkeys(row.workers for row in rows) if count)
    title = title or f"{', '.join(grouped(rows, _workload))} on {workers} workers"
    write_report(path, title, sections, summary=_summary(rows))


def sections_from_results(rows: Sequence[Row]) -> list[Section]:
    """Make the sections of a page about rows: one for each workload, and one with all rows.

    Raises:
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("there are no result rows to report")
    colors = {name: index for index, name in enumerate(grouped(rows, _strategy))}
    sections = []
    for workload, own in grouped(rows, _workload).items():
        rates = list(grouped(own, _rate))
        title = f"{workload} at {format_rate(rates[0])}" if len(rates) == 1 else workload
        tables = [_overview(own, encoding) for encoding in by_encoding(own)]
        sections.append(Section(title, [*tables, *_plots(own, colors)]))
    contents = [row.to_json() for row in rows]
    columns = [key for key in ROW_COLUMNS if any(one.get(key) is not None for one in contents)]
    body = [[plain_cell(key, content.get(key)) for key in columns] for content in contents]
    caption = "Times ending in _s are nominal; only wall_ is real time."
    return [*sections, Section("All rows", [Table(columns, body, caption)])]


def text_of_marked(rows: Sequence[Row]) -> str:
    """Return how many rows are no evidence, and that they are marked; empty if all are."""
    text = text_of_no_evidence(rows)
    return f"{text}; marked *" if text else ""


def _workload(row: Row) -> str:
    return row.workload


def _strategy(row: Row) -> str:
    """Return what tells a row from others of its cluster: its strategy, and the codec of that."""
    return row.strategy if row.codec == RAW else f"{row.strategy} {row.codec}"


def _rate(row: Row) -> int:
    return row.rate_bps


def _step_s(rows: Iterable[Row]) -> float | None:
    return median_or_none(row.step_s_median for row in rows)


def _bound_s(rows: Iterable[Row]) -> float | None:
    return median_or_none(row.bound_step_s for row in rows if row.communicates)


def _samples(rows: Iterable[Row]) -> float | None:
    return median_or_none(row.samples_per_s or None for row in rows)


def _speedup(rows: Sequence[Row], strategy: str) -> float | None:
    """Return the median over repeats of the best baseline's step time over this strategy's."""
    ratios = []
    for repeat in grouped(rows, lambda row: row.repeat).values():
        peers = [row.step_s_median for row in repeat if _is_baseline(row.strategy)]
        own = [row.step_s_median for row in repeat if _strategy(row) == strategy]
        ratios += [min(peers) / step_s for step_s in own if peers]
    return median_or_none(ratios)


def _summary(rows: Sequence[Row]) -> str:
    """Return a sentence: the largest gain over the baseline, and where it was."""
    best: tuple[float, str] | None = None
    for workload, own in grouped(rows, _workload).items():
        for rate_bps, here in grouped(own, _rate).items():
            for strategy in grouped(here, _strategy):
                speedup = _speedup(here, strategy)
                if strategy == CEILING or _is_baseline(strategy) or speedup is None:
                    continue
                if best is None or speedup > best[0]:
                    is_busy = any(row.cpu_bound for row in here)
                    best = (
                        speedup,
                        f"{strategy} trains {workload} at {format_rate(rate_bps)} {speedup:.2f} "
                        "times as fast as the best DDP"
                        + (", on a machine too busy for evidence (*)" if is_busy else ""),
                    )
    return "" if best is None else f"At best {best[1]}."


def _overview(rows: Sequence[Row], encoding: str) -> Table:
    """Return a line for each rate and strategy whose gradients travel so.

    Args:
        rows: of one workload, all encodings: the best DDP may be among the others.
        encoding: as `Row.encoding`.
    """
    columns = (
        "rate",
        "strategy",
        "step, s",
        "samples/s",
        f"{_TIMES} DDP",
        f"{_TIMES} bound",
        "link, %",
        "CPU, %",
        "last loss",
        "ranks equal",
    )
    body: list[list[Cell]] = []
    highlight: set[int] = set()
    shown = by_encoding(rows)[encoding]
    caption = "" if len(shown) == len(rows) and encoding == RAW else f"Gradients: {encoding}. "
    caption += (
        f"Medians over repeats; nominal seconds. {_TIMES} DDP: how many times as "
        f"fast as the best DDP of the same repeat. {_TIMES} bound: step time over "
        "the perfect-overlap bound. Link: share of the goodput used. CPU: share of all processors "
        "of the machine. The fastest that communicates is set off."
    )
    if any(row.strategy == CEILING for row in shown):
        caption += f" {CEILING}: compute alone, nothing is sent."
    if marked := text_of_marked(shown):
        caption += f" {marked[0].upper()}{marked[1:]}."
    by_rate = grouped(rows, _rate)
    for rate_bps, here in by_rate.items():
        groups = grouped((row for row in here if row.encoding == encoding), _strategy)
        sending = [name for name in groups if name != CEILING]
        fastest = min(sending, key=lambda name: _step_s(groups[name]) or 0.0, default=None)
        rate = format_rate(rate_bps) if len(by_rate) > 1 else None
        for strategy in groups:
            if strategy == fastest:
                highlight.add(len(body))
            body.append([rate, *_overview_row(here, groups[strategy], strategy)])
        own = [row for rows in groups.values() for row in rows]
        caption = " ".join([caption, *factor_notes(own), *balance_notes(own)])
    return used_columns(columns, body, caption, frozenset(highlight))


def _overview_row(here: Sequence[Row], own: Sequence[Row], strategy: str) -> list[Cell]:
    step_s, bound_s = _step_s(own), _bound_s(own)
    equal = [row.params_equal for row in own if row.params_equal is not None]
    mark = " *" if any(row.cpu_bound for row in own) else ""
    return [
        f"{strategy}{mark}",
        step_s,
        _samples(own),
        _speedup(here, strategy),
        step_s / bound_s if step_s and bound_s else None,
        percent(median_or_none(row.link_utilization for row in own)),
        percent(median_or_none(row.cpu_share for row in own)),
        median_or_none(row.loss[-1] for row in own if row.has_losses),
        all(equal) if equal and strategy != CEILING else None,
    ]


def _is_baseline(strategy: str) -> bool:
    """Return whether others are compared with this: DDP that encodes nothing."""
    return strategy.startswith(BASELINE) and "+" not in strategy


def _plots(rows: Sequence[Row], colors: Mapping[str, int]) -> list[Plot]:
    rates = grouped(rows, _rate)
    plots = [_rate_plot(rows, colors)] if len(rates) > 1 else []
    plots.append(_step_bars(rows, colors))
    for rate_bps, here in rates.items():
        suffix = f" at {format_rate(rate_bps)}" if len(rates) > 1 else ""
        first = {name: group[0] for name, group in grouped(here, _strategy).items()}
        learning = {name: row for name, row in first.items() if row.has_losses}
        losses: Series = {
            name: (range(len(row.loss)), row.loss)
            for name, row in learning.items()
            if row.communicates
        }
        over_time: Series = {
            name: loss_over_time(row) for name, row in learning.items() if row.straggler
        }
        steps: Series = {
            name: (range(len(row.step_s)), row.step_s) for name, row in first.items() if row.step_s
        }
        for title, x_label, y_label, series in (
            ("Loss", "step", "training loss", losses),
            ("Loss over time", "time, s", "training loss", over_time),
            ("Step times", "measured step", "step, s", steps),
        ):
            if series:
                plots.append(
                    line_plot(
                        f"{title}{suffix}",
                        series,
                        x_label=x_label,
                        y_label=y_label,
                        colors=colors,
                        y_from_zero=series is steps,
                    )
                )
        plots += _link_plots(list(first.values()), colors, suffix)
    return plots


def _step_bars(rows: Sequence[Row], colors: Mapping[str, int]) -> Plot:
    """Return bars grouped by rate, or one bar a strategy where there is one rate only."""
    by_strategy, by_rate = grouped(rows, _strategy), grouped(rows, _rate)
    is_one_rate = len(by_rate) == 1
    groups = list(by_strategy.values() if is_one_rate else by_rate.values())
    bounds = list(map(_bound_s, groups))
    return bar_plot(
        "Step time",
        list(by_strategy) if is_one_rate else list(map(format_rate, by_rate)),
        {
            name: [_step_s(row for row in group if _strategy(row) == name) for group in groups]
            for name in by_strategy
        },
        y_label="step, s (lower is better)",
        limits={"perfect-overlap bound": bounds} if any(bounds) else None,
        colors=colors,
        stacked=is_one_rate,
        shows_names=not is_one_rate,
        note="Nominal seconds, dilation divided out; medians over repeats.",
    )


def _rate_plot(rows: Sequence[Row], colors: Mapping[str, int]) -> Plot:
    rates = sorted(grouped(rows, _rate))
    series: Series = {
        name: (
            [rate / 1e9 for rate in rates],
            [_samples(row for row in own if row.rate_bps == rate) for rate in rates],
        )
        for name, own in grouped(rows, _strategy).items()
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
    sending = sorted((row for row in rows if row.communicates), key=lambda row: row.step_s_median)
    names = [_strategy(row) for row in sending]
    # The fastest baseline and the fastest other strategy: more lines at once hide each other.
    shown = [name for name in names if _is_baseline(name)][:1]
    shown += [name for name in names if not _is_baseline(name)][:1]
    plots = []
    for key, words in (("transmit", "outbound"), ("receive", "inbound")):
        series: Series = {
            _strategy(row): (row.utilization_over_time["time_s"], row.utilization_over_time[key])
            for row in rows
            if row.communicates
            and row.utilization_over_time.get("time_s")
            and key in row.utilization_over_time
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
