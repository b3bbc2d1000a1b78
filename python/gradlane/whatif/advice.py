"""The answer in words: is the network the bottleneck, and what is the cheapest change?

Changes are ordered by what they cost a person: another order of sending is free and exact, a
faster link costs money, compression changes the numbers that are learned from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradlane.lab.rates import format_rate
from gradlane.whatif.grid import Row
from gradlane.whatif.simulation import RING_FUSED

GOAL = 0.95
"""The scaling factor that is good enough."""
WORTHWHILE = 0.01
"""A gain in scaling factor below this is none."""
BUSY = 0.9
"""A rank's I/O thread that works this share of the time is what limits."""
BASELINES = ("wfbp", "slicing", "kvstore", "deferred-pull", "p3", RING_FUSED)
"""What a training without gradlane's scheduling is taken to be: the first that was simulated."""


@dataclass(frozen=True)
class Change:
    """Something that a person could change."""

    kind: str
    """`nothing`, `strategy`, `link` or `compression`."""
    strategy: str
    rate_bps: float
    compression: float
    scaling_factor: float
    """What it reaches."""


@dataclass(frozen=True)
class Answer:
    """What follows for one cluster."""

    workers: int
    rate_bps: float
    bottleneck: str
    """`none`, `network` or `host`."""
    baseline: str
    """The strategy that the question is asked for."""
    baseline_scaling_factor: float
    cheapest: Change | None
    """The cheapest change that reaches the goal; None where nothing simulated does."""
    alternatives: list[Change]
    """Other kinds of change that reach the goal, each at its least."""
    not_worth: list[str]
    """What brings nothing here."""
    text: str
    """All of this in words."""

    def to_json(self) -> dict[str, Any]:
        """Return the answer with the units in its keys."""
        return asdict(self)


def answers_of(rows: Sequence[Row]) -> list[Answer]:
    """Return an answer for each number of workers and rate, in the order of the rows."""
    cells = dict.fromkeys((row.workers, row.rate_bps) for row in rows)
    return [
        _answer([row for row in rows if row.workers == workers], rate_bps)
        for workers, rate_bps in cells
    ]


def _answer(rows: list[Row], rate_bps: float) -> Answer:
    """Answer for one rate; `rows` are all that have the same number of workers."""
    here = [row for row in rows if row.rate_bps == rate_bps]
    least = min(row.compression for row in here)
    plain = [row for row in here if row.compression == least]
    baseline = min(plain, key=lambda row: BASELINES.index(row.strategy))
    changes = _changes(rows, here, baseline)
    enough = [change for change in changes if change.scaling_factor >= GOAL]
    bottleneck = "none"
    if baseline.scaling_factor < GOAL:
        bottleneck = "host" if baseline.io_utilization > BUSY else "network"
    not_worth = _not_worth(rows, plain, baseline)
    return Answer(
        workers=baseline.workers,
        rate_bps=rate_bps,
        bottleneck=bottleneck,
        baseline=baseline.strategy,
        baseline_scaling_factor=baseline.scaling_factor,
        cheapest=enough[0] if enough else None,
        alternatives=enough[1:],
        not_worth=not_worth,
        text=_text(baseline, bottleneck, changes, enough, not_worth),
    )


def _changes(rows: list[Row], here: list[Row], baseline: Row) -> list[Change]:
    """The least change of each kind that reaches the goal, else the one that reaches most."""
    kinds = {
        "nothing": [baseline],
        "strategy": [
            row
            for row in here
            if row.compression == baseline.compression and row.strategy != baseline.strategy
        ],
        "link": [
            row
            for row in rows
            if row.rate_bps > baseline.rate_bps and row.compression == baseline.compression
        ],
        "compression": [row for row in here if row.compression > baseline.compression],
    }
    changes = []
    for kind, candidates in kinds.items():
        if not candidates:
            continue
        enough = [row for row in candidates if row.scaling_factor >= GOAL]
        if enough:
            best = min(enough, key=lambda row: (row.rate_bps, row.compression, -row.scaling_factor))
        else:
            best = max(candidates, key=lambda row: row.scaling_factor)
        changes.append(
            Change(kind, best.strategy, best.rate_bps, best.compression, best.scaling_factor)
        )
    return changes


def _not_worth(rows: list[Row], plain: list[Row], baseline: Row) -> list[str]:
    reached = max(row.scaling_factor for row in plain)
    found = []
    for row in plain:
        gain = row.scaling_factor - baseline.scaling_factor
        if row is not baseline and abs(gain) < WORTHWHILE:
            found.append(f"{_named(row)} instead of {_named(baseline)} ({_points(gain)})")
    others = {
        "a faster link": [
            row
            for row in rows
            if row.rate_bps > baseline.rate_bps and row.compression == baseline.compression
        ],
        "compression": [
            row
            for row in rows
            if row.rate_bps == baseline.rate_bps and row.compression > baseline.compression
        ],
    }
    for what, candidates in others.items():
        if candidates:
            gain = max(row.scaling_factor for row in candidates) - reached
            if gain < WORTHWHILE:
                found.append(f"{what} ({_points(gain)} at most)")
    return found


def _text(
    baseline: Row,
    bottleneck: str,
    changes: list[Change],
    enough: list[Change],
    not_worth: list[str],
) -> str:
    where = f"{baseline.workers} workers at {format_rate(baseline.rate_bps)}"
    reached = _percent(baseline.scaling_factor)
    if bottleneck == "none":
        sentences = [
            f"{where}: the network is not the bottleneck; {_named(baseline)} reaches {reached}."
        ]
    else:
        waiting_s = baseline.step_s - baseline.compute_s
        what = "the network" if bottleneck == "network" else "the host's I/O thread"
        sentences = [
            f"{where}: {what} is the bottleneck; {_named(baseline)} reaches {reached}, "
            f"{waiting_s * 1e3:.0f} ms of a step of {baseline.step_s * 1e3:.0f} ms are waiting."
        ]
        if enough:
            sentences.append(
                f"The cheapest change that reaches {_percent(GOAL)}: {_described(enough[0])}."
            )
            if len(enough) > 1:
                others = "; ".join(_described(change) for change in enough[1:])
                sentences.append(f"So would: {others}.")
        else:
            best = max(changes, key=lambda change: change.scaling_factor)
            sentences.append(
                f"Nothing simulated here reaches {_percent(GOAL)}; the most is {_described(best)}."
            )
    if not_worth:
        sentences.append(f"Not worth it: {'; '.join(not_worth)}.")
    return " ".join(sentences)


def _described(change: Change) -> str:
    reaches = f"({_percent(change.scaling_factor)})"
    if change.kind == "nothing":
        return f"nothing, {change.strategy} {reaches}"
    if change.kind == "strategy":
        return f"{change.strategy}, exact and free {reaches}"
    if change.kind == "link":
        return f"a link of {format_rate(change.rate_bps)} with {change.strategy} {reaches}"
    return f"{change.compression:g} times fewer bytes with {change.strategy} {reaches}"


def _named(row: Row) -> str:
    return row.strategy if row.topology == "flat" else f"{row.strategy} ({row.topology})"


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _points(gain: float) -> str:
    return f"{gain * 100:+.1f} points"
