"""Replays that send factors in place of gradients."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from gradlane.lab.bound import bound_step_s, port_bytes
from gradlane.lab.factor_notes import factor_notes
from gradlane.lab.options import LabOptions
from gradlane.lab.strategy import parse_strategies
from gradlane.lab.workloads.contract import TensorTiming
from tests.adapter.pool import RankPool

MODULE = "tests.lab.factor_ranks"


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    ranks = RankPool(2)
    yield ranks
    ranks.close()


@pytest.mark.skipif(
    importlib.util.find_spec("gradlane._core") is None, reason="the compiled core is not built"
)
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
    with pytest.raises(ValueError, match="strategy poseidon is for replayed models"):
        LabOptions("digits-cnn", parse_strategies("none,poseidon"))
    (poseidon,) = parse_strategies("poseidon")
    assert poseidon.is_hybrid
    assert poseidon.slice_elems(None) == 50_000
    assert poseidon.learning_steps == 0


def test_notes_say_what_factors_save_and_what_is_slept() -> None:
    plain = {"strategy": "p3", "expected_tx_bytes": 8e6, "tx_bytes_per_step": 8.2e6}
    factored = {
        "strategy": "poseidon",
        "expected_tx_bytes": 2e6,
        "tx_bytes_per_step": 2.05e6,
        "metrics": {"tensors_by_scheme": {"ps": 9, "sfb": 3}},
    }
    first, last = factor_notes([plain, factored])
    assert first.startswith("poseidon: factors for 3 tensors, 2.0 MB a port and step by the")
    assert first.endswith("0.250 of p3's by cost, 0.250 sent.")
    assert "slept" in last
    assert factor_notes([plain, {"strategy": "none"}]) == []
