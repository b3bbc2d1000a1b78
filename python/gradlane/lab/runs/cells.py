"""Measured rows of a grid of lab runs, kept in one file: nothing is lost, nothing measured twice.

A grid takes an hour or two. The file is whole after every run, what is in it is not measured
again, and rows of a machine that was too busy count as missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gradlane.lab.runs.options import LabOptions
from gradlane.lab.runs.rows import CEILING, Row, compact, read_rows, save_rows
from gradlane.lab.runs.run import LabProgress, run_lab
from gradlane.lab.runs.strategy import AUTO, parse_strategy
from gradlane.planning.models import ARCHITECTURES
from gradlane.planning.simulation.bound import port_bytes
from gradlane.training.options.strategy import RING

WORKERS = 4
WARMUP_PRIORITY = 3
"""The first forward shows the order of priorities, which is in force from the third step on; what
was sent before then is waited for in the next forward."""
WARMUP_USUAL = 2
"""The second step still waits for more than a steady one does."""
STEPS = 2
REAL_RATE_MAX_BPS = {"vgg19": 700_000_000}
REAL_RATE_USUAL_BPS = 600_000_000
"""Real rate of a busy port: two cores carry four of them at less than half of their time."""
REAL_RATE_IDLE_MAX_BPS = {"vgg19": 1_500_000_000}
"""Real rate of a port that is mostly idle, where what passes it stays within the rates above.

VGG-19 by `p3` steps as fast as with twice the dilation; Inception-V3, of shorter steps, took 5 %
longer: less dilated, the hosts' own work counts for more.
"""
DILATION_MIN = {"vgg19": 8.0}
DILATION_USUAL = 4.0
"""Least dilation: compute that is shorter than this sleeps inexactly."""
SETUP_S = 12.0
"""Seconds a cell takes for its namespaces, its ranks and the goodput of its ports."""
_MODEL_S_PER_BYTE = 0.04e-6
"""Seconds a byte that a run takes to make four models, make them equal, and compare them."""
_LAST_STEP_SHARE = 0.7
"""Share of a step that a run still waits for after its last one."""
_OVER_BOUND = {"p3": 1.1, "slicing": 1.35, "wfbp": 1.4, "kvstore": 1.5, "deferred-pull": 1.7}
_OVER_BOUND_USUAL = 1.3
"""Step time over the larger of compute and the port's time, for estimates only."""


@dataclass(frozen=True)
class Cell:
    """One workload on one cluster, under several strategies in turn."""

    workload: str
    rate_bps: int
    strategies: tuple[str, ...]
    dilation: float
    """Real over nominal time."""
    workers: int = WORKERS
    slice_elems: int | None = None
    """Elements of a slice at most; None: each strategy's own."""
    steps: int = STEPS

    def run_estimate_s(self, strategy: str) -> float:
        """Return about how long the run of one strategy takes, in real seconds."""
        architecture = ARCHITECTURES[self.workload]()
        model_bytes = 4 * architecture.numel
        port_s = 8 * port_bytes(model_bytes, workers=self.workers) / self.rate_bps
        step_s = architecture.batch_time_s
        if strategy != CEILING:
            over = _OVER_BOUND.get(strategy, _OVER_BOUND_USUAL) - 1.0
            # Where ports are mostly idle there is little to wait for.
            step_s = max(step_s, port_s) * (1.0 + over * min(1.0, port_s / step_s))
        warmup = parse_strategy(strategy).learning_steps + warmup_of(strategy)
        steps = warmup + self.steps + _LAST_STEP_SHARE
        return _MODEL_S_PER_BYTE * model_bytes + steps * step_s * self.dilation

    def estimate_s(self) -> float:
        """Return about how long the whole cell takes, in real seconds."""
        return SETUP_S + sum(self.run_estimate_s(strategy) for strategy in self.strategies)

    def is_of(self, row: Row, strategy: str) -> bool:
        """Return whether a row measures this strategy of this cell, in however many steps."""
        return (
            not row.is_simulated
            and (row.strategy, row.workload, row.rate_bps)
            == (strategy, self.workload, self.rate_bps)
            and (row.workers or WORKERS, row.dilation or self.dilation)
            == (self.workers, self.dilation)
            and row.slice_elems == parse_strategy(strategy).slice_elems(self.slice_elems)
        )

    def holds(self, row: Row, strategy: str) -> bool:
        """Return whether a row is all that is asked for of this strategy of this cell."""
        return (
            self.is_of(row, strategy)
            and not row.cpu_bound
            and (row.steps or self.steps) >= self.steps
        )

    def options(self, strategies: Sequence[str]) -> LabOptions:
        """Return what the lab is asked for some of the cell's strategies."""
        return LabOptions(
            workload=self.workload,
            strategies=[parse_strategy(text) for text in strategies],
            workers=self.workers,
            rates_bps=[self.rate_bps],
            dilation=self.dilation,
            steps=self.steps,
            warmup=WARMUP_USUAL,
            further_warmup={
                strategy: warmup_of(strategy) - WARMUP_USUAL for strategy in strategies
            },
            slice_elems=self.slice_elems,
        )


class CellsProgress(LabProgress):
    """Receives the progress of a grid's runs; this class shows none. Estimates are real seconds."""

    def plan(self, runs: int, estimate_s: float) -> None:
        """Begin: the number of runs ahead, and the estimate for all of them."""

    def run_ended(self, estimate_s: float) -> None:
        """End a run, with the estimate for it."""

    def within_run(self, estimate_s: float) -> None:
        """Add finished steps of a run, as their part of its estimate."""


def usual_dilation(workload: str, rate_bps: int) -> float:
    """Return real over nominal time with which two cores carry four ranks with ease."""
    return _dilation(workload, rate_bps, rate_bps)


def dilation_by_load(workload: str, rate_bps: int, workers: int = WORKERS) -> float:
    """Return real over nominal time with which two cores carry what passes the ports.

    As `usual_dilation`, where ports are busy or steps short. Where a long step is mostly computed,
    less is enough: it need not be as slow as its port could carry more.
    """
    architecture = ARCHITECTURES[workload]()
    passes_bytes = port_bytes(4 * architecture.numel, workers=workers)
    return _dilation(workload, rate_bps, 8 * passes_bytes / architecture.batch_time_s)


def _dilation(workload: str, rate_bps: int, load_bps: float) -> float:
    """Return the dilation for ports of a rate that so much passes, where they carry it."""
    busy_bps = REAL_RATE_MAX_BPS.get(workload, REAL_RATE_USUAL_BPS)
    idle_bps = REAL_RATE_IDLE_MAX_BPS.get(workload, busy_bps)
    wanted = max(min(rate_bps, load_bps) / busy_bps, rate_bps / idle_bps)
    return max(DILATION_MIN.get(workload, DILATION_USUAL), round(wanted, 1))


def warmup_of(strategy: str) -> int:
    """Return the steps after which every further one takes the same time.

    Those in which a plan is found come before them (`LabStrategy.learning_steps`).
    """
    by_priority = parse_strategy(strategy).setting in ("p3", RING, AUTO)
    return WARMUP_PRIORITY if by_priority else WARMUP_USUAL


def missing_strategies(cell: Cell, rows: Sequence[Row]) -> list[str]:
    """Return the strategies of a cell that no row has; rows that are no evidence do not count."""
    return [
        strategy
        for strategy in cell.strategies
        if not any(cell.holds(row, strategy) for row in rows)
    ]


def still_missing(cells: Sequence[Cell], rows: Sequence[Row]) -> int:
    """Return how many runs of these cells no row has."""
    return sum(len(missing_strategies(cell, rows)) for cell in cells)


def remaining_estimate_s(cells: Sequence[Cell], rows: Sequence[Row]) -> float:
    """Return about how many real seconds it takes to measure what no row has."""
    missing = [(cell, missing_strategies(cell, rows)) for cell in cells]
    return sum(
        replace(cell, strategies=tuple(names)).estimate_s() for cell, names in missing if names
    )


def measure_missing(
    cells: Sequence[Cell],
    path: Path,
    *,
    progress: CellsProgress,
    budget_s: float = float("inf"),
    describe: Callable[[Row], Row] = compact,
    now: Callable[[], float] = time.monotonic,
    run: Callable[..., list[Row]] = run_lab,
) -> int:
    """Measure what is missing, as much as fits, and add it to the file.

    Args:
        cells: what to measure.
        path: the file of rows; it is whole after every run.
        progress: told about runs and phases.
        budget_s: real seconds after which no further run is begun. At least one run is made.
        describe: what is kept of a row.
        now: a clock.
        run: what measures.

    Returns:
        How many runs are still missing.

    Raises:
        LabError: the cluster could not be built, a rank failed, or the file cannot be written.
        ValueError: the file holds something else.
    """
    rows = read_rows(path)
    progress.plan(still_missing(cells, rows), remaining_estimate_s(cells, rows))
    end_s = now() + budget_s
    is_first = True
    for cell in cells:
        missing = missing_strategies(cell, rows)
        chosen = _fitting(cell, missing, end_s - now(), at_least=1 if is_first else 0)
        if chosen:
            is_first = False
            rows = _measure(cell, chosen, rows, path, progress, describe, run)
        if len(chosen) < len(missing):
            break
    return still_missing(cells, rows)


def _fitting(cell: Cell, strategies: Sequence[str], left_s: float, *, at_least: int) -> list[str]:
    """Return as many of the strategies as can be run in the time that is left."""
    left_s -= SETUP_S
    chosen: list[str] = []
    for strategy in strategies:
        left_s -= cell.run_estimate_s(strategy)
        if left_s < 0.0 and len(chosen) >= at_least:
            break
        chosen.append(strategy)
    return chosen


class _RunProgress(LabProgress):
    """Turns the steps of a cell's runs, one after another, into estimated seconds."""

    def __init__(self, cell: Cell, strategies: Sequence[str], progress: CellsProgress) -> None:
        self._cell = cell
        self._progress = progress
        self._estimates_s = [cell.run_estimate_s(name) for name in strategies]
        self._estimates_s[0] += SETUP_S
        options = cell.options(strategies)
        self._steps = [options.warmup_of(one) + cell.steps for one in options.strategies]
        self._run = 0

    def phase(self, text: str) -> None:
        self._progress.phase(text)

    def advance(self, steps: int) -> None:
        if self._run < len(self._steps):
            share = steps / self._steps[self._run]
            self._progress.within_run(share * self._estimates_s[self._run])

    def run_ended(self) -> None:
        self._progress.run_ended(self._estimates_s[self._run])
        self._run += 1


def _measure(
    cell: Cell,
    strategies: Sequence[str],
    rows: list[Row],
    path: Path,
    progress: CellsProgress,
    describe: Callable[[Row], Row],
    run: Callable[..., list[Row]],
) -> list[Row]:
    """Measure some strategies of a cell in turn, and return all rows of the file."""
    told = _RunProgress(cell, strategies, progress)
    # What is measured anew takes the place of what was no evidence, or had fewer steps.
    others = [row for row in rows if not any(cell.is_of(row, name) for name in strategies)]
    replaced = {name: [row for row in rows if cell.is_of(row, name)] for name in strategies}

    def keep(found: list[Row]) -> None:
        names = {row.strategy for row in found}
        waiting = [row for name in strategies if name not in names for row in replaced[name]]
        save_rows([*others, *waiting, *map(describe, found)], path)
        told.run_ended()

    run(cell.options(strategies), progress=told, on_rows=keep)
    return read_rows(path)


def with_compute_times(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that are evidence, each with the compute time of its cluster's `none` row.

    Runs of one cluster may have been measured in several pieces; where the `none` row is missing, a
    row keeps the compute time that it has.
    """
    evidence = [row for row in rows if row.is_evidence]
    alone = {row.cluster: row.step_s_median for row in evidence if not row.communicates}
    return [replace(row, compute_s=alone.get(row.cluster, row.compute_s)) for row in evidence]
