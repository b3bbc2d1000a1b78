"""Parts of the tables, plots and pages of experiments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from gradlane.formats.rates import format_rate
from gradlane.lab.runs.folder import table_columns
from gradlane.lab.runs.page_parts import percent, plain_cell, used_columns
from gradlane.lab.runs.rows import CEILING, MEASURED, SIMULATED, Row
from gradlane.planning.simulation.scenarios import RING_FUSED
from gradlane.report.curves import Points
from gradlane.report.page import Cell, Section, Table
from gradlane.training.options.strategy import STRATEGIES as ENGINE_STRATEGIES
from gradlane_papers.experiments.findings import Findings

Column = tuple[str, Callable[[Row, Findings], Cell]]
"""A heading, and the cell of a row."""
COLORS: Mapping[str, int | str] = {name: number for number, name in enumerate(ENGINE_STRATEGIES)}
BOUND = "bound"
HIDDEN_FIELDS = ("preset", "seed", "repeat", "warmup", "batch_size")
"""Fields of rows that the table of all rows leaves out."""


def marked(row: Row) -> str:
    """Return a row's strategy, with a star where the row is no evidence."""
    return f"{row.strategy} *" if row.cpu_bound else row.strategy


def to_bound(row: Row) -> float | None:
    """Return by what share a step is longer than its bound; None where nothing is sent."""
    comparable = row.communicates and row.strategy != RING_FUSED
    return row.over_bound - 1.0 if comparable and row.over_bound is not None else None


def _simulated_ms(row: Row, found: Findings) -> float | None:
    other = found.counterpart(row)
    return None if other is None else round(1e3 * other.step_s_median, 1)


RATE: Column = ("rate, Gbit/s", lambda row, _: row.gbps)
STRATEGY: Column = ("strategy", lambda row, _: marked(row))
SAMPLES: Column = ("samples/s", lambda row, _: samples(row))
STEP: Column = ("step, ms", lambda row, _: round(1e3 * row.step_s_median, 1))
TO_BOUND: Column = ("to bound, %", lambda row, _: percent(to_bound(row)))
SIMULATED_MS: Column = ("simulated, ms", _simulated_ms)
ERROR: Column = ("error, %", lambda row, found: percent(found.prediction_error(row)))
PORTS: Column = (
    "ports, %",
    lambda row, _: percent(row.link_utilization) if row.communicates else None,
)
CPU: Column = ("CPU, %", lambda row, _: percent(row.cpu_share))


def row_table(
    columns: Sequence[Column],
    rows: Sequence[Row],
    found: Findings,
    caption: str,
    is_set_off: Callable[[Row], bool] = lambda row: False,
) -> Table:
    """Return a line for each row, without columns that are empty in all of them."""
    body = [[cell(row, found) for _, cell in columns] for row in rows]
    highlight = frozenset(number for number, row in enumerate(rows) if is_set_off(row))
    return used_columns([heading for heading, _ in columns], body, caption, highlight)


def samples(row: Row | None) -> float | None:
    """Return the samples a second of a row, as a table shows them."""
    return None if row is None else round(row.samples_per_s, 1)


def points(
    rows: Iterable[Row],
    x: Callable[[Row], float],
    y: Callable[[Row], float],
    text: Callable[[Row], str],
) -> Points:
    """Return a point for each row, from left to right."""
    ordered = sorted(rows, key=x)
    xs = [float(x(row)) for row in ordered]
    return Points(xs, list(map(y, ordered)), list(map(text, ordered)))


def bound_samples(row: Row) -> float:
    """Return the samples a second that perfect overlap would reach."""
    assert row.bound_step_s, "rows without a bound have no such point"
    return row.workers * row.batch_size / row.bound_step_s


def tooltip(row: Row, found: Findings) -> str:
    """Return what a row's point says when it is pointed at."""
    source = SIMULATED if row.is_simulated else MEASURED
    lines = [
        f"<b>{row.strategy}</b>, {source}, {format_rate(row.rate_bps)}",
        f"{row.samples_per_s:.1f} samples/s",
        f"step {row.step_s_median * 1e3:.1f} ms",
    ]
    if row.over_bound is not None:
        lines.append(f"{row.over_bound - 1.0:+.1%} to the bound")
    baseline = found.baseline(row.cluster)
    if baseline is not None and not row.is_simulated:
        lines.append(f"{baseline.step_s_median / row.step_s_median:.2f}× {baseline.strategy}")
    if row.link_utilization is not None:
        lines.append(f"ports used {row.link_utilization:.0%}")
    return "<br>".join(lines)


def strategy_order(row: Row) -> int:
    """Return where a strategy stands in a table: compute alone, then the engine's, then others."""
    order = (CEILING, *ENGINE_STRATEGIES)
    return order.index(row.strategy) if row.strategy in order else len(order)


def all_rows(rows: Sequence[Row]) -> Section:
    """Return a folded section with every field of every row that is a number or a text."""
    contents = [row.to_json() for row in rows]
    columns = [name for name in table_columns(contents) if name not in HIDDEN_FIELDS]
    body = [[plain_cell(name, content.get(name)) for name in columns] for content in contents]
    caption = (
        "Times ending in _s are nominal, dilation divided out; only wall_ and cpu_s_per_step are "
        "real. The same table is in results.csv."
    )
    return Section(f"All {len(rows)} rows", [Table(columns, body, caption)], is_folded=True)
