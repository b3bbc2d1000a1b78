"""Replays that send factors in place of gradients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from gradlane.lab.runs.notes import balance_notes, bound_notes, factor_notes, norm_notes
from gradlane.lab.runs.options import LabOptions
from gradlane.lab.runs.rows import Row
from gradlane.lab.runs.strategy import parse_strategies
from gradlane.lab.runs.traffic import NodeTraffic, OwnerCounters, balance_of
from gradlane.planning.models.timings import TensorTiming
from gradlane.planning.simulation.bound import answer_owners, bound_step_s, port_bytes
from gradlane.training.core import load_core
from gradlane.training.factors.factored_weights import Factored
from gradlane.training.rendezvous.tensor_table import extra_entry
from tests.built import needs_core
from tests.training.model.pool import RankPool

MODULE = "tests.lab.factor_ranks"


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    ranks = RankPool(2)
    yield ranks
    ranks.close()


@needs_core
def test_a_replay_sends_factors_of_the_real_sizes_and_is_checked(pool: RankPool) -> None:
    # GoogLeNet: its classifier of 1024 x 1000 has 32 rows a rank, and two ranks are few.
    rule, plain = (
        pool.run(f"{MODULE}:replay", model="googlenet", rule=rule, steps=3)
        for rule in ("poseidon", "")
    )
    for results in (rule, plain):
        assert [one["wrong"] for one in results] == [[], []]
        assert results[0]["digest"] == results[1]["digest"]
    (factored,) = (name for name, one in rule[0]["schemes"].items() if one == "sfb")
    factors = rule[0]["factor_bytes"][factored]
    whole = 4 * 1024 * 1000
    assert whole / 100 < factors < whole
    # Two ranks: half of each gradient, and half of each mean.
    assert plain[0]["sent"] == pytest.approx(sum(plain[0]["sizes"]), rel=0.01)
    expected = sum(rule[0]["sizes"]) - whole + factors
    assert rule[0]["sent"] == pytest.approx(expected, rel=0.01)


@needs_core
def test_a_replay_whose_factors_go_to_one_rank(pool: RankPool) -> None:
    """The owner sends the whole, the other rank its factors, and both have the same parameters."""
    found = pool.run(f"{MODULE}:replay", model="googlenet", rule="", steps=3, scheme="adam")
    every = pool.run(f"{MODULE}:replay", model="googlenet", rule="", steps=3, scheme="sfb")
    assert [one["wrong"] for one in found] == [[], []]
    assert {one["digest"] for one in found} == {every[0]["digest"]}
    (factored,) = (name for name, one in found[0]["schemes"].items() if one == "adam")
    factors, whole = found[0]["factor_bytes"][factored], 4 * 1024 * 1000
    rest = sum(found[0]["sizes"]) - whole
    assert found[0]["sent"] == pytest.approx(rest + whole, rel=0.01)
    assert found[1]["sent"] == pytest.approx(rest + factors, rel=0.01)
    # What each counts of all: half of the rest is everybody's, the one whole layer is rank 0's.
    owned = found[0]["owned"]
    assert owned == found[1]["owned"]
    assert owned[0] - owned[1] == pytest.approx(whole, rel=0.05)
    assert found[0]["served"][0] > found[1]["served"][0] + 2 * whole


@needs_core
@pytest.mark.parametrize("servers", [4, 3, 1])
def test_the_bound_knows_who_answers_for_which_tensor(servers: int) -> None:
    shapes = [(100, 30), (7, 9), (60, 61), (100, 31), (3, 3), (41, 5)]
    timings = [
        TensorTiming(f"fc{index}", rows * columns, 4, 1.0, 0.0)
        for index, (rows, columns) in enumerate(shapes)
    ]
    rows = []
    for timing, shape in zip(timings, shapes, strict=True):
        entry = extra_entry(timing.name, torch.zeros(shape))
        rows.append(Factored(entry, (), "adam").plan_row())
    core = load_core()
    plan = json.loads(core.plan_json(json.dumps(rows), "p3", None, 0, "worker", 4, servers=servers))
    dealt = [plan["slices"][tensor["slices"]["start"]]["owner"] for tensor in plan["tensors"]]
    sizes = [timing.size_bytes for timing in timings]
    assert answer_owners(sizes, servers) == dealt


def test_the_bound_is_that_of_the_busiest_port() -> None:
    timings = [TensorTiming("conv", 1000, 4, 1.0, 0.0), TensorTiming("fc", 10**6, 4, 0.7, 0.3)]

    def port_s(workers: int, local_ranks: int = 1) -> float:
        found = bound_step_s(
            timings,
            workers=workers,
            goodput_bps=8e6,
            compute_s=1e-6,
            wire_bytes=[4000, 64_000],
            schemes=["ps", "adam"],
            local_ranks=local_ranks,
        )
        return found.port_s

    # The owner sends the whole to all others.
    assert port_s(4) == pytest.approx((1.5 * 4000 + 3 * 4e6) / 1e6)
    assert port_s(4, local_ranks=2) == pytest.approx((2 * 4000 + 2 * 4e6) / 1e6)
    mean = port_bytes(64_000, workers=4, scheme="adam", answer_bytes=4e6)
    assert mean == pytest.approx(0.75 * 4_064_000)


def test_the_bound_knows_what_factors_weigh() -> None:
    timings = [TensorTiming("conv", 1000, 4, 1.0, 0.0), TensorTiming("fc", 10**6, 4, 0.7, 0.3)]
    assert port_bytes(1000, workers=4, scheme="sfb") == 3000
    mixed = bound_step_s(
        timings,
        workers=4,
        goodput_bps=8e6,
        compute_s=1e-6,
        wire_bytes=[4000, 64_000],
        schemes=["ps", "sfb"],
    )
    assert mixed.port_s == pytest.approx((1.5 * 4000 + 3 * 64_000) / 1e6)
    whole = bound_step_s(timings, workers=4, goodput_bps=8e6, compute_s=1e-6)
    assert whole.port_s == pytest.approx(1.5 * 4_004_000 / 1e6)


def test_models_that_compute_have_no_replayed_factors() -> None:
    for name in ("poseidon", "adam", "sfb"):
        with pytest.raises(ValueError, match=f"strategy {name} is for replayed models"):
            LabOptions(workload="digits-cnn", strategies=parse_strategies(f"none,{name}"))
    sfb, adam = parse_strategies("sfb,adam")
    assert (sfb.scheme, adam.scheme, adam.is_hybrid) == ("sfb", "adam", False)
    assert adam.slice_elems(None) == 50_000
    (poseidon,) = parse_strategies("poseidon")
    assert poseidon.is_hybrid
    assert poseidon.slice_elems(None) == 50_000
    assert poseidon.learning_steps == 0


def row(strategy: str, **more: Any) -> Row:
    return Row(workload="resnet50", strategy=strategy, rate_bps=10**9, step_s_median=1.0, **more)


def test_notes_say_what_factors_save_and_what_is_slept() -> None:
    plain = row("p3", expected_tx_bytes=8e6, tx_bytes_per_step=8.2e6)
    metrics = {"tensors_by_scheme": {"ps": 9, "sfb": 3}}
    factored = row("poseidon", expected_tx_bytes=2e6, tx_bytes_per_step=2.05e6, metrics=metrics)
    first, last = factor_notes([plain, factored])
    assert first.startswith("poseidon: factors for 3 tensors, 2.0 MB a port and step by the")
    assert first.endswith("0.250 of p3's by cost, 0.250 sent.")
    assert "slept" in last
    assert factor_notes([plain, row("none")]) == []


def test_notes_say_how_far_norms_are_from_those_of_ddp() -> None:
    ddp = [row("ddp-gloo:25", repeat=0, norms=[None, 2.0]), row("ddp-gloo:25", repeat=1)]
    ours = [row("p3", repeat=0, norms=[9.0, 2.0002]), row("p3", repeat=1, norms=[9.0, 3.0])]
    (note,) = norm_notes([row("none", norms=[1.0, 1.0]), *ddp, *ours])
    assert note == (
        "p3: norms of all gradients differ from DDP's by at most 1.0e-04 of them (1 steps)."
    )
    assert norm_notes(ours) == [] and norm_notes(ddp) == []


def test_notes_say_which_steps_are_too_fast_to_be_true() -> None:
    too_fast = row("p3", bound_step_s=2.0)
    (note,) = bound_notes([too_fast, replace(too_fast, strategy="ddp-gloo", step_s_median=2.1)])
    assert note.startswith("p3: below the bound")
    first_too_fast = replace(too_fast, step_s_median=2.1, step_s=[0.1, 2.1, 2.1])
    assert bound_notes([first_too_fast]) == [note]
    alone = replace(too_fast, strategy="none")
    assert bound_notes([replace(too_fast, bound_step_s=None), row("p3"), alone]) == []


def test_notes_say_which_node_and_which_owner_carries_most() -> None:
    ports = [(2e6, 24e6), (8e6, 2e6), (8e6, 2e6), (8e6, 2e6)]
    counters = [OwnerCounters(owned, 6_000_000, 2 * owned) for owned in (8_000_000, 0, 0, 0)]
    balance = balance_of(ports, counters, steps=2)
    assert balance.nodes[0] == NodeTraffic(0, 1e6, 12e6)
    assert balance.owners[0].tx_bytes_per_step == 8e6
    assert balance.port_imbalance == 2.0
    assert balance.owned_imbalance == 4.0
    same = balance_of([(1e6, 1e6)] * 4, [], steps=1)
    assert same.owned_imbalance == 1.0
    uneven = [row(name, balance=balance) for name in ("adam", "none")]
    (note,) = balance_notes([row("p3", balance=same), *uneven, row("old")])
    assert note.startswith("adam: node 0 is busiest with 12.0 MB a step one way, 2.00 times")
    assert note.endswith("rank 0 owns 8.0 MB, 4.00 times the mean.")
