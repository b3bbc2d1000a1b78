"""Several ranks on a node, simulated, described and planned for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradlane.planning.advice.advice import advise, required_links, text_of_required_links
from gradlane.planning.advice.causes import Cause, find_cause
from gradlane.planning.advice.variants import Variants
from gradlane.planning.planner.coordinator import Coordinator
from gradlane.planning.schemes.layers import layers_of
from gradlane.planning.simulation.bound import port_bytes
from gradlane.planning.simulation.grid import SimulatedRow, clusters_of, evaluate
from gradlane.planning.simulation.lists import Grid
from gradlane.planning.simulation.profiles import Profile, synthetic_profile
from gradlane.planning.simulation.scenarios import Cluster, scenario_of
from gradlane.training.plans.plan import Plan, parse_plan
from gradlane.training.plans.settings import ClusterFacts, Settings
from tests.command_line import run

BASE = Cluster(workers=8, rate_bps=4e9, ranks_per_node=4)
STRATEGIES = ("p3", "hierarchical", "hierarchical-shared")
HEADERS = 0.01
"""Of frames, over their bytes at most."""


@pytest.fixture(scope="module")
def profile() -> Profile:
    return synthetic_profile("resnet50", 0.3)


@pytest.fixture(scope="module")
def rows(profile: Profile) -> dict[str, SimulatedRow]:
    clusters = [replace(BASE, strategy=strategy) for strategy in STRATEGIES]
    return dict(zip(STRATEGIES, evaluate(profile, clusters), strict=True))


def test_ports_carry_what_the_formula_says(profile: Profile, rows: dict[str, SimulatedRow]) -> None:
    """2 k (N k - k) / (N k) of the gradients for N = 2 nodes of k = 4: four times; 2 (N - 1) / N
    where nodes add up: once."""
    for strategy, times in zip(STRATEGIES, (4.0, 1.0, 1.0), strict=True):
        row = rows[strategy]
        assert row.tx_bytes_per_step == pytest.approx(times * profile.size_bytes, rel=HEADERS)
        scheme = "ps" if strategy == "p3" else "hierarchical"
        said = port_bytes(profile.size_bytes, workers=8, local_ranks=4, scheme=scheme)
        assert said == pytest.approx(times * profile.size_bytes)
        assert row.to_json()["ranks_per_node"] == 4
        assert row.step_s > row.bound_step_s * 0.999
    assert rows["p3"].bound_step_s > 2 * rows["hierarchical"].bound_step_s


def test_the_answer_is_to_add_up_in_the_node_first(
    profile: Profile, rows: dict[str, SimulatedRow]
) -> None:
    needs = required_links(list(rows.values()), lambda row: "none")

    def explain(row: SimulatedRow, link_is_enough: bool) -> Cause:
        cluster = replace(BASE, strategy=row.strategy)
        return find_cause(Variants(profile), cluster, row, link_is_enough=link_is_enough)

    (answer,) = advise(list(rows.values()), needs, explain)
    assert answer.ranks_per_node == 4 and answer.bottleneck == "network"
    assert answer.cheapest is not None and answer.cheapest.strategy.startswith("hierarchical")
    assert "8 workers on 2 nodes of 4 at 4 Gbit/s" in answer.text
    assert "aggregate in the node first" in answer.text
    assert "8 workers on 2 nodes of 4:" in text_of_required_links(needs)[0]


def test_factors_leave_a_node_once() -> None:
    """VGG-19's three classifiers with 32 rows a rank on four nodes of eight."""
    vgg = synthetic_profile("vgg19", 0.3)
    factors = {
        layer.name: 32 * sum(layer.matrix or ()) * 4 for layer in layers_of(vgg) if layer.matrix
    }
    rest = sum(one.size_bytes for one in vgg.tensors if not one.name.startswith("classifier."))
    base = Cluster(workers=32, rate_bps=1e10, ranks_per_node=8, free_host=True, large_frames=True)
    (found,) = evaluate(vgg, [replace(base, strategy="sfb", steps=2)])
    expected = 3 * 8 * sum(factors.values()) + 2 * 3 / 4 * rest
    assert found.tx_bytes_per_step == pytest.approx(expected, rel=0.01)
    assert expected < 280e6
    assert found.step_s >= found.bound_step_s * 0.999


def test_poseidons_rule_on_nodes_is_that_of_their_ranks() -> None:
    """Both sides of it have as many times fewer bytes, and its plan is simulated on nodes."""
    vgg = synthetic_profile("vgg19", 0.3)
    facts = ClusterFacts(32, 1e10, ranks_per_node=8)
    plan = Coordinator(vgg, facts, rule="poseidon").plan(budget_s=30.0)
    alone = Coordinator(vgg, ClusterFacts(32, 1e10), rule="poseidon")
    chosen = {one.name: one.scheme for one in plan.tensors}
    for layer in layers_of(vgg):
        assert chosen[layer.parameters[0]] == alone.best_scheme(layer.name).scheme
    assert "each of 4 nodes" in plan.tensors[-2].reason
    assert plan.prediction["node_bytes"] < plan.prediction["node_bytes_ps"]


def test_a_slow_way_within_the_node_is_not_worth_it(profile: Profile) -> None:
    """Adding up takes longer if memory, or the model of NCCL, is slower than the port."""
    led = replace(BASE, strategy="hierarchical", ranks_per_node=2, workers=4, rate_bps=25e9)
    slow, fast = evaluate(
        profile, [replace(led, local_rate_bps=1e9), replace(led, local_rate_bps=1e12)]
    )
    # What goes in and what comes out are two directions, each of them full.
    assert slow.step_s > profile.size_bytes * 8 / 1e9 > 2 * fast.step_s
    assert slow.bound_step_s == fast.bound_step_s


def test_clusters_that_fill_no_nodes_are_skipped_with_a_reason() -> None:
    said: list[str] = []

    def clusters(workers: list[int], each: list[int]) -> list[Cluster]:
        return clusters_of(
            Grid(
                workers=workers,
                rates_bps=[1e9],
                strategies=["p3", "hierarchical"],
                ranks_per_node=each,
            ),
            BASE,
            said.append,
        )

    found = [(it.workers, it.ranks_per_node, it.strategy) for it in clusters([4, 6], [1, 2, 4])]
    both = ("p3", "hierarchical")
    assert found == [
        (4, 1, "p3"),
        *((4, 2, it) for it in both),
        (6, 1, "p3"),
        *((6, 2, it) for it in both),
    ]
    assert any("6 workers do not fill nodes of 4" in why for why in said)
    assert any("4 workers are one node of 4" in why for why in said)
    assert any("each has one rank" in why for why in said)
    with pytest.raises(ValueError, match="do not fill nodes of 4"):
        clusters([6], [4])


def test_what_does_not_go_with_nodes_is_refused(profile: Profile) -> None:
    with pytest.raises(ValueError, match="servers are single ranks there"):
        scenario_of(profile, replace(BASE, servers=2))
    with pytest.raises(ValueError, match="a codec needs a tensor's shape"):
        shared = replace(BASE, strategy="hierarchical-shared", codec="qsgd:bits=8")
        scenario_of(profile, shared)
    with pytest.raises(ValueError, match="3 workers do not fill nodes of 2"):
        ClusterFacts(3, 1e9, ranks_per_node=2)


def test_the_command_takes_nodes_and_makes_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, page = tmp_path / "rows.json", tmp_path / "page.html"
    arguments = ["resnet50", "--workers", "4,8", "--rate", "4gbit", "--ranks-per-node", "2,4"]
    further = ["--strategy", "p3,hierarchical", "--local-rate", "300gbit"]
    status, printed, _ = run(
        monkeypatch,
        capsys,
        *("whatif", *arguments, *further),
        *("--json", str(rows), "--html", str(page)),
    )
    assert status == 0
    assert "left out: 4 workers are one node of 4" in printed
    content = json.loads(rows.read_text())
    places = [(row["workers"], row["ranks_per_node"], row["strategy"]) for row in content["rows"]]
    assert places == [
        (workers, each, strategy)
        for workers, each in ((4, 2), (8, 2), (8, 4))
        for strategy in ("p3", "hierarchical")
    ]
    assert "Workers on a node" in page.read_text()


def plan_for(
    profile: Profile, *, any_rounding: bool = False, base: Settings | None = None, **facts: Any
) -> Plan:
    facts = {"ranks_per_node": 4, **facts}
    coordinator = Coordinator(
        profile, ClusterFacts(8, 4e9, **facts), any_rounding=any_rounding, base=base
    )
    return coordinator.plan(budget_s=60.0)


def test_plans_add_up_on_nodes_with_leave_and_say_what_it_would_give_without(
    profile: Profile,
) -> None:
    plan = plan_for(profile, any_rounding=True)
    assert plan.settings.local in ("leader", "shared")
    (choice,) = (choice for choice in plan.choices if choice["setting"] == "local")
    assert "aggregate in the node first" in choice["reason"]
    assert plan.facts.where == "8 workers on 2 nodes of 4 at 4 Gbit/s"
    read = parse_plan(json.dumps(plan.to_json()), "the plan")
    assert read.settings == plan.settings and read.facts == plan.facts
    kept = plan_for(profile, base=Settings(local="off"))
    assert kept.settings.local == "off"
    (choice,) = (choice for choice in kept.choices if choice["setting"] == "local")
    assert "declined: " in choice["reason"] and "leader would give" in choice["reason"]
    assert choice["base_step_s"] > plan.prediction["step_s"]


def test_plans_for_nodes_add_up_on_them_as_sessions_do(profile: Profile) -> None:
    """By default; what does not go with it keeps single ranks, and so does a single node."""
    plan = plan_for(profile)
    assert plan.settings.local in ("leader", "shared")
    off = plan_for(profile, base=Settings(local="off"))
    assert plan.prediction["base_step_s"] < 0.5 * off.prediction["base_step_s"]
    assert plan_for(profile, base=Settings(codec="onebit")).settings.local == "leader"
    assert plan_for(profile, update="server").settings.local == "off"
    assert plan_for(profile, ranks_per_node=1).settings.local is None


def test_settings_without_nodes_are_written_as_before() -> None:
    assert "local" not in Settings().to_json()
    assert "ranks_per_node" not in ClusterFacts(4, 1e9).to_json()
    with pytest.raises(ValueError, match="pulls from servers by itself"):
        Settings("kvstore", local="leader")
