"""Schemes of single layers in simulations: what travels for them, and what rebuilding takes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradlane.planning.schemes.layers import (
    factors_of,
    layers_of,
    schemes_by_rule,
    simulated_schemes,
    sparse_schemes,
)
from gradlane.planning.simulation.costs import MachineCosts
from gradlane.planning.simulation.grid import clusters_of, evaluate
from gradlane.planning.simulation.lists import Grid
from gradlane.planning.simulation.profiles import (
    Profile,
    ProfileTensor,
    synthetic_profile,
    write_profile,
)
from gradlane.planning.simulation.scenarios import (
    Cluster,
    run_scenario,
    scenario_of,
    tensor_schemes,
)
from tests.command_line import run

MODEL = Profile(
    "three layers",
    8,
    0.1,
    0.3,
    (
        ProfileTensor("conv.weight", (64, 3, 7, 7), "f32", 0.0, 0.3, layer="Conv2d"),
        ProfileTensor("fc.weight", (1000, 2000), "f32", 0.05, 0.2, layer="Linear", rows=16),
        ProfileTensor("fc.bias", (1000,), "f32", 0.05, 0.2, layer="Linear", rows=16),
        ProfileTensor("words.weight", (5000, 64), "f32", 0.0, 0.3, layer="Embedding", rows=100),
    ),
    flops=2_000_000_000,
)


def report(cluster: Cluster, profile: Profile = MODEL) -> dict[str, Any]:
    made: dict[str, Any] = run_scenario(scenario_of(profile, cluster))["report"]
    return made


def test_factors_are_rows_of_both_sides() -> None:
    layers = {layer.name: layer for layer in layers_of(MODEL)}
    assert factors_of(layers["conv"], MODEL) is None
    fc = factors_of(layers["fc"], MODEL)
    assert fc is not None
    assert (fc.tensor, fc.block_bytes) == ("fc.weight", 16 * 3000 * 4 + 16)
    assert fc.operations == 2 * 16 * 1000 * 2000
    # It may be an output layer's weight, too.
    assert factors_of(layers["words"], MODEL) is None
    # Many rows are more bytes than the gradient, which then travels in their place.
    many = replace(layers["fc"], rows=1000)
    whole = factors_of(many, MODEL)
    assert whole is not None and whole.block_bytes == 1000 * 2000 * 4 + 16
    assert whole.operations == 1000 * 2000


def test_rules_choose_layers() -> None:
    assert schemes_by_rule("poseidon", MODEL, 4) == (("fc", "sfb"),)
    assert schemes_by_rule("sfb", MODEL, 4) == (("fc", "sfb"),)
    many = replace(MODEL, tensors=tuple(replace(one, rows=900) for one in MODEL.tensors))
    assert schemes_by_rule("poseidon", many, 4) == ()
    assert schemes_by_rule("sfb", many, 4) == (("fc", "sfb"),)
    assert schemes_by_rule("adam", many, 4) == (("fc", "adam"),)
    assert schemes_by_rule("sfb", MODEL, 1) == ()
    with pytest.raises(ValueError, match="unknown rule 'ring'; known are poseidon, sfb, adam"):
        schemes_by_rule("ring", MODEL, 4)


def test_rebuilding_is_as_fast_as_the_steps_own_arithmetic() -> None:
    made = simulated_schemes(MODEL, [("fc", "sfb"), ("conv", "ring")], 4)
    assert made["conv.weight"] == {"scheme": "ring"}
    assert "fc.bias" not in made
    speed = 3 * MODEL.flops / MODEL.compute_s  # type: ignore[operator]
    assert made["fc.weight"]["rebuild_s"] == pytest.approx(3 * 2 * 16 * 2e6 / speed)
    faster = simulated_schemes(MODEL, [("fc", "sfb")], 4, 10 * speed)
    assert faster["fc.weight"]["rebuild_s"] == pytest.approx(made["fc.weight"]["rebuild_s"] / 10)
    unknown = simulated_schemes(replace(MODEL, flops=None), [("fc", "sfb")], 4)
    assert unknown["fc.weight"]["rebuild_s"] == 0.0


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (("fc2", "sfb"), "three layers has no layer 'fc2'"),
        (("conv", "sfb"), "layer 'conv' has no factors"),
        (("fc", "whole"), "no scheme 'whole': use ps, ring, sfb or adam"),
        (("conv", "adam"), "layer 'conv' has no factors: its scheme cannot be 'adam'"),
    ],
)
def test_what_cannot_be_simulated_is_named(pair: tuple[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scenario_of(MODEL, Cluster(4, 1e9, schemes=(pair,)))


def test_poseidon_is_p3_with_factors_by_the_formula() -> None:
    cluster = Cluster(4, 1e9, "poseidon")
    same = Cluster(4, 1e9, "p3", schemes=(("fc", "sfb"),))
    assert report(cluster) == report(same)
    rest = sum(one.size_bytes for one in MODEL.tensors if one.name != "fc.weight")
    bytes_ = 3 * (16 * 3000 * 4 + 16) + 1.5 * rest
    assert report(cluster)["tx_bytes_per_step_mean"] == pytest.approx(bytes_, rel=0.02)
    slow = replace(cluster, rate_bps=2e8)
    assert report(slow)["step_s"] < report(replace(slow, strategy="p3"))["step_s"]


@pytest.mark.parametrize("strategy", ["p3", "wfbp", "ring"])
def test_sparse_gradients_travel_as_rows(strategy: str) -> None:
    *dense, words = MODEL.tensors
    profile = replace(MODEL, tensors=(*dense, replace(words, rows=None, sparse_rows=100)))
    block_bytes = 16 + 100 * (8 + 64 * 4)
    assert sparse_schemes(profile)["words.weight"]["block_bytes"] == block_bytes
    rest = sum(one.size_bytes for one in dense)
    sent = report(Cluster(4, 1e9, strategy), profile)["tx_bytes_per_step_mean"]
    assert sent == pytest.approx(3 * block_bytes + 1.5 * rest, rel=0.02)
    for cluster in (Cluster(4, 1e9, "kvstore"), Cluster(4, 1e9, "p3", stragglers="drop")):
        assert tensor_schemes(profile, cluster) == {}
    if strategy == "p3":
        nodes = Cluster(8, 1e9, "hierarchical", ranks_per_node=2)
        sent = report(nodes, profile)["tx_bytes_per_step_mean"]
        # Of two ranks to each of three other nodes.
        assert sent == pytest.approx(3 * 2 * block_bytes + 1.5 * rest, rel=0.02)
    assert sparse_schemes(MODEL) == {}


def test_the_accelerators_speed_is_a_constant_of_the_machine() -> None:
    usual = report(Cluster(4, 1e10, "poseidon"))["rebuild_s"]
    slow = MachineCosts(operations_per_s=1e9)
    assert report(Cluster(4, 1e10, "poseidon", costs=slow))["rebuild_s"] == pytest.approx(0.192)
    assert 0.0 < usual < 0.192


def test_rows_of_a_what_if_have_the_bound_of_their_schemes() -> None:
    vgg = synthetic_profile("vgg19")
    clusters = clusters_of(
        Grid(workers=[8], rates_bps=[1e10], strategies=["p3", "poseidon"]), Cluster(1, 0.0)
    )
    servers, poseidon = evaluate(vgg, clusters)
    assert poseidon.strategy == "poseidon"
    assert poseidon.bound_step_s < poseidon.step_s < 1.05 * poseidon.bound_step_s
    assert poseidon.step_s < 0.8 * servers.step_s
    assert math.isclose(poseidon.compute_s, vgg.compute_s)


def test_rows_of_asynchronous_training_say_how_late_gradients_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source, target = tmp_path / "profile.json", tmp_path / "rows.json"
    write_profile(MODEL, source)
    arguments = ("whatif", str(source), "--workers", "4", "--rate", "1gbit")
    status, out, errors = run(
        monkeypatch, capsys, *arguments, "--strategy", "asgd,p3", "--json", str(target)
    )
    assert status == 0, errors
    late, together = json.loads(target.read_text())["rows"]
    assert 1.0 < late["staleness_mean"] <= late["staleness_max"]
    assert together["staleness_mean"] is None
    assert "asgd: gradients are applied" in out
    # What changes the results is no advice.
    assert "p3 reaches" in out and "change that reaches 95 %: asgd" not in out


def test_factors_are_not_encoded() -> None:
    scenario = scenario_of(MODEL, Cluster(4, 1e9, "poseidon", codec="qsgd:bits=8"))
    assert set(scenario["codecs"]) == {"words.weight"}
    assert run_scenario(scenario)["report"]["step_s"] > 0.0
