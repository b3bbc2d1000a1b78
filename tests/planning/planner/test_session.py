"""Plans in sessions: who decides, what is refused, and that no plan changes a bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradlane.training.plans.plan import Plan, PlannedTensor
from gradlane.training.plans.settings import LEARNING_STEPS, ClusterFacts, Settings
from tests.built import needs_core
from tests.planning.planner.session_programs import OTHER
from tests.training.model.pool import FirstRanks

pytestmark = needs_core

FACTS = ClusterFacts(3, 1e9)
MODULE = "tests.planning.planner.session_programs"


def train(pool: FirstRanks, runs: list[dict[str, Any]], **arguments: Any) -> list[list[Any]]:
    """Return for each run what its ranks came to."""
    by_rank = pool.run(f"{MODULE}:train", runs=runs, **arguments)
    return [list(results) for results in zip(*by_rank, strict=True)]


SWITCHED = {"plan": "auto", "decided": True}


@pytest.mark.parametrize(
    ("model", "optimizer", "options"),
    [
        ("cnn", "sgd", {"cosine": True}),
        ("cnn", "sgd", {"buffers": "local"}),
        ("cnn", "sgd", {"buffers": "average", "micro_batches": 2}),
        ("transformer", "adamw", {"strategy": "wfbp"}),
        ("attention", "sgd", {"update": "server"}),
        ("bf16", "adamw", {"update": "server"}),
        ("awkward", "adamw", {"check_every": 1}),
    ],
)
def test_a_switch_changes_no_bit(
    pool: FirstRanks, model: str, optimizer: str, options: dict[str, Any]
) -> None:
    """Parameters after every step, the optimizer's state and each rank's own buffers."""
    steps = LEARNING_STEPS + 4
    plain, switched = train(
        pool,
        [{**options}, {**options, **SWITCHED}],
        model_name=model,
        steps=steps,
        optimizer_name=optimizer,
    )
    for without, under in zip(plain, switched, strict=True):
        assert under["digests"] == without["digests"]
        assert under["state"] == without["state"]
        assert under["buffers"] == without["buffers"]
        before = Settings(strategy=options.get("strategy", "p3")).to_json()
        assert under["settings"][: LEARNING_STEPS - 1] == [before] * (LEARNING_STEPS - 1)
        assert under["settings"][LEARNING_STEPS - 1 :] == [OTHER.to_json()] * 5
        assert without["plan"] is None
    assert len({one["digests"][-1] for one in switched}) == 1
    if options.get("buffers") == "local":
        assert len({tuple(one["buffers"]) for one in switched}) == 3


def test_with_leave_schemes_switch_in_the_middle_of_a_training(pool: FirstRanks) -> None:
    """Factors and a ring from one step to the next: the same numbers in other roundings."""
    steps = LEARNING_STEPS + 4
    mixed = {"plan": "auto", "mixed": True, "exact_order": False}
    plain, switched = train(pool, [{}, mixed], model_name="cnn", steps=steps)
    assert len({str(one["digests"]) for one in switched}) == 1
    schemes = switched[0]["schemes"]
    assert set(schemes.values()) == {"sfb", "ring", "ps"}
    assert set(plain[0]["schemes"].values()) == {"ps"}
    learnt = LEARNING_STEPS
    assert switched[0]["digests"][: learnt - 1] == plain[0]["digests"][: learnt - 1]
    for one, other in zip(plain[0]["values"], switched[0]["values"], strict=True):
        assert other == pytest.approx(one, rel=1e-3, abs=1e-5)


def test_a_session_of_factors_keeps_them_without_leave(pool: FirstRanks) -> None:
    """The plan would also add factors, which add up in another order."""
    arguments = {"model_name": "cnn", "steps": LEARNING_STEPS + 2}
    plain, auto = train(pool, [{"scheme": "sfb"}, {"scheme": "sfb", "plan": "auto"}], **arguments)
    assert "sfb" in auto[0]["schemes"].values()
    assert auto[0]["schemes"] == plain[0]["schemes"]
    assert [one["digests"] for one in auto] == [one["digests"] for one in plain]


def test_whatever_is_found_no_bit_changes(pool: FirstRanks) -> None:
    steps = LEARNING_STEPS + 2
    plain, auto = train(pool, [{}, {"plan": "auto"}], model_name="wide", steps=steps)
    assert [one["digests"] for one in auto] == [one["digests"] for one in plain]
    assert len({str(one["plan"]) for one in auto}) == 1
    plan = auto[0]["plan"]
    assert plan["cluster"]["source"] == "probed"
    assert plan["cluster"]["workers"] == 3
    assert plan["cluster"]["rate_bps"] > 0.0
    assert 0.0 < plan["prediction"]["compute_s"] < 60.0
    assert plan["prediction"]["step_s"] <= plan["prediction"]["base_step_s"]
    assert [row["name"] for row in plan["tensors"]] == [
        "first.weight",
        "first.bias",
        "last.weight",
        "last.bias",
    ]
    assert auto[0]["settings"][-1] == plan["settings"]


def test_inside_join_nothing_is_switched_and_after_it_all_are(pool: FirstRanks) -> None:
    plain, switched = train(
        pool, [{"joins": True}, {"joins": True, **SWITCHED}], model_name="cnn", steps=LEARNING_STEPS
    )
    assert [one["digests"] for one in switched] == [one["digests"] for one in plain]
    for one in switched:
        *inside, first_after, second_after = one["settings"]
        assert inside == [Settings().to_json()] * len(inside)
        assert [first_after, second_after] == [OTHER.to_json()] * 2


def test_a_model_that_cannot_be_recorded_keeps_its_settings_with_a_reason(pool: FirstRanks) -> None:
    (results,) = train(
        pool,
        [{"plan": "auto", "unrecorded": True}],
        model_name="cnn",
        steps=LEARNING_STEPS + 1,
    )
    for one in results:
        assert one["settings"][-1] == Settings().to_json()
        assert one["plan"]["summary"].endswith("the model's parameters are on cuda:0, cuda:1.")


def test_one_rank_alone_learns_nothing(pool: FirstRanks) -> None:
    (results,) = pool.run(
        f"{MODULE}:train", ranks=1, runs=[{"plan": "auto"}], model_name="cnn", steps=9
    )
    assert results[0]["plan"] is None


def plan_of(settings: Settings, sizes: dict[str, int]) -> Plan:
    tensors = [PlannedTensor(name, size, "ps", "raw", 1, "") for name, size in sizes.items()]
    return Plan("linear", FACTS, "given", settings, tuple(tensors))


LINEAR = {"weight": 6, "bias": 2}


def test_a_plan_that_was_given_is_in_force(pool: FirstRanks, tmp_path: Path) -> None:
    """Only rank 0 needs the file; where others have it, or hold the plan, it is the same."""
    plan = plan_of(OTHER, LINEAR)
    path, missing = tmp_path / "plan.json", tmp_path / "elsewhere.json"
    plan.save(path)
    for plans in ([str(path)] * 3, [path, missing, missing], [plan, path, plan]):
        found = pool.run(f"{MODULE}:given", plans=plans, sizes=[3, 3, 3])
        assert found == [str(OTHER.to_json())] * 3


def test_different_plans_are_refused_on_every_rank_by_name(
    pool: FirstRanks, tmp_path: Path
) -> None:
    one, other = plan_of(OTHER, LINEAR), plan_of(Settings("wfbp"), LINEAR)
    path = tmp_path / "other.json"
    other.save(path)
    for plans, words in [
        ([one, one, other], [f"rank 0 was given plan {one.digest}", f"rank 2 plan {other.digest}"]),
        ([one, path, one], [one.digest, f"rank 1 plan {other.digest} ({path})"]),
        ([None, None, one], ["rank 0 was given no plan", f"rank 2 plan {one.digest}"]),
        ([one, None, None], [f"rank 0 was given plan {one.digest}", "rank 1 no plan"]),
        (["auto", None, "auto"], ["rank 0 was given auto", "rank 1 no plan"]),
        ([one, "auto", one], [one.digest, "rank 1 auto"]),
    ]:
        for error in pool.run(f"{MODULE}:given", plans=plans, sizes=[3, 3, 3]):
            assert error.startswith("RanksDifferError: ")
            assert all(word in error for word in words), error


def test_plans_that_cannot_be_used_are_refused_on_every_rank(
    pool: FirstRanks, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"format": "gradlane-plan", "version": 1}')
    foreign = plan_of(OTHER, {"conv.weight": 9})
    for plans, words in [
        ([tmp_path / "nowhere.json"] * 3, "nowhere.json: No such file"),
        ([broken] * 3, "missing"),
        ([foreign] * 3, "is for another model (linear): it has 'conv.weight'"),
        ([plan_of(OTHER, LINEAR), broken, plan_of(OTHER, LINEAR)], "broken.json"),
    ]:
        errors = pool.run(f"{MODULE}:given", plans=plans, sizes=[3, 3, 3])
        for error in errors:
            assert words in error
    assert any(error.startswith("PlanError") for error in errors)


def test_a_model_is_prepared_again_while_it_learns(pool: FirstRanks, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    Plan("any", FACTS, "given", OTHER).save(path)
    for result in pool.run(f"{MODULE}:prepare_again", ranks=2, path=str(path)):
        assert result["seen"] == [Settings().to_json()] * 2 + [OTHER.to_json()]
        # The hooks of the recorders are gone with what they recorded.
        assert result["hooks"] == 1
        assert result["left"] == 0


def test_rank_0_logs_each_choice_with_its_reason(pool: FirstRanks) -> None:
    first, *others = pool.run(f"{MODULE}:logged")
    assert others == [[], []]
    for setting in ("strategy", "frame_bytes", "send_buffer_bytes"):
        assert any(line.startswith(f"plan: {setting} ") for line in first), first
    assert len(first[-1]) > 20
