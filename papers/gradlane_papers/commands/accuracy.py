"""`gradlane lab accuracy`: makes the study's runs, shows its tables and writes its files."""

from __future__ import annotations

import json
import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradlane.cli.options import RunsBudgetS, require_writable

if TYPE_CHECKING:
    from rich.console import Console

    from gradlane.report.page import Table


def lab_accuracy(
    output: Annotated[
        Path, typer.Option(help="Folder for results.json, results.csv, report.html.")
    ] = Path("accuracy"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer steps, seeds and codecs: ten minutes.")
    ] = False,
    task: Annotated[
        str,
        typer.Option(help="Only these, comma-separated: mlp, resnet, lstm, transformer, language."),
    ] = "",
    data: Annotated[
        Path | None,
        typer.Option(help="CIFAR-10's folder cifar-10-batches-py: trains ResNet-110 on it."),
    ] = None,
    scheme: Annotated[
        list[str] | None,
        typer.Option(
            help="In place of the study's: p3, asgd or a codec, may be given repeatedly; or all."
        ),
    ] = None,
    papers: Annotated[
        bool, typer.Option("--papers", help="In place of the study: runs of the papers' figures.")
    ] = False,
    between: Annotated[
        bool,
        typer.Option(
            "--between",
            help="In place of the study: fewer bits beside fewer exchanges, on a language model.",
        ),
    ] = False,
    headroom: Annotated[
        bool,
        typer.Option(
            "--headroom",
            help="In place of the study: a task with room above what is learned, a learning rate "
            "found for each codec, and differences corrected for their number.",
        ),
    ] = False,
    seeds: Annotated[int | None, typer.Option(help="How many; 5, or 3 where it is quick.")] = None,
    workers: Annotated[int, typer.Option(help="How many are emulated.")] = 4,
    budget_s: RunsBudgetS = math.inf,
    markdown: Annotated[
        Path | None, typer.Option(help="Write the tables as a page, such as docs/accuracy.md.")
    ] = None,
    summary: Annotated[
        Path | None, typer.Option(help="Write final accuracies by network and scheme as JSON.")
    ] = None,
) -> None:
    """Train four small networks with every codec, and compare loss and accuracy.

    Against steps and against emulated time at 0.1, 1 and 10 Gbit/s. The full study takes some
    hours of one processor. The same command given again continues an interrupted run.
    With --data the network is ResNet-110 on CIFAR-10: a step takes some seconds.
    """
    from gradlane.lab.runs.display import bar_progress
    from gradlane.lab.runs.folder import PresetFolder
    from gradlane.report.console import print_written, wide_console
    from gradlane_papers.accuracy import between as comparison
    from gradlane_papers.accuracy import cifar, findings, study
    from gradlane_papers.accuracy.markdown import main_table, page_text
    from gradlane_papers.accuracy.page import write_page
    from gradlane_papers.accuracy.tasks import CIFAR10

    if headroom:
        if task or data or scheme or papers or between or summary or workers != study.WORKERS:
            raise ValueError(
                "--headroom goes with --output, --quick, --seeds, --budget-s and --markdown"
            )
        _headroom(output, 5 if seeds is None else seeds, markdown, quick=quick, budget_s=budget_s)
        return
    tasks = [part.strip() for part in task.split(",") if part.strip()]
    if data is not None:
        cifar.use_folder(data)
        tasks = tasks or [CIFAR10]
    elif CIFAR10 in tasks:
        raise ValueError(f"task {CIFAR10} needs its images: name their folder by --data")
    if papers:
        if quick or tasks or scheme or between or workers != study.WORKERS:
            raise ValueError(
                "--papers names its own runs: leave out --quick, --task, --scheme, --between and "
                "--workers"
            )
        runs = study.paper_runs(5 if seeds is None else seeds)
    elif between:
        if scheme:
            raise ValueError("--between names its own schemes: leave out --scheme")
        runs = study.between_runs(quick=quick, tasks=tasks, seeds=seeds, workers=workers)
    else:
        runs = study.runs_of(
            quick=quick, tasks=tasks, schemes=scheme or (), seeds=seeds, workers=workers
        )
    folder = PresetFolder(output)
    folder.prepare()
    require_writable(markdown)
    require_writable(summary)
    console = wide_console()
    missing = study.missing(runs, study.read_results(folder.results))
    with bar_progress(console, sum(run.steps for run in missing)) as progress:
        rows = study.make_missing(runs, folder, progress, budget_s=budget_s)
    still_missing = study.missing(runs, rows)
    chosen = set(runs)
    every = [row for row in rows if row.run in chosen]
    # Tables compare what as many workers have learned.
    rows = [row for row in every if row.workers == workers]
    folder.write_table([row.to_json() for row in every])
    write_page(rows, folder.page)
    if markdown is not None:
        given = ["--quick"] * quick + ["--papers"] * papers + ["--between"] * between
        given += ["--task", task] if task else []
        given += [word for text in scheme or () for word in ("--scheme", text)]
        given += ["--seeds", str(seeds)] if seeds is not None else []
        given += ["--workers", str(workers)] if workers != study.WORKERS else []
        command = shlex.join(["gradlane", "lab", "accuracy", *given, "--markdown", str(markdown)])
        text = page_text(rows, command)
        if between:
            text = comparison.page_text(rows, command, still_missing)
        markdown.write_text(text, encoding="utf-8")
    if summary is not None:
        content = findings.summary(every, " ".join(["gradlane", *sys.argv[1:]]))
        summary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for name in findings.tasks_of(rows):
        _print(console, name, main_table(rows, name))
    print_written(console, folder.results, folder.table, folder.page, markdown, summary)
    if still_missing:
        verb = "is" if len(still_missing) == 1 else "are"
        typer.echo(
            f"{len(still_missing)} of {len(runs)} runs {verb} missing: give the same command again"
        )


def _headroom(
    output: Path, seeds: int, markdown: Path | None, *, quick: bool, budget_s: float
) -> None:
    """Make the runs of the task with headroom, and write its files."""
    from gradlane.lab.runs.display import bar_progress
    from gradlane.lab.runs.folder import PresetFolder
    from gradlane.report.console import print_written, text_table, wide_console
    from gradlane_papers.accuracy import headroom as compared

    if not 1 <= seeds <= 1000:
        raise ValueError(f"seeds is {seeds}, but must be from 1 to 1000")
    folder = PresetFolder(output)
    folder.prepare()
    require_writable(markdown)
    console = wide_console()
    with bar_progress(
        console, compared.planned_steps(folder, seeds=seeds, quick=quick)
    ) as progress:
        rows = compared.make(folder, progress, seeds=seeds, quick=quick, budget_s=budget_s)
    left = compared.planned_steps(folder, seeds=seeds, quick=quick) // compared.steps_of(
        quick=quick
    )
    folder.write_table([row.to_json() for row in rows])
    if markdown is not None:
        given = ["--quick"] * quick + ["--seeds", str(seeds), "--markdown", str(markdown)]
        command = shlex.join(["gradlane", "lab", "accuracy", "--headroom", *given])
        markdown.write_text(compared.page_text(rows, command, left), encoding="utf-8")
    console.print(text_table("mixture", compared.COLUMNS, compared.table_of(rows)))
    print_written(console, folder.results, folder.table, markdown)
    if left:
        verb = "is" if left == 1 else "are"
        typer.echo(f"{left} runs {verb} missing: give the same command again")


def _print(console: Console, name: str, lines: Table) -> None:
    """Show what was learned in equal steps; times are on the page."""
    from rich import box
    from rich.table import Table as TextTable

    table = TextTable(title=name, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for column in lines.columns[:5]:
        table.add_column(column)
    for row in lines.rows:
        table.add_row(*("-" if cell is None else str(cell) for cell in row[:5]))
    console.print(table)
