"""Some faults of each kind in real trainings, and checks that the judge finds problems."""

from __future__ import annotations

import pytest

from gradlane.lab.cluster.privilege import why_no_namespaces
from tests.built import needs_core
from tests.faults.campaign import Campaign
from tests.faults.outcome import Outcome, RankEnd
from tests.faults.scenario import FAULTS, MOMENTS, Scenario, draw
from tests.faults.verdict import judge_run, named_ranks
from tests.forked_programs import ForkedPrograms

SEEDS = (4785, 668, 3086, 1771, 3342, 255, 1097, 1496, 422, 634, 697, 948)
"""One of each moment, and in them every fault, in few kinds of trainings: each kind needs a run
without a fault."""
_AT_ONCE = 4


@pytest.mark.slow
@needs_core
def test_faults_of_every_kind(programs: ForkedPrograms) -> None:
    with Campaign(programs, why_no_namespaces()) as campaign:
        results = list(campaign.run_all(SEEDS, _AT_ONCE))
    wrong = [f"{one.scenario}: {problem}" for one in results for problem in one.problems]
    assert not wrong, "\n".join(wrong)


def test_the_seeds_have_every_kind() -> None:
    scenarios = [draw(seed) for seed in SEEDS]
    assert {one.fault for one in scenarios} == set(FAULTS)
    assert {one.moment for one in scenarios} == set(MOMENTS)


def test_a_seed_draws_the_same_scenario_again() -> None:
    for seed in range(300):
        assert draw(seed) == draw(seed)


def test_rank_0_is_hit_as_often_as_all_others_together() -> None:
    faults = [one for one in map(draw, range(2000)) if one.fault in ("kill", "stop", "raise")]
    share = sum(0 in one.victims for one in faults) / len(faults)
    assert 0.45 < share < 0.55


def drawn(fault: str) -> Scenario:
    """A fault in a step, between ranks that all train."""
    for seed in range(1000):
        one = draw(seed)
        if (one.fault, one.moment, one.training) == (fault, "forward", "p3") and one.world_size > 2:
            return one
    raise AssertionError(fault)


def ended(scenario: Scenario, text: str, **changes: object) -> Outcome:
    """What comes of a fault where every rank that is able to ends with one error."""
    error = {"event": "error", "type": "PeerLostError", "ours": True, "culprit": None, "text": text}
    ends = [RankEnd(rank, 1, events=[error | changes]) for rank in range(scenario.world_size)]
    return Outcome(ends, is_reached=True)


@pytest.mark.parametrize("fault", ["kill", "cut"])
def test_the_victim_and_nobody_else_is_to_be_named(fault: str) -> None:
    scenario = drawn(fault)
    victim = scenario.victims[0]
    other = next(rank for rank in range(scenario.world_size) if rank != victim)
    assert judge_run(scenario, ended(scenario, f"rank {victim} was lost", culprit=victim)) == []
    for text in ("the store is gone", f"rank {other} gave up: rank {victim} was lost"):
        problems = judge_run(scenario, ended(scenario, text))
        assert {problem.kind for problem in problems} == {"misnamed"}


def test_both_ends_of_a_partition_are_to_be_named_everywhere() -> None:
    scenario = drawn("partition")
    first, second = scenario.victims
    text = f"the link between rank {first} and rank {second} is cut"
    assert judge_run(scenario, ended(scenario, text)) == []
    problems = judge_run(scenario, ended(scenario, f"rank {second} was lost"))
    assert {problem.rank for problem in problems} == set(range(scenario.world_size))


def test_hangs_and_errors_of_others_are_found() -> None:
    scenario = drawn("kill")
    victim = scenario.victims[0]
    outcome = ended(scenario, f"rank {victim} was lost", ours=False)
    assert {one.kind for one in judge_run(scenario, outcome)} == {"foreign error"}
    for end in outcome.ends:
        end.code = None
    assert {one.kind for one in judge_run(scenario, outcome)} == {"hang"}
    for end in outcome.ends:
        end.code, end.events = 0, [{"event": "done"}]
    assert {one.kind for one in judge_run(scenario, outcome)} == {"silent"}


def test_a_fault_of_a_server_after_all_steps_is_none() -> None:
    """Like a fault of a rank that trains; a server has no steps to write down."""
    scenario = draw(710189)
    assert (scenario.fault, scenario.moment, scenario.training) == (
        "cut",
        "forward",
        "separate server",
    )
    assert scenario.victims == (scenario.workers,)
    last: list[dict[str, object]] = [{"event": "step", "step": scenario.last_step}]
    done: list[dict[str, object]] = [{"event": "done"}]
    ends = [
        RankEnd(rank, 0, events=[*(last if rank < scenario.workers else []), *done])
        for rank in range(scenario.world_size)
    ]
    assert judge_run(scenario, Outcome(ends, is_reached=True)) == []
    ends[0].events = done
    problems = judge_run(scenario, Outcome(ends, is_reached=True))
    assert {problem.kind for problem in problems} == {"silent"}


def test_who_reports_is_not_blamed() -> None:
    for text, named in {
        "rank 2 was lost: silent (reported by rank 1) (noticed while waiting)": {2},
        "rank 0 could not connect: rank 0 is not connected to rank 2": {2},
        "rank 1 waited 8 s for ranks 0, 2 and 3": {0, 2, 3},
        "rank 1: the rendezvous store, which rank 0 keeps, does not answer": {0},
        "rank 1 gave up: rank 1: the store, which rank 0 keeps, does not answer": {0},
        "node 0 gave up: rank 1 gave up: the store, which rank 0 keeps, does not answer": {0},
        "rank 2 gave up: rank 1 was lost": {1, 2},
        "rank 1 was lost; in step 3, 2 tensors were outstanding: a, b; waiting for rank 0; x": {1},
    }.items():
        assert named_ranks(text) == named, text
