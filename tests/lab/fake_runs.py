"""A lab that runs nothing: rows as runs give them, on a clock of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradlane.lab.runs.options import LabOptions
from gradlane.lab.runs.rows import Row
from gradlane.lab.runs.run import LabProgress
from gradlane.lab.runs.strategy import parse_strategy


def fake_row(
    options: LabOptions, strategy: str, *, step_s: float | None = None, cpu_bound: bool = False
) -> Row:
    """Return the row of a run; a step takes a second, or 0.3 without communication.

    Args:
        options: what was asked for.
        strategy: which of its strategies ran.
        step_s: time of each step.
        cpu_bound: whether the machine was too busy.
    """
    if step_s is None:
        step_s = 0.3 if strategy == "none" else 1.0
    return Row(
        workload=options.workload,
        strategy=strategy,
        workers=options.workers,
        rate_bps=options.rates_bps[0],
        dilation=options.dilation,
        slice_elems=parse_strategy(strategy).slice_elems(options.slice_elems),
        codec="raw",
        steps=options.steps,
        warmup=options.warmup,
        repeat=0,
        seed=0,
        batch_size=32,
        samples_per_s=32 * options.workers / step_s,
        step_s_median=step_s,
        wall_step_s_median=step_s * options.dilation,
        step_s=[step_s] * options.steps,
        compute_s=0.2,
        goodput_bps=0.956 * options.rates_bps[0],
        tx_bytes_per_step=0.0,
        link_utilization=0.0,
        utilization_over_time={"time_s": [], "transmit": [], "receive": []},
        cpu_s_per_step=0.0,
        cpu_share=0.9 if cpu_bound else 0.1,
        cpu_bound=cpu_bound,
        wall_lag_s=0.0,
        loss=[],
        param_digest="",
        params_equal=True,
        verified_tensors=1,
        evaluation=None,
        metrics={"tx_bytes": 7, "peers": [1, 2]},
        versions={"torch": "2.0.test"},
        machine={"command": ["gradlane", "lab", "made"], "load_average_at_start": 0.25},
    )


class FakeMachine:
    """A lab whose runs take as long as they are estimated to, on a clock of its own."""

    def __init__(
        self,
        *,
        fails_after: int = 1000,
        busy: bool = False,
        steps_s: Mapping[str, float] | None = None,
    ) -> None:
        self.now_s = 0.0
        self.runs: list[tuple[str, int, str]] = []
        self._fails_after = fails_after
        self._busy = busy
        self._steps_s = steps_s or {}

    def now(self) -> float:
        return self.now_s

    def run(self, options: LabOptions, *, progress: LabProgress, on_rows: Any) -> list[Row]:
        del progress
        rows: list[Row] = []
        for strategy in options.strategies:
            if len(self.runs) == self._fails_after:
                raise KeyboardInterrupt
            self.now_s += 25.0
            self.runs.append((options.workload, options.rates_bps[0], strategy.text))
            step_s = self._steps_s.get(strategy.text)
            rows.append(fake_row(options, strategy.text, step_s=step_s, cpu_bound=self._busy))
            on_rows(rows)
        return rows
