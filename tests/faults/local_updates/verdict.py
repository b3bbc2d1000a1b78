"""Judges local updates that were to go on: no hang, no lost step, the bits of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.faults.going_on.replay import ReplayError
from tests.faults.going_on.verdict import check_lost, events_of, judge_ends
from tests.faults.local_updates.replay import replay
from tests.faults.local_updates.scenario import STEPS, LocalScenario
from tests.faults.outcome import Outcome, RankEnd
from tests.faults.verdict import Problem

_COMPARED = ("sent", "moved", "mixed", "changed", "digest", "closed", "gathered", "saved")


def judge(scenario: LocalScenario, outcome: Outcome) -> list[Problem]:
    """Judge how the ranks of a run ended.

    Args:
        scenario: the faults.
        outcome: what came of them.
    """
    problems, through = judge_ends(scenario, outcome)
    if not through:
        return problems
    for end in through:
        problems += _check_alike(end, through[0])
    known = max(([_members(one) for one in events_of(end, "agreed")] for end in through), key=len)
    everybody = tuple(range(scenario.world_size))
    gone = set(everybody) - set(known[-1] if known else everybody)
    problems += check_lost(scenario, outcome, through[0], gone, set(everybody))
    if not problems and scenario.codec is None:
        # A rank may never hear of members that others follow at once.
        heard = {_members(one) for end in through for one in events_of(end, "agreed")}
        sets = sorted({everybody, *heard}, key=len, reverse=True)
        for end in through:
            try:
                replay(scenario, end.rank, sets, end.events)
            except ReplayError as error:
                problems.append(Problem("other bits", end.rank, str(error)))
    return problems


def _members(event: dict[str, Any]) -> tuple[int, ...]:
    return tuple(event["members"])


def _check_alike(end: RankEnd, first: RankEnd) -> Iterator[Problem]:
    """Check that a rank did every step once, and that all it has in common is the same bits."""
    steps = [event["step"] for event in events_of(end, "step")]
    if steps != list(range(1, STEPS + 1)):
        yield Problem("lost step", end.rank, f"it did steps {steps}")
    for what in _COMPARED:
        found, expected = events_of(end, what), events_of(first, what)
        if found != expected:
            text = f"{what}: {found[-5:]}, rank {first.rank}: {expected[-5:]}"
            yield Problem("other bits", end.rank, text)
