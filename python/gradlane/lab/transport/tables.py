"""Tables of the transport measurements on a terminal, made of their rows alone."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from gradlane.formats.rates import format_rate
from gradlane.lab.runs.rows import NO_EVIDENCE
from gradlane.lab.transport.measurement import Row


def print_transport(console: Console, rows: Sequence[Row]) -> None:
    """Print a table for each kind of measurement that the rows hold."""
    exchanges = [row for row in rows if row["measurement"] in ("exchange", "exchange_median")]
    if exchanges:
        console.print(_goodput(exchanges))
        console.print(_processors(exchanges))
    urgency = [row for row in rows if row["measurement"] == "urgency"]
    if urgency:
        console.print(_urgency(urgency))


def _table(title: str, caption: str, headings: Sequence[str]) -> Table:
    table = Table(
        title=title,
        caption=caption,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _name(row: Row) -> str:
    return "median" if row["repeat"] is None else f"repeat {row['repeat']}"


def _verdict(row: Row, name: str) -> str:
    return "met" if row[f"{name}_met"] else "missed"


def _goodput(rows: Sequence[Row]) -> Table:
    last = rows[-1]
    table = _table(
        f"goodput of a step without compute, {last['workers']} workers at "
        f"{format_rate(last['rate_bps'])}",
        f"target: gradlane at least {last['goodput_share_target']:.0%} of plain TCP streams in "
        f"both directions: {_verdict(last, 'goodput_share')}",
        ("", "TCP streams", "gradlane", "share", "step", "Gloo", "share", "machine busy"),
    )
    for row in rows:
        table.add_row(
            _name(row),
            format_rate(row["stream_goodput_bps"]),
            format_rate(row["gradlane_goodput_bps"]),
            f"{row['goodput_share']:.1%}",
            f"{row['gradlane_step_s']:.3f} s",
            format_rate(row["gloo_goodput_bps"]),
            f"{row['gloo_goodput_share']:.1%}",
            f"{row['gradlane_cpu_share']:.0%}" + ("*" if row["cpu_bound"] else ""),
        )
    return table


def _processors(rows: Sequence[Row]) -> Table:
    last = rows[-1]
    caption = (
        f"target: at most {last['cpu_ratio_target']:g} times Gloo's: "
        f"{_verdict(last, 'cpu_ratio')}; the machine's seconds hold all other work on it too"
    )
    if last["cpu_bound"]:
        caption += f"\n* {NO_EVIDENCE}"
    table = _table(
        "processor seconds for each gigabyte that a rank sends",
        caption,
        ("", "gradlane", "user + system", "Gloo", "user + system", "ratio", "machine", "softirq"),
    )
    for row in rows:
        cells = [_name(row)]
        for name in ("gradlane", "gloo"):
            cells.append(f"{row[f'{name}_cpu_s_per_gb']:.2f}")
            cells.append(
                f"{row[f'{name}_user_s_per_gb']:.2f} + {row[f'{name}_system_s_per_gb']:.2f}"
            )
        cells.append(f"{row['cpu_ratio']:.2f}")
        for name in ("machine", "softirq"):
            cells.append(
                f"{row[f'gradlane_{name}_s_per_gb']:.2f} / {row[f'gloo_{name}_s_per_gb']:.2f}"
            )
        table.add_row(*cells)
    return table


def _urgency(rows: Sequence[Row]) -> Table:
    last = rows[-1]
    table = _table(
        f"an urgent slice on saturated ports at {format_rate(last['rate_bps'])}: "
        "ms from ready, median (most)",
        f"target: {last['left_ms_target']:g} ms; replies wait for the reduction too; frames ahead: "
        "less urgent ones that left before the first and the last urgent frame",
        ("", "slices", "first left", "last left", "received", "ahead", "until last"),
    )
    for row in rows:
        cells = [f"{row['direction']}, {row['way']}", str(row["saturated_slices"])]
        for name, digits in (
            ("first_left_ms", 1),
            ("last_left_ms", 1),
            ("received_ms", 1),
            ("less_urgent_any_peer", 0),
            ("less_urgent_until_last", 0),
        ):
            median, most = row[f"{name}_median"], row[f"{name}_max"]
            cells.append("-" if median is None else f"{median:.{digits}f} ({most:.{digits}f})")
        table.add_row(*cells)
    return table
