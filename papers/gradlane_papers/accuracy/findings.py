"""Findings of the study: means over seeds, spreads, and differences from full precision.

Everything that a table, a page or a sentence shows is computed here, from rows alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradlane_papers.accuracy.curve import crossing
from gradlane_papers.accuracy.exchange import ALL
from gradlane_papers.accuracy.run import FULL_PRECISION
from gradlane_papers.accuracy.study import Result

EQUAL_TIME_SHARE = 0.25
"""Of the time that full precision takes for all steps at a rate: where curves are compared."""
RESOLUTION = 0.0005
"""Of accuracies as shares: tables give tenths of a point."""
TARGET_MARGIN = 0.02
"""Below the final accuracy of full precision: what time to accuracy is measured to."""
T_QUANTILES = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""By number of seeds: half of a 95 % interval in standard errors (Student's t)."""
T_QUANTILE_MANY = 2.23
"""The same of eleven seeds, a little too much for more."""


@dataclass(frozen=True)
class Spread:
    """Values over seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Their mean."""
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float:
        """Their standard deviation; 0 of one value."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0


def select(
    rows: Sequence[Result],
    *,
    task: str | None = None,
    scheme: str | None = None,
    layers: str | None = None,
) -> list[Result]:
    """Return the results of a task, a scheme and layers; None: of all."""
    return [
        row
        for row in rows
        if task in (None, row.task)
        and scheme in (None, row.scheme)
        and layers in (None, row.layers)
    ]


def tasks_of(rows: Iterable[Result]) -> list[str]:
    """Return the tasks in the order of first appearance."""
    return list(dict.fromkeys(row.task for row in rows))


def schemes_of(rows: Iterable[Result]) -> list[str]:
    """Return the schemes in the order of first appearance."""
    return list(dict.fromkeys(row.scheme for row in rows))


def final_loss(rows: Sequence[Result]) -> Spread:
    """Return the last losses; no number counts as infinite."""
    return Spread(tuple(math.inf if row.loss[-1] is None else row.loss[-1] for row in rows))


def final_accuracy(rows: Sequence[Result]) -> Spread:
    """Return the last accuracies."""
    return Spread(tuple(row.accuracy[-1] for row in rows))


def difference(rows: Sequence[Result], full: Sequence[Result]) -> Spread:
    """Return final accuracy minus that of full precision with the same seed."""
    by_seed = {row.seed: row.accuracy[-1] for row in full}
    return Spread(
        tuple(row.accuracy[-1] - by_seed[row.seed] for row in rows if row.seed in by_seed)
    )


def is_noise(change: Spread) -> bool:
    """Return whether zero lies in the 95 % interval of a mean difference; of one seed it does.

    What rounds to no tenth of a point is none, however alike the seeds are.
    """
    count = len(change.values)
    if count < 2 or abs(change.mean) < RESOLUTION:
        return True
    width = T_QUANTILES.get(count, T_QUANTILE_MANY) * change.deviation / math.sqrt(count)
    return abs(change.mean) <= width


def equal_time_s(rows: Sequence[Result], task: str, rate_bps: int) -> float | None:
    """Return when curves of a task are compared at a rate; None without full precision."""
    full = select(rows, task=task, scheme=FULL_PRECISION, layers=ALL)
    if not full:
        return None
    return EQUAL_TIME_SHARE * full[0].times_s(rate_bps)[-1]


def accuracy_at(row: Result, rate_bps: int, time_s: float) -> float:
    """Return the accuracy of a run at a time, between evaluations on a straight line.

    A run whose steps are over stays where it ended.
    """
    return float(np.interp(time_s, row.times_s(rate_bps), row.accuracy))


def target(rows: Sequence[Result], task: str) -> float | None:
    """Return the accuracy that time is measured to; None without full precision."""
    full = select(rows, task=task, scheme=FULL_PRECISION, layers=ALL)
    return final_accuracy(full).mean - TARGET_MARGIN if full else None


def time_to(row: Result, rate_bps: int, accuracy: float) -> float | None:
    """Return when a run first reached an accuracy, between evaluations; None if it never did."""
    return crossing(row.times_s(rate_bps), row.accuracy, accuracy)


def speedup_to(
    rows: Sequence[Result], full: Sequence[Result], rate_bps: int, accuracy: float
) -> float | None:
    """Return full precision's mean time to an accuracy over that of these rows.

    None where a run did not get there, or where all were there before their first step.
    """
    own = [time_to(row, rate_bps, accuracy) for row in rows]
    theirs = [time_to(row, rate_bps, accuracy) for row in full]
    reached = [one for one in own if one is not None]
    reached_full = [one for one in theirs if one is not None]
    if len(reached) < len(own) or not reached or not reached_full:
        return None
    mean_s = statistics.fmean(reached)
    return statistics.fmean(reached_full) / mean_s if mean_s > 0.0 else None


def loses(rows: Sequence[Result]) -> list[tuple[str, str, Spread]]:
    """Return (task, scheme, difference) where full precision is better by more than noise."""
    found = []
    for task in tasks_of(rows):
        own = select(rows, task=task, layers=ALL)
        full = select(own, scheme=FULL_PRECISION)
        for scheme in schemes_of(own):
            change = difference(select(own, scheme=scheme), full)
            if change.values and change.mean < 0 and not is_noise(change):
                found.append((task, scheme, change))
    return found


def summary(rows: Sequence[Result], command: str) -> dict[str, Any]:
    """Return the accuracies of each kind of run, seed by seed.

    Args:
        rows: of the study; each kind with the same seeds.
        command: that made them.
    """
    kinds: dict[tuple[str, str, str, int], list[Result]] = {}
    for row in sorted(rows, key=lambda one: one.seed):
        kinds.setdefault((row.task, row.scheme, row.layers, row.workers), []).append(row)
    found = []
    for (task, scheme, layers, workers), own in kinds.items():
        stale = [one.stale for one in own if one.stale is not None]
        found.append(
            {
                **{"task": task, "scheme": scheme, "layers": layers, "workers": workers},
                "steps": own[0].steps,
                "evaluated": own[0].evaluated,
                "accuracy": [[round(value, 4) for value in one.accuracy] for one in own],
                "stale": statistics.fmean(stale) if stale else None,
            }
        )
    return {"format": "gradlane-trained", "command": command, "rows": found}
