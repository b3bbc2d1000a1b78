"""Use of every port and processor over time, as in figures 8 and 9 of the P3 paper.

Networks at rates at which communication takes longer than compute, so that a port that is idle
is time lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradlane.lab.cluster.counters import Recording
from gradlane.lab.experiments.activity import activity_of
from gradlane.lab.experiments.bandwidth import GBIT, chosen_strategies, chosen_workloads
from gradlane.lab.experiments.preset import Preset
from gradlane.lab.runs.cells import CEILING, WORKERS, Cell, usual_dilation
from gradlane.lab.runs.options import LabOptions
from gradlane.lab.runs.results import Row
from gradlane.lab.runs.run import LabProgress, run_lab

NAME = "utilization"
STEPS = 3
STRATEGIES = (CEILING, "p3", "slicing", "kvstore", "ddp-gloo:25")
RATES_BPS: Mapping[str, tuple[int, ...]] = {
    "resnet50": (round(1.5 * GBIT), 4 * GBIT),
    "sockeye": (4 * GBIT,),
    "vgg19": (10 * GBIT,),
}


class _Recorder:
    """Runs the lab, and keeps what was sampled until the row is written."""

    def __init__(self) -> None:
        self._activities: dict[int, tuple[Row, dict[str, Any]]] = {}

    def run(
        self,
        options: LabOptions,
        *,
        progress: LabProgress,
        on_rows: Callable[[list[Row]], None],
    ) -> list[Row]:
        """Run as `run_lab` does."""
        self._activities.clear()

        def keep(row: Row, recording: Recording) -> None:
            # The row is kept, too, so that no other object gets its identity.
            self._activities[id(row)] = row, activity_of(recording, options.dilation)

        return run_lab(options, progress=progress, on_rows=on_rows, on_recording=keep)

    def extra(self, row: Row) -> Mapping[str, Any]:
        """Return what a row keeps beside the usual."""
        return {"activity": self._activities[id(row)][1]} if id(row) in self._activities else {}


def utilization(
    *,
    workloads: Sequence[str] = (),
    rates_bps: Sequence[int] = (),
    strategies: Sequence[str] = (),
    workers: int = WORKERS,
    dilation: float | None = None,
    steps: int = STEPS,
) -> Preset:
    """Return the preset.

    Args:
        workloads: only these networks; all of the preset where none is named.
        rates_bps: nominal rates in place of the preset's.
        strategies: in place of the preset's; compute alone is always measured.
        workers: ranks, each on a node of its own.
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
            usual_dilation(workload, rate_bps) if dilation is None else dilation,
            workers=workers,
            steps=steps,
        )
        for workload in chosen_workloads(workloads, tuple(RATES_BPS)) or RATES_BPS
        for rate_bps in rates_bps or RATES_BPS[workload]
    ]
    recorder = _Recorder()
    return Preset(NAME, cells, lambda rows: [], extra=recorder.extra, run=recorder.run)
