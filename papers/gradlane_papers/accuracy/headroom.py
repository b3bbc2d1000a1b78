"""The study whose task leaves room above what is learned: every scheme with its own learning rate.

Each scheme is trained with each learning rate of one list, by a seed of its own, and keeps the rate
with the smallest held-out loss. Then all schemes are trained by the same other seeds. A difference
from full precision is taken seed by seed; its interval and p-value are Student's, and over all
schemes p-values are corrected by Holm's method, so that one of many is not called a difference by
chance.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradlane.lab.runs.folder import PresetFolder
from gradlane.lab.runs.run import LabProgress
from gradlane.report.markdown import filled, markdown_table
from gradlane_papers.accuracy import mixture
from gradlane_papers.accuracy.exchange import ALL
from gradlane_papers.accuracy.findings import Spread
from gradlane_papers.accuracy.run import FULL_PRECISION, Run
from gradlane_papers.accuracy.study import Result, make_missing, missing, read_results
from gradlane_papers.accuracy.tasks import MIXTURE, TASKS

TEMPLATE = Path(__file__).with_name("headroom.md")
SCHEMES = (
    FULL_PRECISION,
    "bf16",
    "qsgd:bits=8",
    "qsgd:bits=4",
    "qsgd:bits=2",
    "qsgd:bits=2,levels=optimal",
    "qsgd:bits=1",
    "onebit:bucket=64",
    "topk:ratio=0.01,broadcast_ratio=0.04",
)
LEARNING_RATES = (0.025, 0.05, 0.1)
SEARCH_SEED = 1000
"""Of the search for a learning rate; no other run has it."""
WORKERS = 4
LEVEL = 0.05
"""Error probability of all comparisons together."""


@dataclass(frozen=True)
class ComparedScheme:
    """A scheme beside full precision.

    Attributes:
        scheme: its text.
        lr: the learning rate that the search has found for it.
        accuracies: of its seeds, 0 to 1.
        change: the differences in accuracy from full precision, seed by seed.
        p: two-sided, of no difference; 1 of a single seed.
        p_holm: the same, corrected for all comparisons.
    """

    scheme: str
    lr: float
    accuracies: Spread
    change: Spread
    p: float
    p_holm: float


def search_runs(steps: int) -> list[Run]:
    """Return the runs that search for learning rates."""
    return [
        Run(f"{MIXTURE}/lr={lr:g}", scheme, ALL, SEARCH_SEED, WORKERS, steps)
        for lr in LEARNING_RATES
        for scheme in SCHEMES
    ]


def found_rates(results: Sequence[Result]) -> dict[str, float]:
    """Return the learning rate of each scheme whose search is over: that of the smallest loss."""
    losses: dict[str, dict[float, float]] = {}
    for one in results:
        if one.seed == SEARCH_SEED:
            lr = float(one.task.partition("=")[2])
            loss = one.loss[-1]
            losses.setdefault(one.scheme, {})[lr] = math.inf if loss is None else loss
    return {
        scheme: min(found, key=lambda lr: found[lr])
        for scheme, found in losses.items()
        if len(found) == len(LEARNING_RATES)
    }


def seed_runs(rates: Mapping[str, float], seeds: int, steps: int) -> list[Run]:
    """Return the runs that are compared, seed by seed.

    Args:
        rates: the learning rate of each scheme.
        seeds: how many.
        steps: of a run.
    """
    return [
        Run(f"{MIXTURE}/lr={lr:g}", scheme, ALL, seed, WORKERS, steps)
        for seed in range(seeds)
        for scheme, lr in rates.items()
    ]


def steps_of(*, quick: bool) -> int:
    """Return the steps of a run."""
    task = TASKS[MIXTURE]
    return task.quick_steps if quick else task.steps


def make(
    folder: PresetFolder, progress: LabProgress, *, seeds: int, quick: bool, budget_s: float
) -> list[Result]:
    """Make the runs that are missing, as many as fit, and return all results."""
    steps = steps_of(quick=quick)
    end_s = time.monotonic() + budget_s
    results = make_missing(search_runs(steps), folder, progress, budget_s=budget_s)
    left_s = end_s - time.monotonic()
    if not missing(search_runs(steps), results) and left_s > 0.0:
        runs = seed_runs(found_rates(results), seeds, steps)
        results = make_missing(runs, folder, progress, budget_s=left_s)
    return results


def planned_steps(folder: PresetFolder, *, seeds: int, quick: bool) -> int:
    """Return the training steps that are left to make."""
    steps = steps_of(quick=quick)
    done = sum(one.steps == steps for one in read_results(folder.results))
    return steps * max(0, len(SCHEMES) * (len(LEARNING_RATES) + seeds) - done)


def two_sided_p(change: Spread) -> float:
    """Return the p-value of no difference by Student's t; 1 of a single value."""
    count = len(change.values)
    if count < 2:
        return 1.0
    error = change.deviation / math.sqrt(count)
    if error == 0.0:
        return 1.0 if change.mean == 0.0 else 0.0
    return student_p(abs(change.mean) / error, count - 1)


def student_p(t: float, degrees: int) -> float:
    """Return how likely Student's t with some degrees of freedom is at least this far from zero.

    Abramowitz and Stegun 26.7.3 and 26.7.4, exact sums for whole degrees.
    """
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = (cosine, 0.0) if degrees % 2 else (1.0, 0.0)
    for number in range(1 if degrees % 2 else 0, degrees - 1, 2):
        total += term
        term *= cosine * cosine * (number + 1) / (number + 2)
    if degrees % 2:
        return max(0.0, 1.0 - 2.0 / math.pi * (angle + sine * total))
    return max(0.0, 1.0 - sine * total)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values that are corrected for their number (Holm 1979)."""
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[index]))
        corrected[index] = largest
    return corrected


def half_interval(change: Spread) -> float:
    """Return half of the 95 % interval of a mean; infinite of a single value."""
    count = len(change.values)
    if count < 2:
        return math.inf
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_p(middle, count - 1) > 0.05 else (low, middle)
    return high * change.deviation / math.sqrt(count)


def comparisons(results: Sequence[Result]) -> list[ComparedScheme]:
    """Return all schemes beside full precision, over the seeds that both have."""
    rates = found_rates(results)
    accuracy: dict[str, dict[int, float]] = {scheme: {} for scheme in rates}
    for one in results:
        if one.seed != SEARCH_SEED and one.task == f"{MIXTURE}/lr={rates.get(one.scheme, 0):g}":
            accuracy[one.scheme][one.seed] = one.accuracy[-1]
    full = accuracy.get(FULL_PRECISION, {})
    found = []
    for scheme, own in accuracy.items():
        seeds = sorted(own.keys() & full.keys())
        if seeds:
            change = Spread(tuple(own[seed] - full[seed] for seed in seeds))
            found.append((scheme, Spread(tuple(own[seed] for seed in seeds)), change))
    others = [one for one in found if one[0] != FULL_PRECISION]
    p_values = {scheme: two_sided_p(change) for scheme, _, change in others}
    corrected = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    return [
        ComparedScheme(
            scheme,
            rates[scheme],
            accuracies,
            change,
            p_values.get(scheme, 1.0),
            corrected.get(scheme, 1.0),
        )
        for scheme, accuracies, change in found
    ]


def table_of(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Return a line for each scheme."""
    ratios = {one.scheme: one.wire_ratio for one in results}
    lines: list[tuple[str, ...]] = []
    for one in comparisons(results):
        change, verdict = "-", "-"
        if one.scheme != FULL_PRECISION:
            half = half_interval(one.change)
            width = "" if math.isinf(half) else f" ± {100 * half:.2f}"
            change = f"{100 * one.change.mean:+.2f}{width}"
            differs = len(one.change.values) > 1 and one.p_holm < LEVEL
            verdict = f"{one.p_holm:.3f}" + (" (differs)" if differs else "")
        lines.append(
            (
                *(f"`{one.scheme}`", f"{ratios[one.scheme]:.2f}", f"{one.lr:g}"),
                *(f"{100 * one.accuracies.mean:.2f}", change, verdict),
            )
        )
    return lines


COLUMNS = (
    *("scheme", "times fewer bytes", "learning rate", "accuracy, %"),
    *("difference, points", "p, corrected"),
)


def page_text(results: Sequence[Result], command: str, still_missing: int) -> str:
    """Return the page.

    Args:
        results: of the study.
        command: that made them.
        still_missing: runs.
    """
    found = comparisons(results)
    counts = sorted({len(one.change.values) for one in found})
    seeds = " to ".join(str(one) for one in dict.fromkeys((counts[0], counts[-1]))) if counts else 0
    left = "" if not still_missing else f" Not run yet: {still_missing} runs."
    full = next((one for one in found if one.scheme == FULL_PRECISION), None)
    return filled(
        TEMPLATE,
        command=command,
        seeds=f"{seeds}",
        left=left,
        steps=str(max((one.steps for one in results), default=0)),
        best=f"{100 * mixture.best_accuracy():.1f}",
        full="-" if full is None else f"{100 * full.accuracies.mean:.1f}",
        rates=", ".join(f"{lr:g}" for lr in LEARNING_RATES),
        comparisons=str(max(0, len(found) - 1)),
        table=markdown_table(COLUMNS, table_of(results), numbers="-nnnnn"),
    )
