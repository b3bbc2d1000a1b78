"""Throughput against the number of workers, as in figure 10 of the P3 paper.

Two, four and eight ranks are measured; up to 1,024 are simulated, as on real machines: with
nothing dilated and without token buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gradlane.lab.experiments.bandwidth import GBIT, chosen_strategies, chosen_workloads
from gradlane.lab.experiments.preset import Preset, Rows
from gradlane.lab.experiments.simulated import Simulation, compute_times
from gradlane.lab.runs.cells import CEILING, MEASURED, STEPS, Cell, usual_dilation
from gradlane.planning.models import ARCHITECTURES
from gradlane.planning.simulation.scenarios import RING_FUSED
from gradlane.training.options.options import STRATEGIES as ENGINE_STRATEGIES

NAME = "scaling"
RATE_BPS = 10 * GBIT
WORKLOADS = ("resnet50", "vgg19", "sockeye")
STRATEGIES = (CEILING, "p3", "wfbp", "kvstore", "ddp-gloo:25")
MEASURED_WORKERS = (2, 4, 8)
SIMULATED_WORKERS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
MOST_UNFOLDED = 256
"""Whole tensors on drawn servers cannot be folded: beyond this a simulation takes too long."""
UNFOLDED = ("kvstore", "deferred-pull")
EIGHT_REAL_BPS = 350_000_000
"""Real rate of each of more than four ports that two cores carry."""
_COPIES = 3.5
"""Of a model that a rank holds at most: parameters, gradients, buffers under way."""
_RANK_BYTES = 350_000_000
"""A rank's memory without a model."""


def scaling(
    *,
    workloads: Sequence[str] = (),
    rate_bps: int = RATE_BPS,
    strategies: Sequence[str] = (),
    workers: Sequence[int] = MEASURED_WORKERS,
    dilation: float | None = None,
    steps: int = STEPS,
) -> Preset:
    """Return the preset.

    Args:
        workloads: only these networks; all of the preset where none is named.
        rate_bps: nominal rate of every port.
        strategies: in place of the preset's; compute alone is always measured.
        workers: numbers of ranks to measure.
        dilation: real over nominal time; None: what two cores carry with ease.
        steps: measured steps of a run.

    Raises:
        ValueError: a network is not in the preset, or a strategy is unknown.
    """
    names = chosen_strategies(strategies) or STRATEGIES
    cells = [
        Cell(
            workload,
            rate_bps,
            names,
            _dilation(workload, rate_bps, count) if dilation is None else dilation,
            workers=count,
            steps=steps,
        )
        for workload in chosen_workloads(workloads, WORKLOADS) or WORKLOADS
        for count in workers
    ]
    return Preset(NAME, cells, _simulations)


def _dilation(workload: str, rate_bps: int, workers: int) -> float:
    usual = usual_dilation(workload, rate_bps)
    return usual if workers <= 4 else max(usual, round(rate_bps / EIGHT_REAL_BPS, 1))


def needed_bytes(cell: Cell) -> float:
    """Return about how much memory all ranks of a cell take."""
    layers = ARCHITECTURES[cell.workload]().layers
    model_bytes = 4 * sum(shape.numel for layer in layers for shape in layer.parameters)
    return cell.workers * (_COPIES * model_bytes + _RANK_BYTES)


def without_large_cells(preset: Preset, available_bytes: float) -> tuple[Preset, list[str]]:
    """Return the preset without the cells that this machine has not memory enough for.

    Returns:
        The preset, and a sentence for each cell that was left out.
    """
    fitting = [cell for cell in preset.cells if needed_bytes(cell) <= available_bytes]
    said = [
        f"{cell.workload} on {cell.workers} workers is left out: it takes about "
        f"{needed_bytes(cell) / 1e9:.1f} GB of memory, and {available_bytes / 1e9:.1f} GB are free"
        for cell in preset.cells
        if cell not in fitting
    ]
    return replace(preset, cells=fitting), said


def _simulations(rows: Rows) -> list[Simulation]:
    measured = [row for row in rows if row.get("source") == MEASURED]
    found = []
    for workload, compute_s in compute_times(rows).items():
        own = [row for row in measured if row["workload"] == workload]
        rates: Mapping[int, None] = dict.fromkeys(int(row["rate_bps"]) for row in own)
        names = dict.fromkeys(
            str(row["strategy"]) for row in own if row["strategy"] in ENGINE_STRATEGIES
        )
        found += [
            Simulation(workload, name, workers, rate_bps, 1.0, compute_s, is_real=True)
            for rate_bps in rates
            for name in (*names, RING_FUSED)
            for workers in SIMULATED_WORKERS
            if name not in UNFOLDED or workers <= MOST_UNFOLDED
        ]
    return found
