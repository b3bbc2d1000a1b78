"""Schemes of layers by simulation: what is chosen, what is declined without leave, and why."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gradlane.planning.planner import candidates
from gradlane.planning.planner.candidates import TIE, Candidate, CandidateSimulator
from gradlane.planning.planner.coordinator import Coordinator
from gradlane.planning.planner.scheme_search import SchemeRestrictions, choose_schemes
from gradlane.planning.planner.search import search
from gradlane.planning.planner.simulations import predict_step_s
from gradlane.planning.simulation.costs import MachineCosts
from gradlane.planning.simulation.profiles import (
    Profile,
    ProfileTensor,
    synthetic_profile,
    write_profile,
)
from gradlane.training.options.options import Options, keywords_of
from gradlane.training.plans.plan import Plan, parse_plan
from gradlane.training.plans.settings import ClusterFacts, Settings
from tests.command_line import run

FLOPS = 200_000_000_000


def linear(name: str, shape: tuple[int, int], need_s: float, ready_s: float) -> ProfileTensor:
    return ProfileTensor(name, shape, "f32", need_s, ready_s, layer="Linear", rows=16)


NETWORK = Profile(
    "convolutions and two linear layers",
    16,
    0.1,
    0.3,
    (
        *(
            ProfileTensor(f"conv{i}.weight", (250, 1000), "f32", 0.02 * i, 0.3 - 0.03 * i)
            for i in range(4)
        ),
        linear("fc1.weight", (1000, 1000), 0.08, 0.14),
        ProfileTensor("fc1.bias", (1000,), "f32", 0.08, 0.14, layer="Linear", rows=16),
        linear("fc2.weight", (40, 1000), 0.09, 0.12),
    ),
    flops=FLOPS,
)
SLOW = ClusterFacts(workers=4, rate_bps=3e8)


def plan_of(profile: Profile, facts: ClusterFacts, **arguments: Any) -> Plan:
    return Coordinator(profile, facts, **arguments).plan()


def choice_of(plan: Plan, setting: str) -> dict[str, Any]:
    return dict(next(one for one in plan.choices if one["setting"] == setting))


def test_factors_are_chosen_where_they_shorten_the_step() -> None:
    plan = plan_of(NETWORK, SLOW, any_rounding=True)
    rows = {one.name: one for one in plan.tensors}
    assert rows["fc1.weight"].scheme == "sfb"
    for words in ("factors are 0.38 MB through a port where the gradient is 6.00 MB", "of rebuild"):
        assert words in rows["fc1.weight"].reason
    own = "ring" if plan.settings.strategy == "ring" else "ps"
    assert (rows["fc1.bias"].scheme, rows["conv0.weight"].scheme) == (own, own)
    assert "only the layer's matrix has factors" in rows["fc1.bias"].reason
    schemes = tuple((name[:3], "sfb") for name, row in rows.items() if row.scheme == "sfb")
    assert plan.prediction["step_s"] < 0.9 * plan.prediction["base_step_s"]
    assert "sfb" in choice_of(plan, "schemes")["value"].split("+")
    assert len(schemes) <= 2
    # The file holds it, and is the same plan when read.
    assert parse_plan(json.dumps(plan.to_json()), "p").digest == plan.digest


def test_without_leave_no_bit_changes_and_the_reason_says_what_that_costs() -> None:
    plan = plan_of(NETWORK, SLOW)
    assert {one.scheme for one in plan.tensors} == {"ps"}
    assert plan.settings.strategy != "ring"
    choice = choice_of(plan, "schemes")
    declined = {one["value"]: one for one in choice["declined"]}
    assert "ps+sfb" in declined
    assert all(one["step_s"] < choice["step_s"] * (1 - TIE) for one in declined.values())
    for words in ("declined: ", "in another order", "--any-rounding", "exact_order=False"):
        assert words in choice["reason"]
    restrictions = plan_of(NETWORK, SLOW, any_rounding=True)
    assert restrictions.prediction["step_s"] < plan.prediction["step_s"]


def test_a_ring_is_chosen_where_flows_would_meet_and_only_with_leave() -> None:
    """Measured on ResNet-50 at 4 Gbit/s: 326 ms round a ring, 348 ms with p3 (docs/ring.md)."""
    profile, facts = synthetic_profile("resnet50", 3.0), ClusterFacts(4, 4e8)
    # Of nothing that has factors.
    profile = replace(profile, tensors=tuple(replace(one, layer=None) for one in profile.tensors))
    exact = search(profile, facts, Settings())
    free = search(profile, facts, Settings(), any_rounding=True)
    assert exact is not None and free is not None
    assert (exact.settings.strategy, free.settings.strategy) == ("p3", "ring")
    assert free.step_s < 0.97 * exact.step_s
    declined = next(one for one in exact.choices if one.setting == "schemes").declined
    assert "ring" in {one.value for one in declined}


def test_of_two_ranks_there_is_one_order() -> None:
    """Round a ring of two the bits are those of servers, so no leave is needed."""
    assert SchemeRestrictions.of(ClusterFacts(2, 1e9), False, None).ring_obstacle == ""
    assert SchemeRestrictions.of(ClusterFacts(3, 1e9), False, None).ring_obstacle
    assert SchemeRestrictions.of(ClusterFacts(2, 1e9), False, None).factor_obstacle
    # A codec is another one on a ring.
    assert (
        "rounds otherwise"
        in SchemeRestrictions.of(ClusterFacts(2, 1e9), True, "qsgd:bits=8").ring_obstacle
    )
    assert search(NETWORK, SLOW, Settings(codec="qsgd:bits=8"), any_rounding=True) is not None


def test_a_session_that_is_a_ring_stays_one() -> None:
    found = search(NETWORK, SLOW, Settings("ring"))
    assert found is not None and found.settings.strategy == "ring"
    freed = search(NETWORK, replace(SLOW, latency_s=0.02), Settings("ring"), any_rounding=True)
    assert freed is not None
    # Six hops of 20 ms for each urgent slice are what a ring cannot have.
    assert freed.settings.strategy != "ring"


def test_rebuilding_that_costs_more_than_it_saves_is_declined() -> None:
    """An accelerator of a billion operations a second takes 0.1 s for fc1's other blocks."""
    slow = MachineCosts(operations_per_s=1e9)
    plan = plan_of(NETWORK, replace(SLOW, rate_bps=2e9), any_rounding=True, costs=slow)
    assert "sfb" not in {one.scheme for one in plan.tensors}
    fast = plan_of(NETWORK, SLOW, any_rounding=True)
    assert "sfb" in {one.scheme for one in fast.tensors}


def test_layers_whose_factors_do_not_help_go_back() -> None:
    simulator = CandidateSimulator(NETWORK, SLOW, 60.0, None, lambda: None)
    kept = Candidate(Settings())
    simulator.run([kept])
    found = choose_schemes(simulator, NETWORK, SLOW, kept, SchemeRestrictions())
    chosen = {name for name, scheme in found.best.schemes if scheme == "sfb"}
    assert "fc1" in chosen
    assert found.step_s == predict_step_s(
        NETWORK, SLOW, found.best.settings, schemes=found.best.schemes
    )
    for layer in ("fc1", "fc2"):
        reason = found.reasons[layer]
        assert reason.startswith("sfb: ") == (layer in chosen)
        assert "with them" in reason and "without" in reason


@pytest.mark.parametrize("update", ["worker", "server"])
def test_what_needs_servers_stays_on_servers(update: str) -> None:
    facts = replace(SLOW, update=update)
    base = Settings("kvstore") if update == "worker" else Settings()
    kept = Candidate(base)
    simulator = CandidateSimulator(NETWORK, facts, 60.0, None, lambda: None)
    simulator.run([kept])
    found = choose_schemes(simulator, NETWORK, facts, kept, SchemeRestrictions())
    assert (found.best, found.label, found.declined) == (kept, "ps", ())


def test_without_time_nothing_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(candidates, "time", SimpleNamespace(monotonic=lambda: now_s))
    kept = Candidate(Settings())
    simulator = CandidateSimulator(NETWORK, SLOW, 60.0, None, lambda: None)
    simulator.run([kept])
    assert simulator.step_s(kept) is not None
    now_s += 60.0
    found = choose_schemes(simulator, NETWORK, SLOW, kept, SchemeRestrictions())
    assert found.best == kept and found.skipped


def test_poseidons_plan_is_simulated() -> None:
    plan = plan_of(NETWORK, SLOW, rule="poseidon")
    figures = plan.prediction
    schemes = tuple(
        (one.name.removesuffix(".weight"), "sfb") for one in plan.tensors if one.scheme == "sfb"
    )
    assert figures["step_s"] == predict_step_s(NETWORK, SLOW, Settings(), schemes=schemes)
    assert figures["base_step_s"] == predict_step_s(NETWORK, SLOW, Settings())
    assert figures["bytes_step_s"] < figures["step_s"] < figures["base_step_s"]
    assert "Simulated, a step takes" in plan.summary
    quick = Coordinator(NETWORK, SLOW, rule="poseidon").plan(budget_s=1e-9)
    assert "step_s" not in quick.prediction
    assert "By bytes alone" in quick.summary


def test_sessions_say_whether_bits_may_change() -> None:
    assert Options().strategy.exact_order
    assert Options.of(**keywords_of(exact_order=False)).agreed()["exact_order"] is False


def test_the_command_asks_for_leave(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    profile, made = tmp_path / "profile.json", tmp_path / "plan.json"
    write_profile(NETWORK, profile)
    arguments = ("plan", str(profile), "--workers", "4", "--rate", "300mbit", "--json", str(made))
    status, out, _ = run(monkeypatch, capsys, *arguments)
    assert status == 0 and "declined" in out
    status, out, _ = run(monkeypatch, capsys, *arguments, "--any-rounding")
    assert status == 0
    rows = json.loads(made.read_text())["tensors"]
    assert "sfb" in {row["scheme"] for row in rows}
