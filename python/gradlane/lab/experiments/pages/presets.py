"""Pages of the lab's presets: what they share, and which page is whose."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradlane.lab.experiments.findings import measured
from gradlane.lab.runs.evidence import NO_EVIDENCE
from gradlane.report.page import Cell, Measurement, Section, Table, write_report

Row = Mapping[str, Any]
HIDDEN_FIELDS = ("preset", "seed", "repeat", "warmup", "batch_size")
"""Fields of rows that the table of all rows leaves out."""


def report_from_preset(rows: Sequence[Row], path: str | Path) -> None:
    """Write the page of the preset that the rows are of.

    Args:
        rows: measured and simulated rows, each with the `preset` that it belongs to.
        path: the HTML file to write.

    Raises:
        ValueError: there are no rows, or they are of no preset or several.
        OSError: the file cannot be written.
    """
    from gradlane.lab.experiments.pages import bandwidth, scaling, slices, utilization

    pages: Mapping[str, Callable[[Sequence[Row]], tuple[str, str, list[Section]]]] = {
        "bandwidth": bandwidth.page_of,
        "scaling": scaling.page_of,
        "slices": slices.page_of,
        "utilization": utilization.page_of,
    }
    names = presets_of(rows)
    if len(names) != 1 or not names <= pages.keys():
        raise ValueError(
            f"rows of one preset make a page, these are of {', '.join(names) or 'none'}"
        )
    title, summary, sections = pages[names.pop()](rows)
    write_report(path, title, [*sections, all_rows(rows), measurement(rows)], summary=summary)


def is_of_preset(rows: Sequence[Row]) -> bool:
    """Whether rows came from a preset, and not from `lab run`."""
    return bool(rows) and isinstance(rows[0], Mapping) and "preset" in rows[0]


def presets_of(rows: Sequence[Row]) -> set[str]:
    """Return the names of the presets that rows came from."""
    return {str(row.get("preset")) for row in rows}


def all_rows(rows: Sequence[Row]) -> Section:
    """Return a folded section with every field of every row that is a number or a text."""
    from gradlane.lab.experiments.folder import table_columns

    columns = [name for name in table_columns(rows) if name not in HIDDEN_FIELDS]
    body = [[_plain(name, row.get(name)) for name in columns] for row in rows]
    caption = (
        "Times ending in _s are nominal, dilation divided out; only wall_ and cpu_s_per_step are "
        "real. The same table is in results.csv."
    )
    return Section(f"All {len(rows)} rows", [Table(columns, body, caption)], is_folded=True)


def _plain(name: str, value: Any) -> Cell:
    if name == "param_digest" and isinstance(value, str):
        return value[:12]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def measurement(rows: Sequence[Row]) -> Section:
    """Return the box that says what was run, with what, where, and how busy the machine was."""
    evidence = [row for row in rows if row.get("source") != "simulated"]
    machines = [row.get("machine") or {} for row in evidence]
    commands = list(dict.fromkeys(_command(machine) for machine in machines if machine))
    facts: dict[str, str] = {}
    dates = sorted({str(machine["when"]) for machine in machines if machine.get("when")})
    if dates:
        facts["measured"] = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    for name in ("processor_model", "processors"):
        values = _distinct(machines, name)
        if values:
            facts[name.replace("_", " ")] = ", ".join(values)
    versions = [row.get("versions") or {} for row in evidence]
    for name in ("kernel", "gradlane", "torch", "numpy", "python"):
        values = _distinct(versions, name)
        if values:
            facts[name] = ", ".join(values)
    loads = [float(it["load_average_at_start"]) for it in machines if "load_average_at_start" in it]
    if loads:
        facts["load average at the start of runs"] = f"{min(loads):.2f} to {max(loads):.2f}"
    shares = [float(row["cpu_share"]) for row in evidence if row.get("cpu_share") is not None]
    if shares:
        facts["machine CPU, busiest run"] = f"{max(shares):.0%}"
    facts["runs"] = f"{len(measured(rows))} measured, {len(rows) - len(evidence)} simulated"
    busy = sum(bool(row["cpu_bound"]) for row in evidence)
    if busy:
        facts[f"runs with {NO_EVIDENCE}"] = str(busy)
    for name, text in (("workers", "workers"), ("dilation", "dilation"), ("steps", "steps a run")):
        numbers = sorted({float(row[name]) for row in evidence if row.get(name) is not None})
        if numbers:
            facts[text] = (
                f"{numbers[0]:g}" if len(numbers) == 1 else f"{numbers[0]:g} to {numbers[-1]:g}"
            )
    return Section("", [Measurement("\n".join(commands) or "nothing was measured", facts)])


def _command(machine: Mapping[str, Any]) -> str:
    words = [str(word) for word in machine.get("command", [])]
    return shlex.join([os.path.basename(words[0]), *words[1:]]) if words else ""


def _distinct(sources: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    return list(dict.fromkeys(str(source[name]) for source in sources if name in source))
