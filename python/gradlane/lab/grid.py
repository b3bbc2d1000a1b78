"""The grid on which predictions are tested: workloads, strategies and rates, measured in pieces.

The grid takes the better part of an hour, and all of it is kept: each run is a row in a file as
`gradlane lab run --json` writes it, the file is whole after every run, and what is in it is not
measured again. A limit on the time of one call lets other work have the machine in between.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradlane.lab.bound import port_bytes
from gradlane.lab.results import Row
from gradlane.lab.run import LabOptions, LabProgress, run_lab
from gradlane.lab.strategy import parse_strategy
from gradlane.lab.workloads.architectures import ARCHITECTURES
from gradlane.options import STRATEGIES as ENGINE_STRATEGIES

WORKERS = 4
CEILING = "none"
"""The strategy that measures compute time alone."""
STRATEGIES = ("p3", "slicing", "kvstore", "wfbp")
BASELINE = "ddp-gloo:25"
WARMUP_PRIORITY = 3
"""The first forward shows the order of priorities, which is in force from the third step on; what
was sent before then is waited for in the next forward."""
WARMUP_USUAL = 2
"""The second step still waits for more than a steady one does."""
STEPS = 2
GBIT = 1_000_000_000
REAL_RATE_MAX_BPS = {"vgg19": 700_000_000}
REAL_RATE_USUAL_BPS = 600_000_000
"""Real rate of a port: two cores carry four of them at less than half of their time."""
DILATION_MIN = {"vgg19": 8.0}
DILATION_USUAL = 4.0
"""Least dilation: compute that is shorter than this sleeps inexactly."""
_SETUP_S = 12.0
_RUN_S = 4.0
_SLACK = 1.15


@dataclass(frozen=True)
class Cell:
    """One workload at one rate, under several strategies in turn."""

    workload: str
    rate_bps: int
    strategies: tuple[str, ...]

    @property
    def dilation(self) -> float:
        """Real over nominal time: the real rate is one that this machine carries with ease."""
        most = REAL_RATE_MAX_BPS.get(self.workload, REAL_RATE_USUAL_BPS)
        least = DILATION_MIN.get(self.workload, DILATION_USUAL)
        return max(least, round(self.rate_bps / most, 1))

    def run_estimate_s(self, warmup: int) -> float:
        """Return about how long the run of one strategy takes, in real seconds."""
        architecture = ARCHITECTURES[self.workload]()
        size_bytes = 4 * sum(
            parameter.numel for layer in architecture.layers for parameter in layer.parameters
        )
        port_s = 8 * port_bytes(size_bytes, workers=WORKERS) / self.rate_bps
        step_s = max(architecture.batch_time_s, port_s) * _SLACK
        return _RUN_S + (warmup + STEPS) * step_s * self.dilation


def _cells(workload: str, rates_gbps: Sequence[float], *, baseline: bool) -> list[Cell]:
    strategies = (CEILING, *STRATEGIES, *((BASELINE,) if baseline else ()))
    return [Cell(workload, round(rate * GBIT), strategies) for rate in rates_gbps]


CELLS: tuple[Cell, ...] = (
    *_cells("resnet50", (1.5, 3, 4, 6, 10), baseline=True),
    *_cells("inception_v3", (1.5, 2.5, 3.2, 5, 8), baseline=False),
    *_cells("sockeye", (2, 3, 4, 6, 8), baseline=False),
    *_cells("vgg19", (5, 7.5, 10, 15, 30), baseline=True),
)
"""From rates at which communication takes twice as long as compute to rates at which it hides."""


def cells_of(workloads: Sequence[str]) -> list[Cell]:
    """Return the cells of these workloads; of all where none is named.

    Raises:
        ValueError: a workload is not in the grid.
    """
    known = list(dict.fromkeys(cell.workload for cell in CELLS))
    for workload in workloads:
        if workload not in known:
            raise ValueError(f"{workload!r} is not in the grid; there are: {', '.join(known)}")
    return [cell for cell in CELLS if not workloads or cell.workload in workloads]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows that were measured so far; none where there is no file yet.

    Raises:
        ValueError: the file is none of rows.
    """
    if not path.exists():
        return []
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; move it away to begin anew") from error
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and {"workload", "strategy", "rate_bps", "cpu_bound"} <= row.keys()
        for row in rows
    ):
        raise ValueError(f"{path} holds no rows of a lab run; move it away to begin anew")
    return rows


def missing_strategies(cell: Cell, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the strategies of a cell that no row has; rows that are no evidence do not count."""
    have = {
        row["strategy"]
        for row in rows
        if (row["workload"], row["rate_bps"]) == (cell.workload, cell.rate_bps)
        and not row["cpu_bound"]
    }
    return [strategy for strategy in cell.strategies if strategy not in have]


def measure_missing(
    cells: Sequence[Cell],
    path: Path,
    *,
    budget_s: float,
    progress: LabProgress,
    now: Callable[[], float] = time.monotonic,
    run: Callable[..., list[Row]] = run_lab,
) -> int:
    """Measure what is missing, as much as fits, and add it to the file.

    Args:
        cells: what to measure.
        path: the file of rows; it is whole after every run.
        budget_s: real seconds after which no further run is begun. At least one run is made.
        progress: told about phases.
        now: a clock.
        run: what measures.

    Returns:
        How many runs are still missing.

    Raises:
        LabError: the cluster could not be built, or a rank failed.
        ValueError: the file holds something else.
    """
    rows = read_rows(path)
    end_s = now() + budget_s
    is_first = True
    for cell in cells:
        for warmup, missing in _by_warmup(missing_strategies(cell, rows)):
            fitting = int((end_s - now() - _SETUP_S) / cell.run_estimate_s(warmup))
            chosen = missing[: max(fitting, 1 if is_first else 0)]
            if not chosen:
                return still_missing(cells, rows)
            is_first = False
            rows = _run(cell, chosen, warmup, rows, path, progress, run)
    return still_missing(cells, rows)


def still_missing(cells: Sequence[Cell], rows: Sequence[Mapping[str, Any]]) -> int:
    """Return how many runs of these cells no row has."""
    return sum(len(missing_strategies(cell, rows)) for cell in cells)


def warmup_of(strategy: str) -> int:
    """Return the steps after which every further one takes the same time."""
    return WARMUP_PRIORITY if strategy == "p3" else WARMUP_USUAL


def _by_warmup(strategies: Sequence[str]) -> list[tuple[int, list[str]]]:
    counts = sorted({warmup_of(strategy) for strategy in strategies})
    return [(count, [it for it in strategies if warmup_of(it) == count]) for count in counts]


def _run(
    cell: Cell,
    strategies: Sequence[str],
    warmup: int,
    rows: list[dict[str, Any]],
    path: Path,
    progress: LabProgress,
    run: Callable[..., list[Row]],
) -> list[dict[str, Any]]:
    """Measure some strategies of a cell in turn, and return all rows of the file."""
    options = LabOptions(
        workload=cell.workload,
        strategies=[parse_strategy(text) for text in strategies],
        workers=WORKERS,
        rates_bps=[cell.rate_bps],
        dilation=cell.dilation,
        steps=STEPS,
        warmup=warmup,
    )

    def keep(found: list[Row]) -> None:
        _save([*rows, *map(compact, found)], path)

    run(options, progress=progress, on_rows=keep)
    return read_rows(path)


def compact(row: Row) -> dict[str, Any]:
    """Return a row without its use of the ports over time, its losses and its command."""
    content = asdict(row)
    del content["utilization_over_time"], content["loss"]
    content["machine"].pop("command", None)
    content["metrics"] = {
        name: value
        for name, value in content["metrics"].items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return content


def with_compute_times(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows that are evidence, each with the compute time of its cell's `none` row.

    Runs of one cell may have been measured in several pieces; where the `none` row is missing, a
    row keeps the compute time that it has.
    """
    ceilings = {
        (row["workload"], row["rate_bps"]): float(row["step_s_median"])
        for row in rows
        if row["strategy"] == CEILING and not row["cpu_bound"]
    }
    return [
        {**row, "compute_s": ceilings.get((row["workload"], row["rate_bps"]), row["compute_s"])}
        for row in rows
        if not row["cpu_bound"]
    ]


def in_grid_order(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows of the engine's strategies sorted by workload, rate and strategy."""
    workloads = list(dict.fromkeys(cell.workload for cell in CELLS))
    chosen = [row for row in rows if row["workload"] in workloads]
    order = (*STRATEGIES, *(name for name in ENGINE_STRATEGIES if name not in STRATEGIES))
    return sorted(
        (row for row in chosen if row["strategy"] in order),
        key=lambda row: (
            workloads.index(row["workload"]),
            row["rate_bps"],
            order.index(row["strategy"]),
        ),
    )


def _save(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(list(rows), indent=1), encoding="utf-8")
    partial.replace(path)
