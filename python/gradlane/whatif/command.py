"""The command `gradlane whatif`: a table, the answer in words, and a file with both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from gradlane.lab.rates import format_rate
from gradlane.whatif.advice import Answer, answers_of
from gradlane.whatif.grid import Row, clusters_of, evaluate
from gradlane.whatif.profiles import Profile
from gradlane.whatif.simulation import RING_FUSED, Cluster, run_scenario, scenario_of


def run_whatif(
    profile: Profile,
    *,
    workers: Sequence[int],
    rates_bps: Sequence[float],
    strategies: Sequence[str],
    compressions: Sequence[float],
    topologies: Sequence[str],
    base: Cluster,
    console: Console,
    trace_path: Path | None = None,
) -> dict[str, Any]:
    """Simulate all combinations and print a table and the answer.

    Args:
        profile: what a step computes.
        workers: numbers of ranks.
        rates_bps: rates of every port.
        strategies: names of strategies.
        compressions: bytes of a gradient over bytes that travel.
        topologies: of `ring-fused`.
        base: everything else about the cluster.
        console: where to print.
        trace_path: where the timeline of the first combination goes, in Chrome's format.

    Returns:
        `profile` (its figures), `rows` and `answers`, as JSON has them.

    Raises:
        ValueError: a combination makes no sense.
    """
    clusters = clusters_of(
        workers=workers,
        rates_bps=rates_bps,
        strategies=strategies,
        compressions=compressions,
        topologies=topologies,
        base=base,
    )
    if trace_path is not None:
        _write_trace(trace_path, profile, clusters[0])
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(clusters))
        rows = evaluate(profile, clusters, lambda _: progress.advance(task))
    answers = answers_of(rows)
    _print(console, profile, rows, answers)
    return {
        "profile": {
            "model": profile.model,
            "batch_size": profile.batch_size,
            "compute_s": profile.compute_s,
            "forward_s": profile.forward_s,
            "gradient_bytes": profile.size_bytes,
            "tensors": len(profile.tensors),
        },
        "rows": [row.to_json() for row in rows],
        "answers": [answer.to_json() for answer in answers],
    }


def _write_trace(path: Path, profile: Profile, cluster: Cluster) -> None:
    if cluster.strategy == RING_FUSED:
        raise ValueError(f"{RING_FUSED} is a formula and has no timeline: simulate p3, for example")
    answer = run_scenario(scenario_of(profile, cluster, trace=True))
    path.write_text(json.dumps(answer["trace"]), encoding="utf-8")


def _print(console: Console, profile: Profile, rows: list[Row], answers: list[Answer]) -> None:
    console.print(
        f"{profile.model}: {profile.size_bytes / 1e6:.1f} MB of gradients in "
        f"{len(profile.tensors)} tensors, {profile.compute_s * 1e3:.1f} ms of compute for "
        f"{profile.batch_size} samples",
        highlight=False,
    )
    table = Table()
    names = (
        "workers",
        "rate",
        "strategy",
        "compression",
        "step ms",
        "bound ms",
        "scaling",
        "samples/s",
    )
    for name in names:
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for row in rows:
        strategy = row.strategy if row.topology == "flat" else f"{row.strategy} {row.topology}"
        table.add_row(
            str(row.workers),
            format_rate(row.rate_bps),
            strategy,
            f"{row.compression:g}",
            f"{row.step_s * 1e3:.1f}",
            f"{row.bound_step_s * 1e3:.1f}",
            f"{row.scaling_factor * 100:.1f} %",
            f"{row.samples_per_s:.0f}",
        )
    console.print(table)
    for answer in answers:
        console.print(answer.text, highlight=False)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write what was printed."""
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
