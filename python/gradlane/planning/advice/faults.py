"""The cost of faults in words, as cells of a table, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gradlane.formats.durations import format_duration_s
from gradlane.formats.rates import format_rate
from gradlane.planning.simulation.faults import PROGRESS_LEAST, FaultCost, FaultSettings
from gradlane.training.options.codec_options import RAW
from gradlane.training.options.stragglers import WAIT

COLUMNS = (
    "workers",
    "rate",
    "strategy",
    "restart",
    "steps a checkpoint",
    "train, %",
    "samples/s",
    "going on, %",
    "going on, samples/s",
)
"""Headings of a table: a line for each row of the what-if."""


def faults_json(settings: FaultSettings, costs: Sequence[FaultCost]) -> dict[str, Any]:
    """Return the settings, the costs and both in words.

    Args:
        settings: of the faults.
        costs: of each row of one model, at least one.
    """
    return {
        **asdict(settings),
        "assumptions": _assumptions_text(settings, costs[0].checkpoint_s),
        "rows": [cost.to_json() for cost in costs],
        "verdicts": verdicts(costs),
    }


def cells_of(cost: Mapping[str, Any]) -> list[str | float | None]:
    """Return the cells of a table's line for a cost as it is in JSON."""
    each = cost["ranks_per_node"]
    name = cost["strategy"]
    if cost["topology"] != "flat":
        name += f" {cost['topology']}"
    if cost["codec"] != RAW:
        name += f" {cost['codec']}"
    if cost["compression"] != 1 and cost["codec"] == RAW:
        name += f" {cost['compression']:g}\N{MULTIPLICATION SIGN}"
    if cost["stragglers"] != WAIT:
        name += f"/{cost['stragglers']}"
    share, samples_per_s = cost["going_on_train_share"], cost["going_on_samples_per_s"]
    return [
        str(cost["workers"]) if each == 1 else f"{cost['machines']} x {each}",
        format_rate(cost["rate_bps"]),
        name,
        cost["restart"],
        cost["checkpoint_every"],
        round(100 * cost["train_share"], 1),
        round(cost["samples_per_s"], 1),
        None if share is None else round(100 * share, 1),
        None if samples_per_s is None else round(samples_per_s, 1),
    ]


def _assumptions_text(settings: FaultSettings, checkpoint_s: float) -> str:
    """Return a line that says what costs were computed from."""
    lost, noticed, replaced, started, written = map(
        format_duration_s,
        (
            settings.mtbf_s,
            settings.detection_s,
            settings.replacement_s,
            settings.restart_s,
            checkpoint_s,
        ),
    )
    return (
        f"Faults: each machine is lost every {lost} on average, which is noticed within {noticed}; "
        f"after {replaced} another one is there, whose processes train {started} later; a "
        f"checkpoint stops training for {written}."
    )


def verdicts(costs: Sequence[FaultCost]) -> list[str]:
    """Return a sentence for each number of machines, over all of its rows."""
    groups: dict[tuple[int, int], list[FaultCost]] = {}
    for cost in costs:
        groups.setdefault((cost.workers, cost.ranks_per_node), []).append(cost)
    return [_verdict(group) for group in groups.values()]


def _verdict(costs: Sequence[FaultCost]) -> str:
    workers, each, machines = costs[0].workers, costs[0].ranks_per_node, costs[0].machines
    who = f"{workers} workers" if each == 1 else f"{machines} nodes of {each} workers"
    without = [cost.train_share for cost in costs]
    with_it = [it.going_on_train_share for it in costs if it.going_on_train_share is not None]
    if machines == 1:
        who = "1 worker"
        text = f"{_trains(without, '')}; nobody is left to go on"
    elif not with_it:
        names = ", ".join(dict.fromkeys(cost.strategy for cost in costs))
        text = f"{_trains(without, 'without going on')}; {names} cannot go on"
    elif max(*without, *with_it) < PROGRESS_LEAST:
        text = "training makes no progress, with or without going on"
    else:
        first = _trains(without, "without going on")
        text = f"{first}, {_trains(with_it, 'with it', again=max(without) >= PROGRESS_LEAST)}"
    return f"{who}: {text}."


def _trains(shares: Sequence[float], how: str, *, again: bool = False) -> str:
    if max(shares) < PROGRESS_LEAST:
        return f"training makes no progress {how}".rstrip()
    least, most = (f"{100 * pick(shares):.1f}" for pick in (min, max))
    count = least if least == most else f"{least} to {most}"
    return f"{count} {how}" if again else f"of 100 machine-hours {count} train {how}".rstrip()
