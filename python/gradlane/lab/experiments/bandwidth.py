"""Throughput against bandwidth, as in figure 7 of the P3 paper (Jayarajan et al., SysML 2019).

Four networks from rates at which communication takes twice as long as compute to rates at which it
hides: every strategy of the engine, DDP with three bucket sizes of which the best counts, and
compute alone. The simulator fills in the curve between the measured rates.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from gradlane.lab.experiments.preset import Preset, Rows
from gradlane.lab.experiments.simulated import Simulation, compute_times
from gradlane.lab.runs.cells import CEILING, MEASURED, STEPS, WORKERS, Cell, dilation_by_load
from gradlane.lab.runs.strategy import parse_strategy
from gradlane.training.options.options import STRATEGIES as ENGINE_STRATEGIES

NAME = "bandwidth"
GBIT = 1_000_000_000
BASELINES = ("ddp-gloo:25", "ddp-gloo:4", "ddp-gloo:1")
"""DDP's bucket sizes; the best of them is what gradlane is compared with."""
STRATEGIES = (CEILING, "p3", "slicing", "wfbp", "kvstore", "deferred-pull", *BASELINES)
RATES_BPS: Mapping[str, tuple[int, ...]] = {
    "resnet50": tuple(round(rate * GBIT) for rate in (1.5, 3, 4, 6, 10)),
    "inception_v3": tuple(round(rate * GBIT) for rate in (1.5, 2.5, 3.2, 5, 8)),
    "sockeye": tuple(round(rate * GBIT) for rate in (2, 3, 4, 6, 8)),
    "vgg19": tuple(round(rate * GBIT) for rate in (5, 10, 15, 30)),
}
"""The slowest is where a port needs over twice the compute time, the fastest where it is idle."""
QUICK_STRATEGIES = (CEILING, "p3", "kvstore", "ddp-gloo:25")
QUICK_RATES_BPS: Mapping[str, tuple[int, ...]] = {
    "resnet50": tuple(round(rate * GBIT) for rate in (1.5, 4, 6)),
    "sockeye": tuple(round(rate * GBIT) for rate in (2, 4, 8)),
}
QUICK_LIMIT_S = 15 * 60
LIMIT_S = 2 * 3600
"""What measuring may take on two cores; a test holds the estimates against it."""
SIMULATED_BETWEEN = 2
"""Simulated rates between two measured ones."""


def bandwidth(
    *,
    quick: bool = False,
    workloads: Sequence[str] = (),
    rates_bps: Sequence[int] = (),
    strategies: Sequence[str] = (),
    workers: int = WORKERS,
    dilation: float | None = None,
    steps: int = STEPS,
) -> Preset:
    """Return the preset.

    Args:
        quick: two networks, three rates and three strategies.
        workloads: only these networks; all of the preset where none is named.
        rates_bps: nominal rates in place of the preset's.
        strategies: in place of the preset's; compute alone is always measured.
        workers: ranks, each on a node of its own.
        dilation: real over nominal time; None: what two cores carry with ease.
        steps: measured steps of a run.

    Raises:
        ValueError: a network is not in the preset, or a strategy is unknown.
    """
    rates = QUICK_RATES_BPS if quick else RATES_BPS
    chosen = chosen_workloads(workloads, tuple(RATES_BPS)) or list(rates)
    names = chosen_strategies(strategies) or (QUICK_STRATEGIES if quick else STRATEGIES)
    cells = [
        Cell(
            workload,
            rate_bps,
            names,
            dilation_by_load(workload, rate_bps, workers) if dilation is None else dilation,
            workers=workers,
            steps=steps,
        )
        for workload in chosen
        for rate_bps in rates_bps or rates.get(workload, RATES_BPS[workload])
    ]

    return Preset(NAME, cells, curves)


def chosen_workloads(named: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the named networks.

    Raises:
        ValueError: one is not known.
    """
    for workload in named:
        if workload not in known:
            raise ValueError(
                f"there is no network {workload!r} here; there are: {', '.join(known)}"
            )
    return list(dict.fromkeys(named))


def chosen_strategies(named: Sequence[str]) -> tuple[str, ...]:
    """Return the named strategies after compute alone, which sets the ceiling and the bound.

    Raises:
        ValueError: one is unknown.
    """
    texts = [parse_strategy(text).text for text in named]
    return tuple(dict.fromkeys((CEILING, *texts))) if texts else ()


def curves(rows: Rows) -> list[Simulation]:
    """Return what is simulated: all of the engine's strategies, at and between the measured rates.

    Args:
        rows: the rows so far; each network in them gets its curves.
    """
    measured = [row for row in rows if row.get("source") == MEASURED]
    found = []
    for workload, compute_s in compute_times(rows).items():
        own = [row for row in measured if row["workload"] == workload]
        dilations = {int(row["rate_bps"]): float(row["dilation"]) for row in own}
        strategies = dict.fromkeys(
            str(row["strategy"]) for row in own if row["strategy"] in ENGINE_STRATEGIES
        )
        found += [
            Simulation(workload, strategy, int(own[0]["workers"]), rate_bps, dilation, compute_s)
            for strategy in strategies
            for rate_bps, dilation in between(dilations).items()
        ]
    return found


def between(dilations: Mapping[int, float]) -> dict[int, float]:
    """Return rates at and between the given ones, at equal ratios, each with its dilation.

    Args:
        dilations: by rate. Between two rates, real ports are as fast as between theirs.
    """
    ordered = sorted(dilations)
    found: dict[int, float] = {}
    for low, high in itertools.pairwise(ordered):
        found[low] = dilations[low]
        for step in range(1, SIMULATED_BETWEEN + 1):
            share = step / (SIMULATED_BETWEEN + 1)
            rate_bps = round(low * (high / low) ** share / 1e6) * 10**6
            real_bps = (low / dilations[low]) ** (1 - share) * (high / dilations[high]) ** share
            found[rate_bps] = round(rate_bps / real_bps, 2)
    found.update({rate_bps: dilations[rate_bps] for rate_bps in ordered[-1:]})
    return found
