"""Some faults of trainings that go on, and checks that the judge finds problems."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn

from gradlane.lab.cluster.privilege import why_no_namespaces
from tests.built import needs_core
from tests.faults.going_on.campaign import GoingOnCampaign
from tests.faults.going_on.rank_program import Batches, checksum, loss_of, model_of
from tests.faults.going_on.scenario import (
    CHECKPOINT_EVERY,
    FAULTS,
    STEPS,
    GoingOnScenario,
    draw,
)
from tests.faults.going_on.verdict import changes_of, disturbed, judge
from tests.faults.outcome import Outcome, RankEnd
from tests.faults.scenario import JOINING
from tests.forked_programs import ForkedPrograms

SEEDS = (60, 21, 19, 15, 16, 13, 387, 384, 26)
_AT_ONCE = 4
LOST_IN = 5
LOST = 1
RANKS = 3


@pytest.mark.slow
@needs_core
def test_trainings_go_on(programs: ForkedPrograms) -> None:
    with GoingOnCampaign(programs, why_no_namespaces()) as campaign:
        results = list(campaign.run_all(SEEDS, _AT_ONCE))
    wrong = [f"{one.scenario}: {problem}" for one in results for problem in one.problems]
    assert not wrong, "\n".join(wrong)


def test_the_seeds_have_every_kind() -> None:
    scenarios = [draw(seed) for seed in SEEDS]
    assert {one.fault for one in scenarios} == set(FAULTS)
    assert any(one.second for one in scenarios) and any(one.loads for one in scenarios)
    assert {"checkpoint", "close", *JOINING} <= {one.moment for one in scenarios}
    joined = [one for one in scenarios if one.asks_at is not None]
    assert {one.world_size in one.victims for one in joined} == {True, False}


def test_a_seed_draws_the_same_scenario_again() -> None:
    for seed in range(300):
        assert draw(seed) == draw(seed)


def test_rank_0_is_hit_as_often_as_all_others_together() -> None:
    drawn = map(draw, range(2000))
    # But for the rank that joins.
    faults = [
        one for one in drawn if one.fault != "partition" and max(one.victims) < one.world_size
    ]
    assert 0.45 < sum(0 in one.victims for one in faults) / len(faults) < 0.55


def event(name: str, **fields: Any) -> dict[str, Any]:
    return {"event": name, **fields}


def trained(joins_in: int = STEPS + 1) -> Outcome:
    """What comes of a rank that is lost in the middle of a step, with some means whole before.

    Args:
        joins_in: the first step of one more rank.
    """
    model, optimizer = model_of(nn.Identity())
    parameters = list(model.parameters())
    left = [rank for rank in range(RANKS) if rank != LOST]
    events: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(RANKS + 1)}
    for step in range(1, STEPS + 1):
        if step == joins_in:
            for rank in (*left, RANKS):
                # Ranks 0 and 2 are 0 and 1 from now on.
                at = step - 1 if rank < RANKS else 0
                moved = event("changed", members=[0, 1, 2], at=at, joined=[2], lost=[])
                events[rank] += [event("moved", members=list(left), step=step), moved]
            left.append(RANKS)
        gradients: list[list[Tensor]] = []
        for rank in range(RANKS + 1):
            loss = loss_of(model, Batches(rank, STEPS)[step - 1])
            loss.backward()  # type: ignore[no-untyped-call]
            gradients.append([one.grad for one in parameters if one.grad is not None])
            optimizer.zero_grad()
            if rank in left or (rank == LOST and step < LOST_IN):
                events[rank].append(event("step", step=step, loss=loss.item(), at_s=0.1 * step))
        for index, parameter in enumerate(parameters):
            is_whole = step < LOST_IN or (step == LOST_IN and index < 2)
            members = range(RANKS) if is_whole else left
            first, *rest = (gradients[rank][index] for rank in members)
            parameter.grad = sum(rest, first) / len(members)
            for rank in left:
                events[rank].append(event("mean", parameter=index, crc=checksum(parameter.grad)))
        optimizer.step()
        optimizer.zero_grad()
        if step == LOST_IN + 1:
            for rank in left:
                agreed = event("agreed", members=list(left), step=LOST_IN + 1)
                changed = event("changed", members=list(left), at=step, joined=[], lost=[LOST])
                events[rank] += [agreed, changed]
    for rank in left:
        events[rank] += [event("digest", step=STEPS, digest=""), event("done")]
    count = RANKS + (joins_in <= STEPS)
    ends = [
        RankEnd(rank, None if rank == LOST else 0, events=events[rank]) for rank in range(count)
    ]
    return Outcome(ends, is_reached=True, fault_s=0.1 * LOST_IN - 0.05)


def scenario(asks_at: int | None = None) -> GoingOnScenario:
    """A rank that is killed in the middle of a step."""
    one = next(one for one in map(draw, range(1000)) if one.fault == "kill" and one.second is None)
    changes: dict[str, Any] = {"moment": "waiting", "step": LOST_IN, "asks_at": asks_at}
    return replace(one, world_size=RANKS, victims=(LOST,), **changes)


def drop_step(outcome: Outcome) -> None:
    events = outcome.ends[0].events
    events.remove(next(one for one in events if one["event"] == "step" and one["step"] == 9))


def apply_twice(outcome: Outcome) -> None:
    for end in outcome.ends:
        means = [one for one in end.events if one["event"] == "mean"]
        end.events += means[-1:]


def change_mean(outcome: Outcome) -> None:
    for end in outcome.ends:
        for one in [one for one in end.events if one["event"] == "mean"][-1:]:
            one["crc"] ^= 1


def keep_the_lost(outcome: Outcome) -> None:
    """Report the rank lost a step later than its means show."""
    for end in outcome.ends:
        for one in end.events:
            if one["event"] == "agreed":
                one["step"] += 2


def differ(outcome: Outcome) -> None:
    next(one for one in outcome.ends[2].events if one["event"] == "digest")["digest"] = "x"


def leave_out_another(outcome: Outcome) -> None:
    for end in outcome.ends:
        for one in end.events:
            if one["event"] in ("agreed", "changed"):
                one["members"] = [0]


def hang(outcome: Outcome) -> None:
    outcome.ends[0].code = None


def end_by_name(outcome: Outcome) -> None:
    error = {"event": "error", "type": "PeerLostError", "ours": True, "culprit": 1, "text": "lost"}
    outcome.ends[0].code = 1
    outcome.ends[0].events[-1] = error


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (drop_step, "lost step"),
        (apply_twice, "lost step"),
        (change_mean, "other bits"),
        (keep_the_lost, "other bits"),
        (differ, "other bits"),
        (leave_out_another, "misnamed"),
        (hang, "hang"),
        (end_by_name, "ended"),
    ],
)
def test_what_must_not_be_is_found(change: Callable[[Outcome], None], kind: str) -> None:
    outcome = trained()
    problems, pause_s = judge(scenario(), copy.deepcopy(outcome), None)
    assert not problems and pause_s == pytest.approx(0.0, abs=1e-6)
    change(outcome)
    problems, _ = judge(scenario(), outcome, None)
    assert kind in {problem.kind for problem in problems}


def drop_first_step(outcome: Outcome) -> None:
    """Have the rank that joined begin a step later."""
    events = outcome.ends[RANKS].events
    events.remove(next(one for one in events if one["event"] == "step"))


def take_another_mean(outcome: Outcome) -> None:
    next(one for one in outcome.ends[RANKS].events if one["event"] == "mean")["crc"] ^= 1


def join_later(outcome: Outcome) -> None:
    """Report that the rank joined a step later than the means show."""
    for end in outcome.ends:
        for one in end.events:
            if one["event"] == "moved":
                one["step"] += 1
    drop_first_step(outcome)
    joiner = outcome.ends[RANKS].events
    for _ in {one["parameter"] for one in joiner if one["event"] == "mean"}:
        joiner.remove(next(one for one in joiner if one["event"] == "mean"))


def join_nothing(outcome: Outcome) -> None:
    for end in outcome.ends[:RANKS]:
        end.events = [one for one in end.events if one["event"] != "moved"]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (drop_first_step, "lost step"),
        (take_another_mean, "other bits"),
        (join_later, "other bits"),
        (join_nothing, "other bits"),
        (hang, "hang"),
    ],
)
def test_what_must_not_be_is_found_where_a_rank_joins(
    change: Callable[[Outcome], None], kind: str
) -> None:
    outcome = trained(joins_in=LOST_IN + 7)
    problems, _ = judge(scenario(asks_at=LOST_IN), copy.deepcopy(outcome), None)
    assert not problems
    change(outcome)
    problems, _ = judge(scenario(asks_at=LOST_IN), outcome, None)
    assert kind in {problem.kind for problem in problems}


def test_a_checkpoint_may_lack_the_file_of_a_rank_that_is_not_out_of_force() -> None:
    """Its earlier files were on the disk, and later the others write without it."""
    outcome = trained()
    end = outcome.ends[0]
    begin = LOST_IN - 1 - CHECKPOINT_EVERY + 1
    found = disturbed(scenario(), outcome, end, changes_of(end, RANKS))
    assert found == (begin, LOST_IN + 1)
    # Lost in the last steps, it is a member to the end.
    end.events = [one for one in end.events if one["event"] != "changed"]
    assert disturbed(scenario(), outcome, end, changes_of(end, RANKS)) == (begin, STEPS)
    end.events = [one for one in end.events if one["event"] != "agreed"]
    assert disturbed(scenario(), outcome, end, changes_of(end, RANKS)) == (begin, STEPS)
