"""Kill one rank of a training under several systems: time without progress, and steps lost.

Four ranks on this machine, each a process, train the same small model over loopback. At a drawn
moment one of them gets SIGKILL. Systems take turns: each meets the first kill, then each the
second. `--torchft-python` names an interpreter that has torchft. A minute for each kill and system.

    python -m benchmarks.lost_rank --kills 8 --json lost-rank.json
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.lost_rank.campaign import Kill, Result, draw_kills, read_outputs, run_kill
from benchmarks.lost_rank.judge import Verdict
from benchmarks.lost_rank.systems import SYSTEMS, Job
from rich.console import Console

from gradlane.formats.provenance import machine_facts, package_versions
from gradlane.report.markdown import markdown_table

COLUMNS = (
    "system",
    "finished",
    "normal step",
    "no step: median, worst",
    "no new step: median, worst",
    "steps lost: median, worst",
    "ranks at the end",
    "same parameters",
)


def summarize(name: str, results: Sequence[Result]) -> dict[str, Any]:
    """Return what a system's kills cost together: medians, and the worst of each.

    Args:
        name: the system.
        results: of all systems.
    """
    kills = [result for result in results if result.system == name]
    verdicts = [result.verdict for result in kills if result.verdict is not None]
    finished = [verdict for verdict in verdicts if verdict.finished]

    def middle_and_worst(value: Callable[[Verdict], float | None]) -> list[float] | None:
        values = [one for one in map(value, finished) if one is not None]
        return [statistics.median(values), max(values)] if values else None

    return {
        "system": name,
        "about": SYSTEMS[name].about,
        "kills": len(kills),
        "finished": len(finished),
        "normal_step_s": middle_and_worst(lambda verdict: verdict.normal_step_s),
        "longest_step_s": middle_and_worst(lambda verdict: verdict.longest_step_s),
        "pause_s": middle_and_worst(lambda verdict: verdict.pause_s),
        "until_new_s": middle_and_worst(lambda verdict: verdict.until_new_s),
        "steps_lost": middle_and_worst(lambda verdict: verdict.steps_lost),
        "live_ranks": sorted({verdict.live_ranks for verdict in finished}),
        "same_parameters": sum(verdict.same_parameters for verdict in finished),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the systems' summaries as a table."""

    def pair(values: Sequence[float] | None, digits: int, unit: str = "") -> str | None:
        return None if values is None else ", ".join(f"{v:.{digits}f}{unit}" for v in values)

    lines = []
    for row in rows:
        normal = row["normal_step_s"]
        lines.append(
            (
                row["system"],
                f"{row['finished']} of {row['kills']}",
                None if normal is None else f"{normal[0] * 1e3:.0f} ms",
                pair(row["pause_s"], 2, " s"),
                pair(row["until_new_s"], 2, " s"),
                pair(row["steps_lost"], 0),
                ", ".join(map(str, row["live_ranks"])) or None,
                f"{row['same_parameters']} of {row['finished']}",
            )
        )
    return markdown_table(COLUMNS, lines, numbers="-nnnnnnn")


def run_all(
    kills: Sequence[Kill],
    given: argparse.Namespace,
    names: Sequence[str],
    say: Callable[[str], None],
) -> Iterator[Result]:
    """Give every kill to every system in turn."""
    for index, kill in enumerate(kills):
        for name in names:
            with tempfile.TemporaryDirectory(prefix="gradlane-lost-") as text:
                job = Job(Path(text), given.ranks, given.torchft_python)
                result = run_kill(name, SYSTEMS[name], kill, job, given.every)
                if result.failure:
                    say(read_outputs(job.folder))
            verdict = result.verdict
            found = result.failure
            if verdict is not None and verdict.finished:
                found = (
                    f"no step for {verdict.pause_s:.2f} s, no new one for "
                    f"{verdict.until_new_s:.2f} s, {verdict.steps_lost} lost, "
                    f"{verdict.live_ranks} ranks at the end, parameters "
                    f"{'the same' if verdict.same_parameters else 'that differ'}"
                )
            say(
                f"kill {index}, rank {kill.victim} after step {kill.step}, {name}: {found} "
                f"(load {result.load:.1f}, {result.wall_s:.0f} s)"
            )
            yield result


def main() -> None:
    """Run, print a table, and write the file that is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="names, with commas")
    parser.add_argument("--kills", type=int, default=8, help="kills a system")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=7, help="draws ranks and moments")
    parser.add_argument(
        "--torchft-python", default=sys.executable, help="an interpreter that has torchft"
    )
    parser.add_argument("--json", type=Path, help="write what was measured there")
    given = parser.parse_args()
    names = given.systems.split(",")
    if unknown := sorted(set(names) - SYSTEMS.keys()):
        parser.error(f"unknown systems {', '.join(unknown)}; known are {', '.join(SYSTEMS)}")
    if given.ranks < 2 or given.kills < 1 or given.every < 1:
        parser.error("at least two --ranks, one of --kills and one step for --every")
    # Ended from outside, it ends its trainings first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console()

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)

    absent = {name: SYSTEMS[name].absent(given.torchft_python) for name in names}
    absent = {name: why for name, why in absent.items() if why}
    for name, why in absent.items():
        say(f"{name}: not available: {why}")
    tried = [name for name in names if name not in absent]
    machine = machine_facts()
    kills = draw_kills(given.seed, given.kills, given.ranks, given.every)
    results: list[Result] = []
    for result in run_all(kills, given, tried, say):
        results.append(result)
        if given.json is not None:
            # After each kill: a campaign that is ended from outside loses none.
            found = {
                "seed": given.seed,
                "ranks": given.ranks,
                "checkpoint_every": given.every,
                "machine": {**machine, "command": sys.argv},
                "versions": package_versions(),
                "not_available": absent,
                "systems": [summarize(name, results) for name in tried],
                "kills": [asdict(one) for one in results],
            }
            given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if results:
        loads = [result.load for result in results]
        say(table([summarize(name, results) for name in tried]))
        say(
            f"{given.kills} kills a system, seed {given.seed}, {given.ranks} ranks, a checkpoint "
            f"every {given.every} steps; load {min(loads):.1f} to {max(loads):.1f} on "
            f"{machine['processors']} processors"
        )
    if any(result.failure for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
