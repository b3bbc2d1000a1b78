"""Tables of the transport measurements on a terminal, made of their rows alone."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from gradlane.formats.rates import format_rate
from gradlane.lab.runs.rows import NO_EVIDENCE
from gradlane.lab.transport.measurement import (
    CPU_RATIO_TARGET,
    GOODPUT_SHARE_TARGET,
    URGENT_MS_TARGET,
    ExchangeRow,
    TransportRow,
    UrgencyRow,
)
from gradlane.report.console import text_table


def print_transport(console: Console, rows: Sequence[TransportRow]) -> None:
    """Print a table for each kind of measurement that the rows hold."""
    exchanges = [row for row in rows if isinstance(row, ExchangeRow)]
    if exchanges:
        console.print(_goodput(exchanges))
        console.print(_processors(exchanges))
    urgency = [row for row in rows if isinstance(row, UrgencyRow)]
    if urgency:
        console.print(_urgency(urgency))


def _name(row: ExchangeRow) -> str:
    return "median" if row.repeat is None else f"repeat {row.repeat}"


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "missed"


def _goodput(rows: Sequence[ExchangeRow]) -> Table:
    last = rows[-1]
    body = [
        [
            _name(row),
            format_rate(row.stream_goodput_bps),
            format_rate(row.gradlane.goodput_bps),
            f"{row.goodput_share:.1%}",
            f"{row.gradlane.step_s:.3f} s",
            format_rate(row.gloo.goodput_bps),
            f"{row.gloo_goodput_share:.1%}",
            f"{row.gradlane.cpu_share:.0%}" + ("*" if row.cpu_bound else ""),
        ]
        for row in rows
    ]
    return text_table(
        f"goodput of a step without compute, {last.conditions.workers} workers at "
        f"{format_rate(last.conditions.rate_bps)}",
        ("", "TCP streams", "gradlane", "share", "step", "Gloo", "share", "machine busy"),
        body,
        caption=f"target: gradlane at least {GOODPUT_SHARE_TARGET:.0%} of plain TCP streams in "
        f"both directions: {_verdict(last.goodput_share_met)}",
    )


def _processors(rows: Sequence[ExchangeRow]) -> Table:
    last = rows[-1]
    caption = (
        f"target: at most {CPU_RATIO_TARGET:g} times Gloo's: {_verdict(last.cpu_ratio_met)}; "
        "the machine's seconds hold all other work on it too"
    )
    if last.cpu_bound:
        caption += f"\n* {NO_EVIDENCE}"
    body = [
        [
            _name(row),
            f"{ours.cpu_s_per_gb:.2f}",
            f"{ours.user_s_per_gb:.2f} + {ours.system_s_per_gb:.2f}",
            f"{gloo.cpu_s_per_gb:.2f}",
            f"{gloo.user_s_per_gb:.2f} + {gloo.system_s_per_gb:.2f}",
            f"{row.cpu_ratio:.2f}",
            f"{ours.machine_s_per_gb:.2f} / {gloo.machine_s_per_gb:.2f}",
            f"{ours.softirq_s_per_gb:.2f} / {gloo.softirq_s_per_gb:.2f}",
        ]
        for row, ours, gloo in ((row, row.gradlane, row.gloo) for row in rows)
    ]
    return text_table(
        "processor seconds for each gigabyte that a rank sends",
        ("", "gradlane", "user + system", "Gloo", "user + system", "ratio", "machine", "softirq"),
        body,
        caption=caption,
    )


def _urgency(rows: Sequence[UrgencyRow]) -> Table:
    body = []
    for row in rows:
        cells = [f"{row.direction}, {row.way}", str(len(row.saturated))]
        for name, digits in (
            ("first_left_ms", 1),
            ("last_left_ms", 1),
            ("received_ms", 1),
            ("less_urgent_any_peer", 0),
            ("less_urgent_until_last", 0),
        ):
            middle, most = row.middle_and_most(name)
            cells.append("-" if middle is None else f"{middle:.{digits}f} ({most:.{digits}f})")
        body.append(cells)
    return text_table(
        f"an urgent slice on saturated ports at {format_rate(rows[-1].conditions.rate_bps)}: "
        "ms from ready, median (most)",
        ("", "slices", "first left", "last left", "received", "ahead", "until last"),
        body,
        caption=f"target: {URGENT_MS_TARGET:g} ms; replies wait for the reduction too; frames "
        "ahead: less urgent ones that left before the first and the last urgent frame",
    )
