"""Some faults at the start, of stores and of options, and checks that the judges find problems."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gradlane.lab.cluster.privilege import why_no_namespaces
from gradlane.training.options.option_fields import agreed_options
from gradlane.training.options.options import Options, keywords_of
from tests.built import needs_core
from tests.faults.campaign import Campaign
from tests.faults.going_on import starting
from tests.faults.going_on.campaign import StartingCampaign
from tests.faults.going_on.verdict import judge as judge_start
from tests.faults.on_options import campaign as options_campaign
from tests.faults.on_options import scenario as on_options
from tests.faults.on_options.campaign import OptionsCampaign
from tests.faults.on_store import campaign as store_campaign
from tests.faults.on_store import scenario as on_store
from tests.faults.on_store.campaign import StoreCampaign
from tests.faults.outcome import Outcome, RankEnd
from tests.forked_programs import ForkedPrograms

_AT_ONCE = 4
SEEDS: dict[type[Campaign], tuple[int, ...]] = {
    StartingCampaign: (9, 30, 43, 149, 182),
    StoreCampaign: (1, 2, 3, 10, 11),
    OptionsCampaign: (2, 4, 8, 13, 19, 23),
}


@needs_core
@pytest.mark.parametrize("kind", SEEDS, ids=lambda kind: kind.__name__)
def test_seeds(kind: type[Campaign], programs: ForkedPrograms) -> None:
    with kind(programs, why_no_namespaces()) as campaign:
        results = list(campaign.run_all(SEEDS[kind], _AT_ONCE))
    wrong = [f"{one.scenario}: {problem}" for one in results for problem in one.problems]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", [starting, on_store, on_options])
def test_a_seed_draws_the_same_again_and_all_faults_are_drawn(module: Any) -> None:
    drawn = [module.draw(seed) for seed in range(300)]
    assert drawn == [module.draw(seed) for seed in range(300)]
    assert {one.fault for one in drawn} == set(module.FAULTS)


def test_no_option_that_ranks_compare_is_drawn_as_one_that_may_differ() -> None:
    assert not on_options.APART.keys() & agreed_options(Options()).keys()


def test_a_rank_that_differs_has_options_that_go_together() -> None:
    """Else its own `init()` refuses them, and nothing is compared."""
    drawn = [one for one in map(on_options.draw, range(2000)) if one.fault == "must be alike"]
    assert {name for one in drawn for name in one.differing} == on_options.ALIKE.keys()
    for one in drawn:
        for given in one.own.values():
            of_init = {name: value for name, value in given.items() if name != "buffers"}
            Options.of(**keywords_of(checkpoint_folder="saved", **of_init))


def error(text: str, **changes: Any) -> dict[str, Any]:
    event = {"event": "error", "type": "PeerLostError", "ours": True, "culprit": None, "text": text}
    return event | changes


def ended(*events: dict[str, Any], code: int | None = 1, count: int = 3) -> Outcome:
    """What comes of a run in which all ranks end alike."""
    ends = [RankEnd(rank, code, events=list(events)) for rank in range(count)]
    return Outcome(ends, is_reached=True, fault_s=0.0)


def through(step: int, *digests: str) -> Outcome:
    """What comes of a run that all ranks come through."""
    outcome = ended(code=0, count=len(digests))
    for end, digest in zip(outcome.ends, digests, strict=True):
        steps = [{"event": "step", "step": number} for number in range(1, step + 1)]
        last = {"event": "digest", "step": step, "digest": digest}
        end.events = [*steps, last, {"event": "done"}]
    return outcome


def kinds(problems: list[Any]) -> set[str]:
    return {problem.kind for problem in problems}


def test_at_the_start_nobody_else_is_to_be_blamed_and_all_or_none_go_on() -> None:
    drawn = next(
        one
        for one in map(starting.draw, range(300))
        if (one.fault, one.moment, one.world_size, one.second) == ("kill", "spreading", 3, None)
    )
    scenario = replace(drawn, victims=(1,), announcer=1)
    named = ended(error("rank 1 was lost: closed the connection", culprit=1))
    assert judge_start(scenario, named, None) == ([], None)
    for text, culprit in (("rank 0 was lost", None), ("rank 1 was lost", 2), ("failed", None)):
        problems, _ = judge_start(scenario, ended(error(text, culprit=culprit)), None)
        assert kinds(problems) == {"misnamed"}
    problems, _ = judge_start(scenario, ended(code=None), None)
    assert kinds(problems) == {"hang"}
    raised = replace(scenario, fault="raise")
    problems, _ = judge_start(raised, named, None)
    assert kinds(problems) == {"misnamed"}


def test_a_store_is_to_be_named_and_no_rank_and_nobody_splits() -> None:
    drawn = next(one for one in map(on_store.draw, range(300)) if one.fault == "kill")
    scenario = replace(drawn, world_size=3, moment="restore", going_on=False)
    lost = ended(error("the rendezvous store does not answer"))
    assert store_campaign.judge(scenario, lost) == []
    assert kinds(store_campaign.judge(scenario, ended(error("rank 1 was lost")))) == {"misnamed"}
    assert kinds(store_campaign.judge(scenario, ended(code=None))) == {"hang"}
    foreign = ended(error("recv failed", ours=False))
    assert kinds(store_campaign.judge(scenario, foreign)) == {"foreign error"}
    steps = scenario.last_step
    assert store_campaign.judge(scenario, through(steps, "a", "a", "a")) == []
    assert kinds(store_campaign.judge(scenario, through(steps, "a", "b", "a"))) == {"split"}
    harmless = replace(scenario, fault="hold a byte")
    assert kinds(store_campaign.judge(harmless, lost)) == {"ended"}
    forged = replace(scenario, fault="replace keys", killed=None)
    refused = ended(error("rank 0 gave up: rank 0 refuses a value in the store", culprit=0))
    assert store_campaign.judge(forged, refused) == []
    waited = ended(error("no progress for 16 s: waiting for rank 0", culprit=0))
    assert kinds(store_campaign.judge(forged, waited)) == {"misnamed"}


def test_options_that_differ_are_named_to_all_soon_or_are_none() -> None:
    draws = map(on_options.draw, range(300))
    scenario = next(one for one in draws if one.fault == "must be alike" and one.world_size == 3)
    (name,) = scenario.differing
    told = ended(error(f"ranks differ in {name}"))
    assert options_campaign.judge(scenario, told) == []
    assert kinds(options_campaign.judge(scenario, ended(error("rank 1 waited")))) == {"unnamed"}
    for end in told.ends:
        end.after_s = 100.0
    assert kinds(options_campaign.judge(scenario, told)) == {"late"}
    assert options_campaign.judge(scenario, through(8, "a", "a", "a")) == []
    problems = options_campaign.judge(scenario, through(8, "a", "a", "b"))
    assert kinds(problems) == {"other bits"}
    apart = replace(scenario, fault="may be apart")
    assert "ended" in kinds(options_campaign.judge(apart, ended(error(f"{name} differs"))))
    half = through(8, "a", "a", "a")
    half.ends[0] = RankEnd(0, 1, events=[error(f"ranks differ in {name}")])
    assert kinds(options_campaign.judge(scenario, half)) == {"split"}


@pytest.mark.parametrize("name", on_options.MISTAKES)
def test_mistakes_are_refused_by_init_and_not_before_it(name: str) -> None:
    """A rank that never calls it is waited for as one that is still to come."""
    for value in on_options.MISTAKES[name]:
        assert keywords_of(**{name: value})
