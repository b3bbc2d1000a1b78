"""The grid on which predictions are tested: workloads, strategies and rates, measured in pieces.

The grid takes the better part of an hour; a limit on the time of one call lets other work have the
machine in between. How rows are measured and kept is in `cells.py`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from gradlane.lab.runs.cells import Cell, usual_dilation
from gradlane.lab.runs.rows import CEILING, Row
from gradlane.lab.runs.strategy import LANES, POSEIDON, SEALED, parse_strategies
from gradlane.training.options.strategy import STRATEGIES as ENGINE_STRATEGIES

STRATEGIES = ("p3", "slicing", "kvstore", "wfbp")
SEALED_STRATEGY = f"p3/{SEALED}"
BASELINE = "ddp-gloo:4"
"""The full bandwidth preset measures other bucket sizes, too."""


NUMBERS_OF_LANES = (2, 3, 4)


def _over_lanes(workload: str, rate_bps: int) -> str:
    """Return one of the strategies over several lanes, both drawn for the cell."""
    draw = random.Random(f"{workload} {rate_bps}")
    return f"{draw.choice(STRATEGIES)}/{LANES}{draw.choice(NUMBERS_OF_LANES)}"


def _cells(workload: str, rates_gbps: Sequence[float], *, sealed: bool = False) -> list[Cell]:
    further = (SEALED_STRATEGY,) if sealed else ()
    rates_bps = [round(rate * 1e9) for rate in rates_gbps]
    return [
        Cell(
            workload,
            rate,
            (CEILING, *STRATEGIES, *further, _over_lanes(workload, rate), BASELINE),
            usual_dilation(workload, rate),
        )
        for rate in rates_bps
    ]


CELLS: tuple[Cell, ...] = (
    *_cells("resnet50", (1.5, 3, 4, 6, 10), sealed=True),
    *_cells("inception_v3", (1.5, 2.5, 3.2, 5, 8), sealed=True),
    *_cells("sockeye", (2, 3, 4, 6, 8)),
    *_cells("vgg19", (5, 7.5, 10, 15, 30)),
)
"""From rates at which communication takes twice as long as compute to rates at which it hides."""


def cells_of(workloads: Sequence[str], strategies: Sequence[str] = ()) -> list[Cell]:
    """Return the cells of these workloads; of all where none is named.

    Args:
        workloads: names.
        strategies: in place of each cell's own, beside compute alone.

    Raises:
        ValueError: a workload is not in the grid, or there is no such strategy.
    """
    known = list(dict.fromkeys(cell.workload for cell in CELLS))
    for workload in workloads:
        if workload not in known:
            raise ValueError(f"{workload!r} is not in the grid; there are: {', '.join(known)}")
    chosen = [cell for cell in CELLS if not workloads or cell.workload in workloads]
    if not strategies:
        return chosen
    names = tuple(one.text for one in parse_strategies(",".join(strategies)))
    names = (CEILING, *(name for name in names if name != CEILING))
    return [replace(cell, strategies=names) for cell in chosen]


def in_grid_order(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the engine's strategies sorted by workload, rate and strategy."""
    workloads = list(dict.fromkeys(cell.workload for cell in CELLS))
    others = (name for name in (*ENGINE_STRATEGIES, POSEIDON) if name not in STRATEGIES)
    over_lanes = (f"{name}/{LANES}{lanes}" for name in STRATEGIES for lanes in NUMBERS_OF_LANES)
    order = (*STRATEGIES, SEALED_STRATEGY, *over_lanes, *others)
    return sorted(
        (row for row in rows if row.workload in workloads and row.strategy in order),
        key=lambda row: (workloads.index(row.workload), row.rate_bps, order.index(row.strategy)),
    )
