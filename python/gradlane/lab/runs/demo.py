"""The demonstration: does gradlane train faster than DDP here, and does it learn the same?

First a real model on real data, then a large model replayed, both on four emulated nodes whose
links are about as slow as the compute is long: there communication can be hidden, or not. A
workload or a rate of the user's replaces both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from gradlane.formats.rates import format_rate
from gradlane.lab.runs.display import bar_progress, print_tables
from gradlane.lab.runs.options import LabOptions
from gradlane.lab.runs.rows import Row, save_rows
from gradlane.lab.runs.run import run_lab
from gradlane.lab.runs.strategy import parse_strategies, parse_strategy
from gradlane.lab.workloads import REAL_NAMES, REPLAY_NAMES
from gradlane.planning.models import ARCHITECTURES
from gradlane.report.console import format_time, print_written

REAL = LabOptions(
    workload="char-transformer",
    strategies=parse_strategies("none,ddp-gloo:25,ddp-gloo:1,p3"),
    workers=4,
    # A step moves 6.1 MB through each port, both ways at once: about the compute's 0.36 s.
    rates_bps=[150_000_000],
    dilation=1.0,
    steps=25,
    warmup=3,
    clip_norm=1.0,
)
"""A transformer of a million parameters that learns to write Python, with gradients clipped."""

REPLAY = LabOptions(
    workload="resnet50",
    strategies=parse_strategies("none,ddp-gloo:25,p3"),
    workers=4,
    rates_bps=[4_000_000_000],
    dilation=10.0,
    steps=3,
    warmup=3,
)
"""ResNet-50 at 4 Gbit/s, everything ten times slower than nominal."""

_PORT_BPS = 400_000_000
"""Real rate that one machine's processors carry on four ports, both ways at once."""
_NOTABLE_WAIT = 0.05
"""Share of the compute below which a wait for gradients is not worth a change."""
_FULL_PORT = 1.5
"""Times the compute from which a bound says that bytes, and not their order, are the matter."""

NEXT_COMMANDS = (
    ("gradlane profile --json profile.json train.py", "what a step of your script computes"),
    (
        "gradlane whatif profile.json --workers 4 --rate 10gbit --strategy ddp,p3",
        "is the network what it would wait for, and what would help",
    ),
    (
        "torchrun --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
        "-m gradlane doctor",
        "are your machines fit, before the first run on them",
    ),
)
"""Commands for the user's own script, and the question that each answers."""


def parts_of(workload: str | None, rate_bps: int | None) -> tuple[LabOptions, ...]:
    """Return what to run: both parts, or a workload at a rate.

    Args:
        workload: as in `gradlane lab run`; None: ResNet-50 where a rate is given.
        rate_bps: nominal rate of each port; None: that at which the gradients of a replayed
            workload take as long as its compute, and the first part's of one that computes.

    Raises:
        ValueError: the workload is unknown or too large, or the rate is out of range.
    """
    if workload is None and rate_bps is None:
        return REAL, REPLAY
    workload = workload or REPLAY.workload
    base = REAL if workload in REAL_NAMES else REPLAY
    if rate_bps is None:
        rate_bps = _balanced_rate_bps(workload) if workload in REPLAY_NAMES else base.rates_bps[0]
    dilation = max(1.0, rate_bps / _PORT_BPS)
    return (replace(base, workload=workload, rates_bps=[rate_bps], dilation=dilation),)


def _balanced_rate_bps(workload: str) -> int:
    """Return the rate at which a step's bytes take a port as long as the compute, in two digits."""
    model = ARCHITECTURES[workload]()
    port_bits = 32 * model.numel * 2 * (REPLAY.workers - 1) / REPLAY.workers
    return int(float(f"{port_bits / model.batch_time_s:.1e}"))


def run_demo(
    console: Console,
    *,
    json_path: Path | None,
    html_path: Path | None,
    parts: Sequence[LabOptions] = (REAL, REPLAY),
) -> None:
    """Run all parts, print a table and a verdict for each, and write the files.

    Args:
        console: where to print.
        json_path: where to write all rows, or None.
        html_path: where to write the page, or None.
        parts: what to run.

    Raises:
        LabError: the cluster could not be built, or a rank failed.
    """
    rows: list[Row] = []
    for number, options in enumerate(parts, start=1):
        console.print(
            f"[bold]{number}/{len(parts)}[/bold]  {options.workload} on {options.workers} emulated "
            f"nodes at {format_rate(options.rates_bps[0])}"
            + ("" if options.clip_norm is None else ", gradients clipped by their global norm"),
            highlight=False,
        )

        def keep(finished: list[Row], before: Sequence[Row] = tuple(rows)) -> None:
            if json_path is not None:
                save_rows([*before, *finished], json_path)

        with bar_progress(console, options.steps_in_total) as progress:
            part = run_lab(options, progress=progress, on_rows=keep)
        rows += part
        print_tables(console, part)
        for sentence in verdict(part):
            console.print(f"  {sentence}", highlight=False, soft_wrap=True)
        text = f"\n[bold]In words:[/bold] {in_words(part)}\n"
        console.print(text, highlight=False, soft_wrap=True)
    if json_path is not None:
        save_rows(rows, json_path)
    if html_path is not None:
        from gradlane.lab.runs.page import report_from_results

        report_from_results(rows, html_path, title="gradlane beside DDP, four nodes")
    print_written(console, json_path, html_path)
    console.print("\n[bold]Next, for your own script:[/bold]")
    for command, question in NEXT_COMMANDS:
        console.print(f"  {command}\n    [dim]{question}[/dim]", highlight=False, soft_wrap=True)


def in_words(rows: Sequence[Row]) -> str:
    """Return what rows of one workload at one rate show, for readers who skip tables.

    Args:
        rows: one without communication, at least one of DDP, and one of gradlane's.
    """
    (compute,) = (row for row in rows if parse_strategy(row.strategy).family == "none")
    ddp = min((row for row in rows if row.is_baseline), key=lambda row: row.step_s_median)
    (ours,) = (row for row in rows if parse_strategy(row.strategy).family == "gradlane")
    compute_s, ddp_s = compute.step_s_median, ddp.step_s_median
    waited_s, hidden_s = ddp_s - compute_s, ddp_s - ours.step_s_median
    text = f"a step computes {format_time(compute_s)}"
    if waited_s < _NOTABLE_WAIT * compute_s:
        return f"{text} and takes DDP {format_time(ddp_s)}: nothing to gain here, stay with DDP."
    text += f". DDP waits {format_time(waited_s)} more for gradients; "
    if hidden_s > 0.0:
        text += f"gradlane hides {min(1.0, hidden_s / waited_s):.0%} of that behind the compute."
    else:
        text += "gradlane hides nothing of that here."
    bound_s = ours.bound_step_s
    if bound_s is not None and bound_s > _FULL_PORT * compute_s:
        text += (
            f" No order of sending these bytes takes less than {format_time(bound_s)}: fewer bytes "
            "would, such as codec='qsgd:bits=8'."
        )
    return text


def verdict(rows: Sequence[Row]) -> list[str]:
    """Return what summarized rows of one workload at one rate say, in sentences."""
    baselines = [row for row in rows if row.is_baseline]
    ours = [row for row in rows if parse_strategy(row.strategy).family == "gradlane"]
    sentences: list[str] = []
    for row in ours:
        text = f"{row.strategy}: {format_time(row.step_s_median)} a step"
        if row.speedup_over_ddp is not None:
            best = min(baselines, key=lambda other: other.step_s_median)
            text += f", {row.speedup_over_ddp:.2f} times as fast as the best DDP ({best.strategy})"
        if row.step_over_bound is not None:
            text += f", {100 * (row.step_over_bound - 1):+.1f}% from the bound of perfect overlap"
        sentences.append(text + ".")
        equal = "bit-identical" if row.params_equal else "NOT identical"
        sentences.append(f"{row.strategy}: parameters are {equal} on all {row.workers} ranks.")
        if baselines and row.has_losses:
            difference = abs(row.loss[-1] - baselines[0].loss[-1]) / abs(baselines[0].loss[-1])
            sentences.append(
                f"{row.strategy}: the last loss is {row.loss[-1]:.4f}, {baselines[0].strategy}'s "
                f"{baselines[0].loss[-1]:.4f} ({100 * difference:.3f}% apart)."
            )
        if row.cpu_bound:
            sentences.append(
                f"This machine's processors were {row.cpu_share or 0:.0%} busy, "
                f"{row.stolen_share:.0%} for other virtual machines: a quieter machine, or more "
                "dilation, is needed for evidence."
            )
    return sentences
