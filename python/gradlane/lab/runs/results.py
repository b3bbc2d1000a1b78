"""Rows of a lab run: what was measured, what follows from it, and the file they are kept in.

A row's times are nominal, dilation divided out, unless their name begins with `wall_`; processor
seconds are real, since the bytes that cause them are. `summarize` fills in whatever compares one
row with others, so text and file show the same numbers.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gradlane.formats.atomic_io import atomic_write_text
from gradlane.lab.runs.strategy import parse_strategy


@dataclass
class OverRepeats:
    """Medians over all repeats of one strategy at one rate.

    Attributes:
        repeats: how many rows went in.
        step_s: nominal step time.
        samples_per_s: samples a nominal second, all workers together.
        speedup_over_ddp: the ratio to the best DDP, taken within each repeat; None without DDP.
        step_over_bound: step time over the bound; 1.05 is 5% above it. None without a bound.
        link_utilization: share of the goodput.
        cpu_share: share of the machine's processors.
    """

    repeats: int
    step_s: float
    samples_per_s: float
    speedup_over_ddp: float | None
    step_over_bound: float | None
    link_utilization: float
    cpu_share: float


@dataclass
class Row:
    """One run of one strategy.

    Attributes:
        workload: its name.
        strategy: as on the command line.
        workers: ranks.
        ranks_per_node: how many of them share a node and its port.
        rate_bps: nominal bits a second of each port in each direction.
        dilation: nominal rate over real rate, and real time over nominal time.
        slice_elems: elements a slice at most; None where a strategy has no such size.
        codec: encoding of gradients; `raw` is none.
        steps: measured steps.
        warmup: steps before them.
        repeat: from 0; strategies of one repeat ran after one another.
        seed: of model, batches and gradients.
        batch_size: samples a worker and step.
        samples_per_s: all workers together, over the whole measured window.
        step_s_median: time from one forward's start to the next one's, slowest rank.
        wall_step_s_median: the same in real seconds.
        step_s: every measured step.
        compute_s: forward and backward: from the `none` row of the repeat, else as planned.
        bound_step_s: perfect-overlap bound on a step; None where compute has no fixed time.
        bound_binding: what binds it.
        goodput_bps: nominal payload bits a second that plain TCP streams reached on the ports.
        tx_bytes_per_step: bytes that left a node's port, mean over nodes and over all steps but
            those in which a plan is found: of the warm-up, too.
        expected_tx_bytes: those of gradients and factors alone, by the schemes' costs; None where
            nothing is known of them.
        link_utilization: carried bits over goodput, mean over ports and directions.
        utilization_over_time: `time_s`, `transmit` and `receive`, equal bins of the window.
        cpu_s_per_step: real processor seconds of a rank, mean over ranks.
        cpu_share: busy share of all of the machine's processors, by whomever.
        cpu_bound: whether the row measures the machine (`gradlane.lab.runs.evidence`).
        wall_lag_s: real time by which the worst rank's pace fell behind, at the end.
        loss: mean over ranks of each step's loss, warm-up included.
        param_digest: SHA-256 of rank 0's parameters after the last step.
        params_equal: whether every rank has that digest.
        verified_tensors: averaged gradients that were compared with their expectation.
        evaluation: quality on held-out samples after the last step, or None.
        metrics: the strategy's own counters on rank 0.
        stolen_share: share of the processors' time that went to other virtual machines, while the
            row or the goodput of its ports was measured; 0 in older results.
        step_s_mean: mean of `step_s`: what steps that wait for a rank add shows here.
        stragglers: what happens to ranks that are late; `wait`: all wait for them.
        late: what becomes of their gradients.
        servers: so many ranks own slices; None: all.
        serving: so many ranks beside the workers own all slices, and only serve.
        straggler: `rank`, `share` and `burst_s` (real seconds) of the rank that was stopped now and
            then, or None. `step_s` and all that follows from it is of the other ranks then.
        speedup_over_ddp: best DDP's step time of this repeat over this one's.
        step_over_bound: step time over the bound.
        over_repeats: medians over the repeats.
        balance: how evenly bytes are spread over nodes and owners, as
            `gradlane.lab.runs.balance.balance_of` says; empty in older results.
        versions: of what was run.
        machine: where it was run.
    """

    workload: str
    strategy: str
    workers: int
    rate_bps: int
    dilation: float
    slice_elems: int | None
    codec: str
    steps: int
    warmup: int
    repeat: int
    seed: int
    batch_size: int
    samples_per_s: float
    step_s_median: float
    wall_step_s_median: float
    step_s: list[float]
    compute_s: float
    bound_step_s: float | None
    bound_binding: str | None
    goodput_bps: float
    tx_bytes_per_step: float
    link_utilization: float
    utilization_over_time: dict[str, list[float]]
    cpu_s_per_step: float
    cpu_share: float
    cpu_bound: bool
    wall_lag_s: float
    loss: list[float]
    param_digest: str
    params_equal: bool
    verified_tensors: int
    evaluation: dict[str, Any] | None
    metrics: dict[str, Any]
    stolen_share: float = 0.0
    step_s_mean: float = 0.0
    stragglers: str = "wait"
    late: str = "discard"
    servers: int | None = None
    serving: int = 0
    straggler: dict[str, Any] | None = None
    speedup_over_ddp: float | None = None
    step_over_bound: float | None = None
    expected_tx_bytes: float | None = None
    ranks_per_node: int = 1
    over_repeats: OverRepeats | None = None
    balance: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)


def _median_or_none(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else None


def summarize(rows: Sequence[Row]) -> None:
    """Fill in the ratios of each row and the medians over repeats, in place."""
    for row in rows:
        strategy = parse_strategy(row.strategy)
        baselines = [
            other.step_s_median
            for other in rows
            if (other.workload, other.rate_bps, other.repeat)
            == (row.workload, row.rate_bps, row.repeat)
            and parse_strategy(other.strategy).is_baseline
        ]
        row.speedup_over_ddp = min(baselines) / row.step_s_median if baselines else None
        row.step_over_bound = (
            row.step_s_median / row.bound_step_s
            if row.bound_step_s and strategy.communicates
            else None
        )
    for row in rows:
        group = [
            other
            for other in rows
            if (other.workload, other.rate_bps, other.strategy)
            == (row.workload, row.rate_bps, row.strategy)
        ]
        row.over_repeats = OverRepeats(
            repeats=len(group),
            step_s=statistics.median(other.step_s_median for other in group),
            samples_per_s=statistics.median(other.samples_per_s for other in group),
            speedup_over_ddp=_median_or_none(other.speedup_over_ddp for other in group),
            step_over_bound=_median_or_none(other.step_over_bound for other in group),
            link_utilization=statistics.median(other.link_utilization for other in group),
            cpu_share=statistics.median(other.cpu_share for other in group),
        )


def save_rows(rows: Sequence[Row], path: Path) -> None:
    """Write the rows as a JSON list; the file is always a whole one."""
    atomic_write_text(path, json.dumps([asdict(row) for row in rows], indent=1))
