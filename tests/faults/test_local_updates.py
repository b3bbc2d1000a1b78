"""Some faults of local updates that go on, and checks that the judge finds problems."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradlane.lab.cluster.privilege import why_no_namespaces
from tests.built import needs_core
from tests.faults.going_on.scenario import GoingOnScenario
from tests.faults.local_updates.campaign import LocalCampaign
from tests.faults.local_updates.scenario import FAULTS, STEPS, LocalScenario, draw
from tests.faults.local_updates.verdict import judge
from tests.faults.outcome import Outcome
from tests.faults.verdict import Problem
from tests.forked_programs import ForkedPrograms

SEEDS = (12, 28, 44, 2247)
"""Two losses, one that is stopped, and nodes of two; with a codec and without."""
REPLAYED = 12
_AT_ONCE = 4
Outcomes = dict[int, tuple[LocalScenario, Outcome]]


class Recording(LocalCampaign):
    """Keeps what came of each scenario."""

    outcomes: Outcomes

    def judge(
        self, scenario: GoingOnScenario, outcome: Outcome, checkpoint: Path
    ) -> tuple[list[Problem], float | None]:
        """Judge, and keep the outcome."""
        assert isinstance(scenario, LocalScenario)
        self.outcomes[scenario.seed] = scenario, copy.deepcopy(outcome)
        return super().judge(scenario, outcome, checkpoint)


@pytest.fixture(scope="module")
def outcomes(programs: ForkedPrograms) -> Outcomes:
    campaign = Recording(programs, why_no_namespaces())
    campaign.outcomes = {}
    with campaign:
        results = list(campaign.run_all(SEEDS, _AT_ONCE))
    wrong = [f"{one.scenario}: {problem}" for one in results for problem in one.problems]
    assert not wrong, "\n".join(wrong)
    return campaign.outcomes


def of_kind(outcome: Outcome, kind: str, rank: int | None = None) -> list[dict[str, Any]]:
    ends = outcome.ends if rank is None else [outcome.ends[rank]]
    return [one for end in ends for one in end.events if one["event"] == kind]


def left(outcome: Outcome) -> list[int]:
    return [end.rank for end in outcome.ends if end.is_done]


def move_otherwise(outcome: Outcome) -> None:
    for rank in left(outcome):
        of_kind(outcome, "moved", rank)[-1]["crc"] ^= 1


def move_otherwise_on_one(outcome: Outcome) -> None:
    of_kind(outcome, "moved", left(outcome)[0])[-1]["crc"] ^= 1


def change_before(outcome: Outcome) -> None:
    """Report members as in force from the start, before the means are over them."""
    for rank in left(outcome):
        events = outcome.ends[rank].events
        change = next(one for one in events if one["event"] == "changed")
        events.remove(change)
        events.insert(0, change)


def drop_step(outcome: Outcome) -> None:
    events = outcome.ends[left(outcome)[0]].events
    events.remove(next(one for one in events if one["event"] == "step"))


def close_otherwise(outcome: Outcome) -> None:
    for closed in of_kind(outcome, "closed"):
        closed["crcs"][0] ^= 1


def hang(outcome: Outcome) -> None:
    outcome.ends[left(outcome)[0]].code = None


@needs_core
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (move_otherwise, "other bits"),
        (move_otherwise_on_one, "other bits"),
        (change_before, "other bits"),
        (close_otherwise, "other bits"),
        (drop_step, "lost step"),
        (hang, "hang"),
    ],
)
def test_what_must_not_be_is_found(
    change: Callable[[Outcome], None], kind: str, outcomes: Outcomes
) -> None:
    scenario, outcome = copy.deepcopy(outcomes[REPLAYED])
    assert len(left(outcome)) > 1 and of_kind(outcome, "changed")
    assert not judge(scenario, outcome)
    change(outcome)
    assert kind in {problem.kind for problem in judge(scenario, outcome)}


def test_a_seed_draws_the_same_again_and_all_faults_are_drawn() -> None:
    drawn = [draw(seed) for seed in range(300)]
    assert drawn == [draw(seed) for seed in range(300)]
    assert {one.fault for one in drawn} == set(FAULTS)
    assert all(one.step <= STEPS for one in drawn)
