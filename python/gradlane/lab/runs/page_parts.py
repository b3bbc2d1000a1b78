"""Parts of the pages of runs: shares, tables without empty columns, and the box of what was run."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from gradlane.formats.rates import format_rate
from gradlane.lab.runs.rows import NO_EVIDENCE, Row
from gradlane.planning.simulation.bound import describe_binding
from gradlane.report.page import Cell, Measurement, Table, measured_here


def percent(share: float | None) -> float | None:
    """Return a share as a table shows it."""
    return None if share is None else round(100.0 * share, 1)


def used_columns(
    columns: Sequence[str],
    body: Sequence[Sequence[Cell]],
    caption: str,
    highlight: frozenset[int] = frozenset(),
) -> Table:
    """Return a table without the columns that are empty in every line."""
    used = [index for index in range(len(columns)) if any(line[index] is not None for line in body)]
    return Table(
        [columns[index] for index in used],
        [[line[index] for index in used] for line in body],
        caption,
        highlight,
    )


def plain_cell(name: str, value: Any) -> Cell:
    """Return a field of a row as a table shows it."""
    if name == "param_digest" and isinstance(value, str):
        return value[:12]
    if name == "bound_binding" and isinstance(value, str):
        return describe_binding(value)
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def measurement(rows: Sequence[Row], command: str | None = None) -> Measurement:
    """Return the box that says what was run, with what, where, and how busy the machine was.

    Args:
        rows: of one page.
        command: what was run; where it is None that of the rows, or else of this process.
    """
    runs = [row for row in rows if not row.is_simulated]
    machines = [row.machine for row in runs]
    commands = dict.fromkeys(command_of(machine) for machine in machines if machine)
    facts: dict[str, str] = {}

    def add_distinct(sources: Sequence[Mapping[str, Any]], *names: str) -> None:
        for name in names:
            values = dict.fromkeys(str(source[name]) for source in sources if name in source)
            if values:
                facts[name.replace("_", " ")] = ", ".join(values)

    dates = sorted({str(machine["when"]) for machine in machines if machine.get("when")})
    if dates:
        facts["measured"] = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    add_distinct(machines, "processor_model", "processors")
    add_distinct([row.versions for row in runs], "kernel", "gradlane", "torch", "numpy", "python")
    loads = [float(it["load_average_at_start"]) for it in machines if "load_average_at_start" in it]
    if loads:
        facts["load average at the start of runs"] = f"{min(loads):.2f} to {max(loads):.2f}"
    shares = [row.cpu_share for row in runs if row.cpu_share is not None]
    if shares:
        facts["machine CPU, busiest run"] = f"{max(shares):.0%}"
    busy = sum(row.cpu_bound for row in runs)
    facts["runs"] = f"{len(runs)} measured, {len(rows) - len(runs)} simulated"
    if busy:
        facts[f"of these with {NO_EVIDENCE}"] = str(busy)
    for text, values, spelled in (
        ("workers", {row.workers for row in runs}, "{:g}".format),
        ("dilation", {row.dilation for row in runs}, "{:g}".format),
        ("steps a run", {row.steps for row in runs}, "{:g}".format),
        ("steps of warm-up", {row.warmup for row in runs}, "{:g}".format),
        ("seed", {row.seed for row in runs if row.has("seed")}, "{:g}".format),
        ("goodput", {row.goodput_bps for row in runs}, format_rate),
    ):
        low, high = min(values, default=0), max(values, default=0)
        if high or (text == "seed" and values):
            facts[text] = spelled(low) if low == high else f"{spelled(low)} to {spelled(high)}"
    here = measured_here(command)
    if not any(machines) and not any(row.versions for row in runs):
        # A page may be made elsewhere and later than its rows: what they say comes first.
        facts = {**here.facts, **facts}
    recorded = "\n".join(filter(None, commands))
    return Measurement(command or recorded or here.command, facts)


def command_of(machine: Mapping[str, Any]) -> str:
    """Return the command that the facts of a row's machine name; empty where they name none."""
    words = [str(word) for word in machine.get("command", [])]
    return shlex.join([os.path.basename(words[0]), *words[1:]]) if words else ""
