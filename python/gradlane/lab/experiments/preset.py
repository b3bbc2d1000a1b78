"""Running a preset: measure what is missing, simulate what is missing, write table and page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from gradlane.formats.signals import Terminated
from gradlane.lab.cluster.errors import LabError
from gradlane.lab.experiments.completed import completed
from gradlane.lab.experiments.findings import measured
from gradlane.lab.experiments.folder import PresetFolder
from gradlane.lab.experiments.simulated import Simulation, simulate_missing
from gradlane.lab.runs.cells import (
    MEASURED,
    Cell,
    compact,
    measure_missing,
    read_rows,
    remaining_estimate_s,
    replace_or_say,
    save_rows,
    still_missing,
)
from gradlane.lab.runs.display import runs_progress
from gradlane.lab.runs.evidence import NO_EVIDENCE
from gradlane.lab.runs.results import Row
from gradlane.lab.runs.run import run_lab

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Preset:
    """An experiment.

    Attributes:
        name: of the command, and in the rows.
        cells: what is measured.
        simulations: what is simulated beside it, from all rows so far.
        extra: further fields of a measured row.
        finish: what is added to all rows at the end.
        run: what measures.
    """

    name: str
    cells: Sequence[Cell]
    simulations: Callable[[Rows], Sequence[Simulation]]
    extra: Callable[[Row], Mapping[str, Any]] = lambda row: {}
    run: Callable[..., list[Row]] = run_lab
    finish: Callable[[Rows], list[dict[str, Any]]] = completed

    def __post_init__(self) -> None:
        """Refuse what the lab would refuse in the middle of the runs.

        Raises:
            ValueError: a cell has a strategy, a rate or a number that makes no sense.
        """
        for cell in self.cells:
            cell.options(cell.strategies)

    @property
    def estimate_s(self) -> float:
        """About how long all measuring takes, in real seconds."""
        return remaining_estimate_s(self.cells, [])

    def describe(self, row: Row) -> dict[str, Any]:
        """Return what is kept of a measured row."""
        kept = compact(row)
        kept["machine"]["command"] = list(row.machine.get("command", []))
        return {"preset": self.name, "source": MEASURED, **kept, **self.extra(row)}


def run_preset(preset: Preset, folder: PresetFolder, console: Console) -> list[dict[str, Any]]:
    """Run a preset from where it stopped, and write its files.

    Args:
        preset: what to run.
        folder: where its files are.
        console: where progress is shown.

    Returns:
        All rows.

    Raises:
        LabError: a run failed, none is evidence, or a file cannot be written; finished runs are
            kept.
        ValueError: the folder holds something else.
    """
    folder.prepare()
    rows = read_rows(folder.results)
    _require_own(preset, rows, folder)
    if still_missing(preset.cells, rows):
        if rows:
            console.print(f"going on with {folder.results}", highlight=False)
        _measure(preset, folder, console)
    rows = _simulate(preset, completed(read_rows(folder.results)), folder, console)
    rows = preset.finish(rows)
    if not measured(rows):
        save_rows(rows, folder.results)
        raise LabError(
            f"in all runs: {NO_EVIDENCE}; end what else runs here, and give the same command again"
        )
    write_files(rows, folder)
    for path in (folder.results, folder.table, folder.page):
        console.print(f"wrote {path}", highlight=False)
    return rows


def write_files(rows: Rows, folder: PresetFolder) -> None:
    """Write rows, table and page.

    Raises:
        LabError: a file cannot be written.
    """
    from gradlane.lab.experiments.pages.presets import report_from_preset

    save_rows(rows, folder.results)
    folder.write_table(rows)
    replace_or_say(folder.page, lambda partial: report_from_preset(rows, partial))


def _require_own(preset: Preset, rows: Rows, folder: PresetFolder) -> None:
    for row in rows:
        if row.get("preset", preset.name) != preset.name:
            raise ValueError(
                f"{folder.results} holds rows of `gradlane lab {row['preset']}`: name another "
                "folder with --output"
            )


def _measure(preset: Preset, folder: PresetFolder, console: Console) -> None:
    try:
        with runs_progress(console) as progress:
            busy = measure_missing(
                preset.cells,
                folder.results,
                progress=progress,
                describe=preset.describe,
                run=preset.run,
            )
    except (LabError, KeyboardInterrupt, Terminated):
        kept = len(read_rows(folder.results))
        if kept:
            console.print(
                f"{kept} rows are in {folder.results}: the same command goes on from there",
                highlight=False,
            )
        raise
    if busy:
        console.print(
            f"in {busy} runs: {NO_EVIDENCE}; the same command measures them again",
            highlight=False,
        )


def _simulate(
    preset: Preset, rows: list[dict[str, Any]], folder: PresetFolder, console: Console
) -> list[dict[str, Any]]:
    simulations = preset.simulations(rows)
    columns = (TextColumn("simulating {task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=len(simulations))

        def show(simulation: Simulation) -> None:
            progress.update(task, advance=1, description=simulation.text)

        if simulations and not console.is_terminal:
            console.print(f"clusters to simulate: {len(simulations)}", style="dim", highlight=False)
        found = simulate_missing(
            simulations,
            rows,
            keep=lambda so_far: save_rows(so_far, folder.results),
            on_run=show,
        )
    return [{"preset": preset.name, **row} for row in found]
