"""An experiment of a paper, declared: its cells, its simulations, its tables and its page.

Running one measures what is missing, simulates what is missing, and writes table and page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table as TextTable

from gradlane.formats.signals import Terminated
from gradlane.lab.cluster.errors import LabError
from gradlane.lab.runs.cells import (
    STEPS,
    WORKERS,
    Cell,
    measure_missing,
    remaining_estimate_s,
    still_missing,
    usual_dilation,
)
from gradlane.lab.runs.display import runs_progress
from gradlane.lab.runs.folder import PresetFolder
from gradlane.lab.runs.page_parts import measurement
from gradlane.lab.runs.rows import (
    CEILING,
    MEASURED,
    NO_EVIDENCE,
    Row,
    compact,
    read_rows,
    replace_or_say,
    save_rows,
)
from gradlane.lab.runs.run import run_lab
from gradlane.lab.runs.strategy import parse_strategy
from gradlane.report.console import print_written, text_table
from gradlane.report.page import Block, Figures, KeyFigure, Paragraph, Section, Table, write_report
from gradlane_papers.experiments.findings import Findings, completed
from gradlane_papers.experiments.parts import all_rows
from gradlane_papers.experiments.simulated import Simulation, simulate_missing

GBIT = 1_000_000_000


@dataclass(frozen=True)
class Preset:
    """An experiment.

    Attributes:
        name: of the command, and in the rows.
        title: of the page.
        rates_bps: nominal rates of the ports, by network.
        strategies: the first is compute alone, which sets the ceiling and the bound.
        text: the page's paragraph about the experiment.
        figures: key figures of the page.
        sections: the page's further sections.
        summary: a sentence or two of findings; may be empty.
        simulations: the simulations beside the runs, made from all rows so far.
        overview: the table that is printed at the end; None: the first of each section.
        remarks: paragraphs between figures and text.
        is_shown: whether a row belongs on the page.
        workloads: networks that are measured where none is named; empty: all.
        workers: numbers of ranks, each on a node of its own.
        sizes: elements of a slice at most; None: each strategy's own.
        steps: measured steps of a run.
        dilation: real over nominal time of a network, a rate and a number of workers.
        cells: the runs to measure, made by `choose`.
        run: measures a cell.
        finish: completes all rows at the end.
    """

    name: str
    title: str
    rates_bps: Mapping[str, tuple[int, ...]]
    strategies: tuple[str, ...]
    text: str
    figures: Callable[[Findings], Iterable[KeyFigure]]
    sections: Callable[[Findings], Iterable[Section]]
    summary: Callable[[Findings], str]
    simulations: Callable[[Sequence[Row]], Sequence[Simulation]] = lambda rows: []
    overview: Callable[[Findings], Table] | None = None
    remarks: Callable[[Findings], Iterable[Block]] = lambda found: ()
    is_shown: Callable[[Row], bool] = lambda row: True
    workloads: tuple[str, ...] = ()
    workers: tuple[int, ...] = (WORKERS,)
    sizes: tuple[int | None, ...] = (None,)
    steps: int = STEPS
    dilation: Callable[[str, int, int], float] = lambda workload, rate_bps, workers: usual_dilation(
        workload, rate_bps
    )
    cells: Sequence[Cell] = ()
    run: Callable[..., list[Row]] = run_lab
    finish: Callable[[Sequence[Row]], list[Row]] = completed

    def choose(
        self,
        *,
        workloads: Sequence[str] = (),
        rates_bps: Sequence[int] = (),
        strategies: Sequence[str] = (),
        workers: Sequence[int] = (),
        sizes: Sequence[int] = (),
        dilation: float | None = None,
        steps: int | None = None,
    ) -> Preset:
        """Return the preset with its cells.

        Args:
            workloads: only these networks; all of the preset where none is named.
            rates_bps: nominal rates in place of the preset's.
            strategies: in place of the preset's; compute alone is always measured.
            workers: numbers of ranks in place of the preset's.
            sizes: elements of a slice at most, in place of the preset's.
            dilation: real over nominal time; None: what two cores carry with ease.
            steps: measured steps of a run in place of the preset's.

        Raises:
            ValueError: a network is not in the preset, or the lab would refuse a strategy, a rate
                or a number in the middle of the runs.
        """
        for workload in workloads:
            if workload not in self.rates_bps:
                raise ValueError(
                    f"there is no network {workload!r} here; there are: {', '.join(self.rates_bps)}"
                )
        named = [CEILING, *(parse_strategy(text).text for text in strategies)]
        names = tuple(dict.fromkeys(named)) if strategies else self.strategies
        chosen_sizes = sorted(set(sizes)) or self.sizes
        cells = [
            Cell(
                workload,
                rate_bps,
                # Compute alone knows no slices: once is enough.
                tuple(one for one in names if one != CEILING or size == chosen_sizes[0]),
                self.dilation(workload, rate_bps, count) if dilation is None else dilation,
                workers=count,
                slice_elems=size,
                steps=self.steps if steps is None else steps,
            )
            for workload in dict.fromkeys(workloads) or self.workloads or self.rates_bps
            for rate_bps in rates_bps or self.rates_bps[workload]
            for count in workers or self.workers
            for size in chosen_sizes
        ]
        for cell in cells:
            cell.options(cell.strategies)
        return replace(self, cells=cells)

    @property
    def estimate_s(self) -> float:
        """About how long all measuring takes, in real seconds."""
        return remaining_estimate_s(self.cells, [])

    def describe(self, row: Row) -> Row:
        """Return what is kept of a measured row."""
        kept = compact(row)
        machine = {**kept.machine, "command": list(row.machine.get("command", []))}
        return replace(kept, preset=self.name, source=MEASURED, machine=machine)

    def tables(self, found: Findings) -> Iterator[TextTable]:
        """Return the tables that are printed at the end: the overview, or one of each section."""
        if self.overview is not None:
            tables = [(self.title, self.overview(found))]
        else:
            tables = [
                next((one.title, block) for block in one.blocks if isinstance(block, Table))
                for one in self.sections(found)
            ]
        for title, table in tables:
            yield text_table(
                title, table.columns, table.rows, highlight=table.highlight, wraps=True
            )

    def write_page(self, rows: Sequence[Row], path: str | Path) -> None:
        """Write the page.

        Args:
            rows: measured and simulated rows.
            path: the HTML file to write.

        Raises:
            ValueError: no row was measured.
            OSError: the file cannot be written.
        """
        found = Findings(rows)
        if not any(map(self.is_shown, found.measured)):
            raise ValueError("no row was measured")
        blocks: list[Block] = [Figures(list(self.figures(found)))]
        if found.note:
            blocks.insert(0, Paragraph(f"{found.note[0].upper()}{found.note[1:]}."))
        blocks += [*self.remarks(found), Paragraph(self.text)]
        sections = [Section("In short", blocks), *self.sections(found)]
        sections += [all_rows(rows), Section("", [measurement(rows)])]
        write_report(path, self.title, sections, summary=self.summary(found))


def run_preset(preset: Preset, folder: PresetFolder, console: Console) -> list[Row]:
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
    for row in rows:
        if row.preset not in (preset.name, None):
            raise ValueError(
                f"{folder.results} holds rows of `gradlane lab {row.preset}`: name another "
                "folder with --output"
            )
    if still_missing(preset.cells, rows):
        if rows:
            console.print(f"going on with {folder.results}", highlight=False)
        _measure(preset, folder, console)
    rows = _simulate(preset, completed(read_rows(folder.results)), folder, console)
    rows = preset.finish(rows)
    save_rows(rows, folder.results)
    folder.write_table([row.to_json() for row in rows])
    replace_or_say(folder.page, lambda partial: preset.write_page(rows, partial))
    print_written(console, folder.results, folder.table, folder.page)
    if not any(row.is_evidence for row in rows):
        raise LabError(
            f"in all runs: {NO_EVIDENCE}; end what else runs here, and give the same command again"
        )
    return rows


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
            f"in {busy} runs: {NO_EVIDENCE}; the same command measures them again", highlight=False
        )


def _simulate(
    preset: Preset, rows: Sequence[Row], folder: PresetFolder, console: Console
) -> list[Row]:
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
            simulations, rows, keep=lambda so_far: save_rows(so_far, folder.results), on_run=show
        )
    return [replace(row, preset=preset.name) for row in found]
