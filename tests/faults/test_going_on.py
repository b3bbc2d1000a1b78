"""Some faults of trainings that go on, and that the judgement finds what it is for."""

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
from tests.faults.going_on.scenario import FAULTS, STEPS, GoingOnScenario, draw
from tests.faults.going_on.verdict import judge
from tests.faults.outcome import Outcome, RankEnd
from tests.forked_programs import ForkedPrograms

SEEDS = (60, 78, 21, 38, 19, 15)
_AT_ONCE = 4
LOST_IN = 5
LOST = 1
RANKS = 3


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
    assert {"checkpoint", "close"} <= {one.moment for one in scenarios}


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


def trained() -> Outcome:
    """What comes of a rank that is lost in the middle of a step, with some means whole before."""
    model, optimizer = model_of(nn.Identity())
    parameters = list(model.parameters())
    survivors = [rank for rank in range(RANKS) if rank != LOST]
    events: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(RANKS)}
    for step in range(1, STEPS + 1):
        gradients: list[list[Tensor]] = []
        for rank in range(RANKS):
            loss = loss_of(model, Batches(rank, STEPS)[step - 1])
            loss.backward()  # type: ignore[no-untyped-call]
            gradients.append([one.grad for one in parameters if one.grad is not None])
            optimizer.zero_grad()
            row = {"event": "step", "step": step, "loss": loss.item(), "at_s": 0.1 * step}
            events[rank].append(row)
        for index, parameter in enumerate(parameters):
            is_whole = step < LOST_IN or (step == LOST_IN and index < 2)
            members = range(RANKS) if is_whole else survivors
            first, *rest = (gradients[rank][index] for rank in members)
            total = sum(rest, first)
            parameter.grad = total / len(members)
            for rank in survivors:
                mean = {"event": "mean", "parameter": index, "crc": checksum(parameter.grad)}
                events[rank].append(mean)
        optimizer.step()
        optimizer.zero_grad()
    for rank in survivors:
        agreed: dict[str, Any] = {"event": "agreed", "members": survivors, "step": LOST_IN + 1}
        changed: dict[str, Any] = {"event": "changed", "members": survivors, "at": LOST_IN + 1}
        last: list[dict[str, Any]] = [
            {"event": "digest", "step": STEPS, "digest": ""},
            {"event": "done"},
        ]
        events[rank] += [agreed, changed, *last]
    codes = {rank: 0 if rank in survivors else None for rank in range(RANKS)}
    ends = [RankEnd(rank, codes[rank], events=events[rank]) for rank in range(RANKS)]
    return Outcome(ends, is_reached=True, fault_s=0.1 * LOST_IN - 0.05)


def scenario() -> GoingOnScenario:
    """A rank that is killed in the middle of a step."""
    one = next(one for one in map(draw, range(1000)) if one.fault == "kill" and one.second is None)
    changes: dict[str, Any] = {"moment": "waiting", "step": LOST_IN, "asks_at": None}
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
    """Have it said that the rank was lost a step later than its means tell."""
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
                one["members"] = [2]


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
