"""The verdict on one kill, from the files of all ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.lost_rank.rank_log import BEGUN, DONE, Event

SETTLED_STEPS = 5
"""First steps that are left out of the length of a normal step."""


@dataclass(frozen=True)
class Verdict:
    """The cost of one kill.

    Times are seconds and have a normal step taken off; they are None where training did not go on.

    Attributes:
        finished: whether every survivor completed the last step.
        normal_step_s: median time between two completed steps before the kill.
        longest_step_s: longest such time.
        pause_s: longest time after the kill in which a survivor completed no step.
        until_new_s: time from the last completed step before the kill until every survivor had
            completed a step that no rank had completed before.
        steps_lost: steps that a survivor began again, and steps that it never completed; the
            largest number among the survivors.
        live_ranks: ranks that completed the last step.
        same_parameters: whether all of these had the same parameters then.
    """

    finished: bool
    normal_step_s: float
    longest_step_s: float
    pause_s: float | None
    until_new_s: float | None
    steps_lost: int
    live_ranks: int
    same_parameters: bool


def judge(
    logs: Mapping[int, Sequence[Event]], victim: int, killed_at_s: float, steps: int
) -> Verdict:
    """Judge one kill.

    Args:
        logs: the events of each rank in their order.
        victim: the rank that was killed.
        killed_at_s: monotonic seconds of the kill.
        steps: number of steps of the training.

    Raises:
        ValueError: a survivor had not completed enough steps before the kill.
    """
    survivors = {rank: _done(events) for rank, events in logs.items() if rank != victim}
    gaps_before: list[float] = []
    pauses: list[float] = []
    for rank, done in survivors.items():
        times = [event.time_s for event in done]
        before = sum(time_s <= killed_at_s for time_s in times)
        gaps = [later - earlier for earlier, later in pairwise(times)]
        # Gap n ends with step n + 1 of this rank's file.
        normal, after = gaps[SETTLED_STEPS : max(0, before - 1)], gaps[max(0, before - 1) :]
        if not normal:
            raise ValueError(f"rank {rank} completed {before} steps before the kill: too few")
        gaps_before += normal
        pauses.append(max(after, default=math.inf))
    normal_step_s = statistics.median(gaps_before)
    last = {
        rank: [event.checksum for event in _done(events) if event.step == steps - 1]
        for rank, events in logs.items()
    }
    live = {rank: checksums[-1] for rank, checksums in last.items() if checksums}
    pause_s = max(pauses)
    until_new_s = _until_new_step(logs, survivors, killed_at_s)
    return Verdict(
        finished=survivors.keys() <= live.keys(),
        normal_step_s=normal_step_s,
        longest_step_s=max(gaps_before),
        pause_s=_beyond(pause_s, normal_step_s),
        until_new_s=_beyond(until_new_s, normal_step_s),
        steps_lost=max(_steps_lost(logs[rank], steps) for rank in survivors),
        live_ranks=len(live),
        same_parameters=len(set(live.values())) == 1,
    )


def _done(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.kind == DONE]


def _beyond(time_s: float, normal_step_s: float) -> float | None:
    return max(0.0, time_s - normal_step_s) if math.isfinite(time_s) else None


def _until_new_step(
    logs: Mapping[int, Sequence[Event]],
    survivors: Mapping[int, Sequence[Event]],
    killed_at_s: float,
) -> float:
    """Return the seconds to the first new step on all survivors; infinite if there is none."""
    before = [
        event for events in logs.values() for event in _done(events) if event.time_s <= killed_at_s
    ]
    reached = max(event.step for event in before)
    news = [
        min((event.time_s for event in done if event.step > reached), default=math.inf)
        for done in survivors.values()
    ]
    return max(news) - max(event.time_s for event in before)


def _steps_lost(events: Sequence[Event], steps: int) -> int:
    completed = {event.step for event in _done(events)}
    begun = [event.step for event in events if event.kind == BEGUN]
    again = len(begun) - len(set(begun))
    return again + len(set(range(steps)) - completed)
