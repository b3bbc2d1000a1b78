"""Judges a training that was to go on: no hang, no lost step, the bits of an undisturbed one."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.faults.going_on.replay import (
    Change,
    ReplayError,
    files_by_step,
    replay,
    restore,
)
from tests.faults.going_on.scenario import (
    CHECKPOINT_EVERY,
    CONNECT_TIMEOUT_S,
    STEPS,
    GoingOnScenario,
)
from tests.faults.outcome import Outcome, RankEnd
from tests.faults.scenario import (
    CLOSE_TIMEOUT_S,
    PROGRESS_TIMEOUT_S,
    SILENCE_TIMEOUT_S,
)
from tests.faults.verdict import SLACK_S, Problem, last_frames, unnamed_files

BOUND_S = (
    2 * SILENCE_TIMEOUT_S + 1.25 * PROGRESS_TIMEOUT_S + CONNECT_TIMEOUT_S + CLOSE_TIMEOUT_S
) + SLACK_S
"""Seconds from the first fault within which every rank that is able to has to end: two are noticed
one after the other, and a rank that is left out may wait for its last checkpoint."""


def judge(
    scenario: GoingOnScenario, outcome: Outcome, checkpoint: Path | None
) -> tuple[list[Problem], float | None]:
    """Judge how the ranks of a run ended, and what they left.

    Args:
        scenario: the faults.
        outcome: what came of them.
        checkpoint: folder of checkpoints; None: there is none.

    Returns:
        Problems, and the seconds without progress, where the ranks that are left went on.
    """
    if not outcome.is_reached:
        text = f"no rank reached the moment; errors: {outcome.errors}"
        return [Problem("not run", None, text)], None
    problems = [Problem("left over", None, one) for one in outcome.left_over]
    for end in outcome.ends:
        if end.rank not in scenario.silenced:
            problems += _check_end(end)
    left = [outcome.ends[rank] for rank in scenario.survivors]
    through = [end for end in left if end.code == 0 and end.is_done]
    for end in left:
        if end.error is None:
            continue
        said = f"{end.error['type']}: {end.error['text'][:400]}"
        if scenario.must_go_on and not _may_end(scenario, end):
            problems.append(Problem("ended", end.rank, said))
        elif through and not _may_end(scenario, end):
            others = [other.rank for other in through]
            problems.append(Problem("ended", end.rank, f"{others} went on; {said}"))
    if not through:
        return problems, None
    problems += _check_alike(scenario, outcome, through)
    if not problems:
        problems += _check_bits(scenario, outcome, through[0], checkpoint)
    return problems, _pause_s(outcome, through)


def _check_end(end: RankEnd) -> Iterator[Problem]:
    if end.code is None:
        where = last_frames(end.traces)
        yield Problem("hang", end.rank, f"not ended after the bound; {where}")
    elif end.code < 0:
        yield Problem(
            "foreign error", end.rank, f"ended by signal {-end.code}: {end.errors[-300:]}"
        )
    elif end.error is None and not (end.code == 0 and end.is_done):
        yield Problem("silent", end.rank, f"ended with {end.code}: {end.errors[-300:]}")
    elif end.error is not None and not end.error["ours"]:
        text = f"{end.error['type']}: {end.error['text'][:400]}"
        yield Problem("foreign error", end.rank, text)


def _may_end(scenario: GoingOnScenario, end: RankEnd) -> bool:
    """Return whether a rank that is left may end with an error when it has done all steps.

    Two ranks of a link that breaks in their last step cannot both know of each other's end.
    """
    is_silent = any(fault in ("cut", "partition", "stop") for fault, _ in scenario.faults)
    return is_silent and end.last_step == STEPS


def _check_alike(
    scenario: GoingOnScenario, outcome: Outcome, through: list[RankEnd]
) -> Iterator[Problem]:
    """Check that the ranks that are left did every step once, with the same bits."""
    first = through[0]
    for end in through:
        steps = [event["step"] for event in _events(end, "step")]
        if steps != list(range(1, STEPS + 1)):
            yield Problem("lost step", end.rank, f"it did steps {steps}")
        for index, means in enumerate(_means(end)):
            if len(means) != STEPS:
                text = f"parameter {index} had {len(means)} updates in {STEPS} steps"
                yield Problem("lost step", end.rank, text)
        for what in ("digest", "changed", "agreed"):
            if _events(end, what) != _events(first, what):
                text = f"{what}: {_events(end, what)}, rank {first.rank}: {_events(first, what)}"
                yield Problem("other bits", end.rank, text)
        if _means(end) != _means(first):
            yield Problem("other bits", end.rank, f"other means than rank {first.rank}'s")
    members = ([list(range(scenario.world_size))] + [one["members"] for one in _agreed(first)])[-1]
    gone = set(range(scenario.world_size)) - set(members)
    # A fault may come when its victim is through.
    there = [rank for rank in scenario.lost if outcome.ends[rank].last_step < STEPS]
    if not set(there) <= gone <= set(scenario.lost):
        text = f"went on without {sorted(gone)}, lost are {sorted(scenario.lost)}"
        yield Problem("misnamed", first.rank, text)


def _check_bits(
    scenario: GoingOnScenario, outcome: Outcome, end: RankEnd, checkpoint: Path | None
) -> Iterator[Problem]:
    """Check a rank's means and losses against one process, and so the checkpoints, if any."""
    changes = [Change(tuple(one["members"]), one["step"]) for one in _agreed(end)]
    losses = [event["loss"] for event in _events(end, "step")]
    try:
        digests = replay(scenario.world_size, changes, _means(end), end.rank, losses)
    except ReplayError as error:
        yield Problem("other bits", end.rank, str(error))
        return
    if checkpoint is not None:
        yield from _check_checkpoints(scenario, outcome, end, checkpoint, digests)


def _check_checkpoints(
    scenario: GoingOnScenario,
    outcome: Outcome,
    end: RankEnd,
    checkpoint: Path,
    digests: dict[int, str],
) -> Iterator[Problem]:
    """Check that each is of the members of its step, that none is lost, and the last one's bits."""
    found = files_by_step(checkpoint)
    if lost := set(outcome.complete_before) - set(found):
        yield Problem("lost checkpoint", None, f"steps {sorted(lost)} were complete at the fault")
    in_force = [(one["at"], len(one["members"])) for one in _events(end, "changed")]
    last_change = max((at for at, _ in in_force), default=0)
    for step in range(CHECKPOINT_EVERY, STEPS + 1, CHECKPOINT_EVERY):
        writers = ([scenario.world_size] + [size for at, size in in_force if at <= step])[-1]
        if step in found and found[step] != writers:
            text = f"step {step} has {found[step]} files, {writers} ranks were members"
            yield Problem("lost checkpoint", None, text)
        is_undisturbed = last_change < step < scenario.step or scenario.step < last_change < step
        if step not in found and is_undisturbed:
            said = [line for line in _lines(outcome) if "is not complete" in line]
            text = f"step {step} is not complete, the last change was at the end of {last_change}"
            text += f"; warnings: {said}"
            yield Problem("lost checkpoint", None, text)
    if found:
        step, digest = restore(checkpoint)
        if step != max(found) or digest != digests[step]:
            text = f"one rank restored step {step} of {sorted(found)}, with other bits"
            yield Problem("lost checkpoint", None, text)
    yield from unnamed_files(checkpoint)


def _lines(outcome: Outcome) -> list[str]:
    """Return what all ranks wrote to standard error."""
    return [line for end in outcome.ends for line in end.errors.splitlines()]


def _events(end: RankEnd, name: str) -> list[dict[str, Any]]:
    return [event for event in end.events if event["event"] == name]


def _agreed(end: RankEnd) -> list[dict[str, Any]]:
    return _events(end, "agreed")


def _means(end: RankEnd) -> list[list[int]]:
    """Return the checksums of the means that each parameter was updated with, in their order."""
    means: dict[int, list[int]] = {}
    for event in _events(end, "mean"):
        means.setdefault(event["parameter"], []).append(event["crc"])
    return [means[index] for index in sorted(means)]


def _pause_s(outcome: Outcome, through: list[RankEnd]) -> float | None:
    """Return the longest time after the fault without a step, less a usual one."""
    pauses = []
    for end in through:
        times = [event["at_s"] for event in _events(end, "step")]
        gaps = [(late - early, late) for early, late in pairwise(times)]
        after = [gap for gap, late in gaps if late > outcome.fault_s]
        before = [gap for gap, late in gaps if late <= outcome.fault_s]
        if after and before:
            pauses.append(max(after) - statistics.median(before))
    return max(pauses, default=None)
