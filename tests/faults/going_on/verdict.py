"""Judges a training that was to go on: no hang, no lost step, the bits of an undisturbed one."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence, Set
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
    OF_LINKS,
    STEPS,
    GoingOnScenario,
)
from tests.faults.outcome import Outcome, RankEnd
from tests.faults.scenario import (
    CLOSE_TIMEOUT_S,
    NETWORK_FAULTS,
    SILENCE_TIMEOUT_S,
)
from tests.faults.verdict import OR_LINK, SLACK_S, Problem, last_frames, named_ranks, unnamed_files


def bound_s(scenario: GoingOnScenario) -> float:
    """Return the seconds from the first fault within which every rank that is able to has to end.

    Two faults are noticed one after the other, and a rank that is left out may wait for its last
    checkpoint. Nobody waits for the progress of a rank that is lost before training has begun.
    """
    limit_s = 2 * SILENCE_TIMEOUT_S + scenario.connect_timeout_s + CLOSE_TIMEOUT_S
    if not scenario.starting:
        limit_s += 1.25 * scenario.progress_timeout_s
    return limit_s + SLACK_S


OWN_ENDS = {"raise": "UserError", "exit": "SystemExit"}
"""Errors with which a program ends itself."""


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
    problems, through = judge_ends(scenario, outcome)
    if not through:
        return problems, None
    first = through[0]
    if first.rank == scenario.world_size:
        # Nothing tells which batches it took over.
        problems.append(Problem("ended", None, "only the rank that joined went on"))
        return problems, None
    problems += _check_alike(scenario, outcome, through)
    if not problems:
        problems += _check_bits(scenario, outcome, first, checkpoint)
    return problems, _pause_s(outcome, through)


def judge_ends(scenario: GoingOnScenario, outcome: Outcome) -> tuple[list[Problem], list[RankEnd]]:
    """Judge how the ranks of a run ended.

    Args:
        scenario: the faults.
        outcome: what came of them.

    Returns:
        Problems, and the ends of the ranks that are left and went on.
    """
    if not outcome.is_reached and scenario.asks_at is None:
        text = f"no rank reached the moment; errors: {outcome.errors}"
        return [Problem("not run", None, text)], []
    problems = [Problem("left over", None, one) for one in outcome.left_over]
    for end in outcome.ends:
        if end.rank not in scenario.silenced:
            problems += _check_end(scenario, end)
    left = [
        end for end in outcome.ends if end.rank in scenario.survivors and took_part(scenario, end)
    ]
    through = [end for end in left if end.code == 0 and end.is_done]
    for end in left:
        if end.error is None:
            continue
        if scenario.starting:
            problems += _check_culprit(scenario, end)
        said = f"{end.error['type']}: {end.error['text'][:400]}"
        if scenario.must_go_on and not _may_end(scenario, end):
            problems.append(Problem("ended", end.rank, said))
        elif through and not _may_end(scenario, end):
            others = [other.rank for other in through]
            problems.append(Problem("ended", end.rank, f"{others} went on; {said}"))
    return problems, through


def took_part(scenario: GoingOnScenario, end: RankEnd) -> bool:
    """Return whether a rank has trained: a rank that asks to join may never be let in."""
    return end.rank < scenario.world_size or bool(events_of(end, "moved"))


def _check_culprit(scenario: GoingOnScenario, end: RankEnd) -> Iterator[Problem]:
    """Check that a rank that is left blames no rank but those at fault."""
    assert end.error is not None
    blamed = named_ranks(OR_LINK.sub("", end.error["text"]))
    if end.error["culprit"] is not None:
        blamed.add(end.error["culprit"])
    at_fault = {victim for _, victims in scenario.faults for victim in victims}
    cut = any(fault in ("cut", *OF_LINKS) for fault, _ in scenario.faults)
    # One of two ranks cannot tell which is cut off.
    possible = at_fault | ({0, 1} if cut and scenario.world_size == 2 else set())
    if not blamed <= possible or not blamed:
        shown = f"(error.rank {end.error['culprit']}) {end.error['type']}"
        yield Problem("misnamed", end.rank, f"not the victim: {shown}: {end.error['text'][:400]}")


def _check_end(scenario: GoingOnScenario, end: RankEnd) -> Iterator[Problem]:
    if end.code is None:
        where = last_frames(end.traces)
        yield Problem("hang", end.rank, f"not ended after the bound; {where}")
    elif end.code < 0:
        yield Problem(
            "foreign error", end.rank, f"ended by signal {-end.code}: {end.errors[-300:]}"
        )
    elif end.error is None and not (end.code == 0 and end.is_done):
        yield Problem("silent", end.rank, f"ended with {end.code}: {end.errors[-300:]}")
    elif scenario.fault in OWN_ENDS and end.rank in scenario.victims:
        if end.error is None or end.error["type"] != OWN_ENDS[scenario.fault]:
            text = f"{end.error} in place of the program's own"
            yield Problem("misnamed", end.rank, text)
    elif end.error is not None and not end.error["ours"]:
        text = f"{end.error['type']}: {end.error['text'][:400]}"
        yield Problem("foreign error", end.rank, text)


def _may_end(scenario: GoingOnScenario, end: RankEnd) -> bool:
    """Return whether a rank that is left may end with an error when it has done all steps.

    Two ranks of a link that breaks in their last step cannot both know of each other's end.
    """
    silent = ("cut", "stop", *OF_LINKS)
    is_silent = any(fault in silent for fault, _ in scenario.faults)
    return is_silent and end.last_step == STEPS


def _check_alike(
    scenario: GoingOnScenario, outcome: Outcome, through: list[RankEnd]
) -> Iterator[Problem]:
    """Check that the ranks that are left did every step once, with the same bits."""
    first = through[0]
    changes = changes_of(first, scenario.world_size)
    in_force = events_of(first, "changed")
    join = next((change for change in changes if change.joined), None)
    for end in through:
        begun, own_changes, own_in_force = 0, changes, in_force
        if end.rank == scenario.world_size:
            # What came before is nothing to a rank that joins.
            if join is None:
                yield Problem("other bits", end.rank, "it has joined, and not the others' training")
                return
            begun, own_changes = join.step - 1, changes[changes.index(join) :]
            place = next(index for index, one in enumerate(in_force) if one["joined"])
            own_in_force = [{**in_force[place], "at": 0}, *in_force[place + 1 :]]
        steps = [event["step"] for event in events_of(end, "step")]
        if steps != list(range(begun + 1, STEPS + 1)):
            yield Problem("lost step", end.rank, f"it did steps {steps}")
        for index, (means, firsts) in enumerate(zip(_means(end), _means(first), strict=True)):
            count = STEPS - begun
            repeated, own = means[: len(means) - count], means[len(means) - count :]
            # A rank that joins repeats updates of the others before.
            if len(means) < count or (repeated and end.rank < scenario.world_size):
                text = f"parameter {index} had {len(means)} updates in {count} steps"
                yield Problem("lost step", end.rank, text)
            if own != firsts[begun:] or not set(repeated) <= set(firsts[:begun]):
                text = f"other means of parameter {index} than rank {first.rank}'s"
                yield Problem("other bits", end.rank, text)
        # A rank that has done all steps may be through before it is told of another change.
        agreed, own_changes = (
            [one for one in found if one.step <= STEPS]
            for found in (changes_of(end, scenario.world_size, own_changes[:1]), own_changes)
        )
        rows = {
            "digest": (events_of(end, "digest"), events_of(first, "digest")),
            "changed": (events_of(end, "changed"), own_in_force),
            "agreed": (agreed, own_changes),
        }
        for what, (found, expected) in rows.items():
            if found != expected:
                text = f"{what}: {found}, rank {first.rank}: {expected}"
                yield Problem("other bits", end.rank, text)
    there_once = {*range(scenario.world_size), *(join.members if join is not None else ())}
    gone = there_once - set(changes[-1].members if changes else there_once)
    yield from check_lost(scenario, outcome, first, gone, there_once)


def check_lost(
    scenario: GoingOnScenario,
    outcome: Outcome,
    first: RankEnd,
    gone: Set[int],
    there_once: Set[int],
) -> Iterator[Problem]:
    """Check that the ranks went on without the victims, and without no other one.

    Args:
        scenario: the faults.
        outcome: what came of them.
        first: of the ranks that went on.
        gone: ranks that these went on without.
        there_once: ranks that have trained.
    """
    # A fault may come when its victim has done its part of the last step, or before it has joined.
    there = [
        rank
        for rank in scenario.lost
        if rank in there_once and outcome.ends[rank].last_step < STEPS - 1
    ]
    if not set(there) <= gone <= set(scenario.lost):
        text = f"went on without {sorted(gone)}, lost are {sorted(scenario.lost)}"
        yield Problem("misnamed", first.rank, text)


def _check_bits(
    scenario: GoingOnScenario, outcome: Outcome, end: RankEnd, checkpoint: Path | None
) -> Iterator[Problem]:
    """Check a rank's means and losses against one process, and so the checkpoints, if any."""
    changes = changes_of(end, scenario.world_size)
    losses = [event["loss"] for event in events_of(end, "step")]
    try:
        digests = replay(
            scenario.world_size, changes, _means(end), end.rank, losses, scenario.local_size
        )
    except ReplayError as error:
        yield Problem("other bits", end.rank, str(error))
        return
    if checkpoint is not None:
        yield from _check_checkpoints(scenario, outcome, end, changes, checkpoint, digests)


def _check_checkpoints(
    scenario: GoingOnScenario,
    outcome: Outcome,
    end: RankEnd,
    changes: list[Change],
    checkpoint: Path,
    digests: dict[int, str],
) -> Iterator[Problem]:
    """Check that each is of the members of its step, that none is lost, and the last one's bits."""
    found = files_by_step(checkpoint)
    if lost := set(outcome.complete_before) - set(found):
        yield Problem("lost checkpoint", None, f"steps {sorted(lost)} were complete at the fault")
    in_force = [
        (one["at"], len(one["members"]), one["joined"]) for one in events_of(end, "changed")
    ]
    first, last = disturbed(scenario, outcome, end, changes)
    for step in range(CHECKPOINT_EVERY, STEPS + 1, CHECKPOINT_EVERY):
        writers = [scenario.world_size]
        for at, size, joined in in_force:
            # It is taken before a rank joins at the end of a step. Others may have been lost since.
            if at < step or (at == step and not joined):
                writers = [size] if at < step or scenario.asks_at is None else [*writers, size]
        if step in found and found[step] not in writers:
            text = f"step {step} has {found[step]} files, {writers} ranks were members"
            yield Problem("lost checkpoint", None, text)
        if step not in found and not first <= step <= last:
            said = [line for line in _lines(outcome) if "is not complete" in line]
            text = f"step {step} is not complete, it may lack those of {first} to {last}"
            text += f"; warnings: {said}"
            yield Problem("lost checkpoint", None, text)
    if found:
        step, digest = restore(checkpoint)
        if step != max(found) or digest != digests[step]:
            text = f"one rank restored step {step} of {sorted(found)}, with other bits"
            yield Problem("lost checkpoint", None, text)
    yield from unnamed_files(checkpoint)


def disturbed(
    scenario: GoingOnScenario, outcome: Outcome, end: RankEnd, changes: list[Change]
) -> tuple[int, int]:
    """Return the first and the last step whose checkpoints a lost rank may have kept incomplete.

    What a rank wrote was on the disk when it took the checkpoint after that; but what one that is
    cut off told the others then may not have come. Once all lost ranks are out of force the others
    write alone.
    """
    is_cut = any(fault in NETWORK_FAULTS for fault, _ in scenario.faults)
    reach = CHECKPOINT_EVERY * (2 if is_cut else 1)
    begin, join = STEPS + 1, next((change for change in changes if change.joined), None)
    for rank in scenario.lost:
        last_step = outcome.ends[rank].last_step
        if rank < scenario.world_size:
            begin = min(begin, last_step - reach + 1)
        elif join is not None:
            begin = min(begin, max(join.step, last_step - reach + 1))
    members = changes[-1].members if changes else range(scenario.world_size)
    in_force = events_of(end, "changed")
    if set(members) & set(scenario.lost) or (
        changes and not (in_force and len(in_force[-1]["members"]) == len(members))
    ):
        # One was lost so late that nobody has come to a step without it.
        return begin, STEPS
    return begin, max((one["at"] for one in in_force if one["lost"]), default=0)


def _lines(outcome: Outcome) -> list[str]:
    """Return what all ranks wrote to standard error."""
    return [line for end in outcome.ends for line in end.errors.splitlines()]


def events_of(end: RankEnd, name: str) -> list[dict[str, Any]]:
    return [event for event in end.events if event["event"] == name]


def changes_of(end: RankEnd, world_size: int, begun_with: Sequence[Change] = ()) -> list[Change]:
    """Return the changes of the members that a rank knew, by the ranks' numbers of the start.

    Args:
        end: of the rank.
        world_size: number of ranks at the start; the one that joins has the next number.
        begun_with: of the rank that joins, the change with which it was there.
    """
    joins = end.rank == world_size
    changes: list[Change] = []
    # Ranks are numbered anew when one joins.
    numbers = tuple(range(world_size))
    for event in end.events:
        if event["event"] == "agreed":
            members = tuple(numbers[number] for number in event["members"])
            changes.append(Change(members, event["step"]))
        elif event["event"] == "moved" and joins:
            changes, numbers = list(begun_with), begun_with[0].members
        elif event["event"] == "moved":
            members = tuple(numbers[number] for number in event["members"])
            while changes and changes[-1].members != members:
                # Of the old world, whose end it did not come into force before.
                changes.pop()
            numbers = (*members, world_size)
            changes.append(Change(numbers, event["step"], joined=True))
    return changes


def _means(end: RankEnd) -> list[list[int]]:
    """Return the checksums of the means that each parameter was updated with, in their order."""
    means: dict[int, list[int]] = {}
    for event in events_of(end, "mean"):
        means.setdefault(event["parameter"], []).append(event["crc"])
    return [means[index] for index in sorted(means)]


def _pause_s(outcome: Outcome, through: list[RankEnd]) -> float | None:
    """Return the longest time after the fault without a step, less a usual one."""
    pauses = []
    for end in through:
        times = [event["at_s"] for event in events_of(end, "step")]
        gaps = [(late - early, late) for early, late in pairwise(times)]
        after = [gap for gap, late in gaps if late > outcome.fault_s]
        before = [gap for gap, late in gaps if late <= outcome.fault_s]
        if after and before:
            pauses.append(max(after) - statistics.median(before))
    return max(pauses, default=None)
