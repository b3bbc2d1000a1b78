"""The command `gradlane doctor`: alone, or one process a rank as for a training; rank 0 prints."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import gradlane
from gradlane.cli.options import write_json
from gradlane.errors import GradlaneError, RefusedError
from gradlane.planning.doctor.cluster import Examination, examine_all, examine_alone
from gradlane.planning.doctor.findings import Finding, Verdict
from gradlane.planning.doctor.machine import LocalMachine
from gradlane.report.console import print_written
from gradlane.training.options.options import Options
from gradlane.training.rendezvous.environment import find_rank_info

_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAULT: "bold red"}


def run_doctor(
    *,
    network: gradlane.Network,
    window_s: float,
    console: Console,
    json_path: Path | None = None,
) -> Examination | None:
    """Examine this machine, or all that a launcher has started ranks on.

    Args:
        network: as a session would be given it.
        window_s: seconds that each stream between ranks is measured.
        console: where rank 0 prints.
        json_path: where rank 0 writes what was found, or None.

    Returns:
        What was found, on rank 0; None on the others.

    Raises:
        RendezvousError: the ranks do not find each other; the machine's own findings are printed.
    """
    options = Options.of(network=network, environment=os.environ)
    machine = LocalMachine(os.environ, options.network, Path("/"))
    rank_info = find_rank_info(os.environ)
    rank = rank_info.rank
    if rank_info.world_size == 1:
        examination = examine_alone(machine)
        _show(console, examination, json_path)
        return examination

    def tell(text: str) -> None:
        if rank == 0:
            console.print(f"examining {text}", style="dim", highlight=False)

    try:
        with gradlane.init(
            network=network, monitoring=gradlane.Monitoring(summary=False)
        ) as session:
            examination = examine_all(
                session, machine, options.network, window_s=window_s, on_phase=tell
            )
    except RefusedError:
        raise
    except GradlaneError:
        errors = Console(stderr=True)
        for one in machine.examine():
            if one.verdict is not Verdict.OK:
                errors.print(f"rank {rank}: {escape(_line(one))}", highlight=False, soft_wrap=True)
        raise
    if rank != 0:
        return None
    _show(console, examination, json_path)
    return examination


def _show(console: Console, examination: Examination, json_path: Path | None) -> None:
    """Write the file, then print."""
    write_json(json_path, examination.to_json())
    print_examination(console, examination)
    print_written(console, json_path)


def print_examination(console: Console, examination: Examination) -> None:
    """Print a line for each finding, and a sentence at the end."""
    table = Table(show_edge=False, pad_edge=False)
    many = len(examination.ranks) > 1
    for name in ("", "check", *(["ranks"] if many else []), "found"):
        table.add_column(name, overflow="fold")
    for one in examination.findings:
        style = _STYLES[one.verdict]
        remedy = f"\n[{style}]-> {escape(one.remedy)}[/]" if one.remedy else ""
        ranks = "all" if len(one.ranks) == len(examination.ranks) else _ranks_text(one)
        table.add_row(
            f"[{style}]{one.verdict.value}[/]",
            escape(one.check),
            *([ranks if one.ranks else ""] if many else []),
            escape(one.found) + remedy,
        )
    console.print(table)
    counts = {
        verdict: sum(one.verdict is verdict for one in examination.findings) for verdict in Verdict
    }
    if examination.is_fit:
        warnings = counts[Verdict.WARNING]
        more = f", with {warnings} warning{'s' * (warnings > 1)}" if warnings else ""
        text = f"Ready to train{more}."
        if not many:
            text += (
                " Between machines: torchrun --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d "
                "--rdzv-endpoint HOST:29500 -m gradlane doctor"
            )
    else:
        count = counts[Verdict.FAULT]
        text = f"Not ready: {count} fault{'s' * (count > 1)} above."
    console.print(text, highlight=False, soft_wrap=True)


def _ranks_text(finding: Finding) -> str:
    return ", ".join(map(str, finding.ranks))


def _line(finding: Finding) -> str:
    return f"{finding.verdict.value}: {finding.check}: {finding.found}; {finding.remedy}"
