"""Schemes and their costs: Poseidon's table 1 cell by cell, its algorithm 1, its rule as a plan."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradlane.formats.profile import ProfileModule
from gradlane.planning.planner.coordinator import Coordinator
from gradlane.planning.schemes.costs import SCHEMES, Counts, Layer, costs_of
from gradlane.planning.simulation.profiles import (
    Profile,
    ProfileTensor,
    read_profile,
    synthetic_profile,
    write_profile,
)
from gradlane.training.options.strategy import PLAN_RULES
from gradlane.training.plans.plan import read_plan
from gradlane.training.plans.settings import ClusterFacts
from tests.command_line import run


def dense(rows: int, columns: int, vectors: int | None = None) -> Layer:
    shapes = ((rows, columns), (rows,))
    elements = rows * columns + rows
    return Layer(
        "fc", 0, "Linear", ("fc.weight", "fc.bias"), shapes, elements, 4 * elements, 0, 1, vectors
    )


# Table 1


def test_the_worked_example_of_the_paper() -> None:
    """Section 3.2: M = N = 4096, K = 32, eight workers and eight servers."""
    counts = Counts(rows=32, workers=8, servers=8)
    ps, sfb = SCHEMES["ps"], SCHEMES["sfb"]
    assert ps.server_floats and ps.both_floats
    # "will transfer 2MN = 34 million for a worker node, 34 million for a server node, 58.7 million
    # for a node that is both, compared to 3.7 million for a single node using SFB"
    assert round(ps.worker_floats(4096, 4096, counts) / 1e6) == 34
    assert round(ps.server_floats(4096, 4096, counts) / 1e6) == 34
    assert ps.both_floats(4096, 4096, counts) / 1e6 == pytest.approx(58.7, abs=0.05)
    # 2 x 32 x 7 x 8192 = 3,670,016.
    assert sfb.worker_floats(4096, 4096, counts) == 3_670_016
    assert sfb.node_floats(4096, 4096, counts) / 1e6 == pytest.approx(3.7, abs=0.05)


@given(
    m=st.integers(1, 30_000),
    n=st.integers(1, 30_000),
    k=st.integers(1, 4096),
    p1=st.integers(1, 64),
    p2=st.integers(1, 64),
)
def test_every_cell_of_table_1(m: int, n: int, k: int, p1: int, p2: int) -> None:
    """The formulas as the paper prints them, in whole numbers where they are whole."""
    counts = Counts(rows=k, workers=p1, servers=p2)
    ps, sfb, adam = SCHEMES["ps"], SCHEMES["sfb"], SCHEMES["adam"]
    assert ps.server_floats and ps.both_floats and adam.server_floats and adam.both_floats
    assert ps.server_floats(m, n, counts) == pytest.approx(2 * p1 * m * n / p2)
    assert ps.worker_floats(m, n, counts) == 2 * m * n
    assert ps.both_floats(m, n, counts) == pytest.approx(2 * m * n * (p1 + p2 - 2) / p2)
    assert sfb.server_floats is None
    assert sfb.worker_floats(m, n, counts) == 2 * k * (p1 - 1) * (m + n)
    assert sfb.both_floats is None
    assert adam.server_floats(m, n, counts) == p1 * m * n + p1 * k * (m + n)
    assert adam.worker_floats(m, n, counts) == k * (m + n) + m * n
    assert adam.both_floats(m, n, counts) == (p1 - 1) * (m * n + k * m + k * n)


# Algorithm 1


@given(
    m=st.integers(1, 30_000),
    n=st.integers(1, 30_000),
    k=st.integers(1, 4096),
    nodes=st.integers(1, 64),
)
def test_factors_are_chosen_exactly_where_the_paper_says(
    m: int, n: int, k: int, nodes: int
) -> None:
    """Whole numbers, multiplied out, so that ties are ties: 2K(P1-1)(M+N) P2 <= 2MN(P1+P2-2)."""
    costs = costs_of(dense(m, n), Counts(k, nodes, nodes), PLAN_RULES["poseidon"])
    factors = 2 * k * (nodes - 1) * (m + n) * nodes <= 2 * m * n * (2 * nodes - 2)
    assert costs[0].scheme == ("sfb" if factors else "ps")
    # Never worse than servers (section 5.2).
    assert costs[0].node_floats <= SCHEMES["ps"].node_floats(m, n, Counts(k, nodes, nodes))


def test_ties_go_to_factors() -> None:
    """K (P1 - 1) (M + N) = M N (P1 + P2 - 2) / P2 with M = N = 64, K = 32, P1 = P2 = 2."""
    costs = costs_of(dense(64, 64), Counts(32, 2, 2), PLAN_RULES["poseidon"])
    assert [cost.scheme for cost in costs] == ["sfb", "ps"]
    assert costs[0].node_floats == costs[1].node_floats


@pytest.mark.parametrize(
    ("model", "workers", "factored"),
    [
        # Section 5.2: "Poseidon reduces to PS when training GoogLeNet on 16 nodes".
        ("googlenet", 16, []),
        ("vgg19", 8, ["classifier.0", "classifier.3", "classifier.6"]),
        ("vgg19_22k", 32, ["classifier.0", "classifier.3", "classifier.6"]),
        # A word more is a row more: 8,192 rows a worker are no factor to speak of.
        ("gpt2_small", 8, []),
    ],
)
def test_what_the_paper_chooses_for_its_networks(
    model: str, workers: int, factored: list[str]
) -> None:
    facts = ClusterFacts(workers, 1e10)
    book = Coordinator(synthetic_profile(model), facts, rule="poseidon")
    chosen = [name for name in book.query("layers") if book.best_scheme(name).scheme == "sfb"]
    assert chosen == factored


def test_a_choice_comes_with_what_every_scheme_costs() -> None:
    book = Coordinator(synthetic_profile("vgg19"), ClusterFacts(8, 1e10), rule="poseidon")
    choice = book.best_scheme("classifier.3")
    assert {cost.scheme for cost in choice.costs} == {"sfb", "ps", "adam"}
    for words in ("sfb: 3.67 million", "ps 58.72", "adam 119.28", "32 rows a worker"):
        assert words in choice.reason
    # Under the rule of the engine there is only what it runs.
    usual = Coordinator(synthetic_profile("vgg19"), ClusterFacts(8, 1e10)).best_scheme(3)
    assert [cost.scheme for cost in usual.costs] == ["ps"]


# Rows of factors


def profile_of(
    rows: int | None = None, layer: str | None = "Linear", modules: tuple[ProfileModule, ...] = ()
) -> Profile:
    tensors = (
        ProfileTensor("fc.weight", (4096, 1024), "f32", 0.0, 0.2, layer, rows=rows),
        ProfileTensor("fc.bias", (4096,), "f32", 0.0, 0.2, layer, rows=rows),
    )
    return Profile("one layer", 16, 0.1, 0.3, tensors, modules=modules)


def test_rows_are_those_of_the_profile_or_of_its_operations_or_the_batch() -> None:
    counted = ProfileModule("fc", "Linear", ((0.0, 0.1),), flops=2 * 4096 * 1024 * 512)
    for profile, rows, words in [
        (profile_of(rows=48), 48, "factors of 48 rows a worker"),
        (profile_of(modules=(counted,)), 512, "factors of 512 rows"),
        (profile_of(), None, "factors of 16 rows a worker (the batch: how often the layer"),
    ]:
        book = Coordinator(profile, ClusterFacts(4, 1e10), rule="poseidon")
        assert book.query("fc").rows == rows
        choice = book.best_scheme("fc")
        assert words in choice.reason
        factors = next(cost for cost in choice.costs if cost.scheme == "sfb")
        assert factors.node_floats == 2 * (rows or 16) * 3 * (4096 + 1024)


def test_layers_of_an_unknown_kind_have_no_factors() -> None:
    for kind in (None, "Conv2d", "Embedding"):
        book = Coordinator(profile_of(layer=kind), ClusterFacts(4, 1e10), rule="poseidon")
        assert [cost.scheme for cost in book.best_scheme("fc").costs] == ["ps"]


def test_rows_survive_a_profile_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(profile_of(rows=48), path)
    assert [tensor.rows for tensor in read_profile(path).tensors] == [48, 48]


# The rule as a plan


def test_the_command_writes_the_scheme_of_every_tensor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made = tmp_path / "plan.json"
    arguments = ("plan", "vgg19", "--workers", "8", "--rate", "10gbit", "--plan", "poseidon")
    status, out, _ = run(monkeypatch, capsys, *arguments, "--json", str(made))
    assert status == 0
    rows = {row["name"]: row for row in json.loads(made.read_text())["tensors"]}
    assert set(rows["features.0.weight"]) >= {"name", "scheme", "codec", "slices", "reason"}
    factored = {f"classifier.{index}.weight" for index in (0, 3, 6)}
    for name, row in rows.items():
        assert row["scheme"] == ("sfb" if name in factored else "ps")
        assert row["codec"] == "raw"
        assert row["slices"] >= 1
        assert row["reason"].startswith(f"{row['scheme']}: ")
    assert "classifier.3" in out
    assert "58.72" in out
    # The file is a plan like any other.
    assert read_plan(made).model == "vgg19"


def test_what_factors_save_is_predicted_by_bytes() -> None:
    plan = Coordinator(synthetic_profile("vgg19"), ClusterFacts(8, 1e10), rule="poseidon").plan()
    figures = plan.prediction
    # 58.7 million of 4096 x 4096 become 3.7; all three layers together: 432.7 become 19.0.
    assert figures["node_bytes"] == pytest.approx(0.177 * figures["node_bytes_ps"], rel=0.01)
    assert figures["bytes_step_s"] < figures["bytes_step_ps_s"]
    assert figures["bytes_step_s"] >= figures["compute_s"]
    assert math.isfinite(figures["rebuild_s"])
    assert "Factors for 3 of 19 layers" in plan.summary
    none = Coordinator(synthetic_profile("googlenet"), ClusterFacts(16, 1e10), rule="poseidon")
    assert "Factors are fewer numbers for no layer" in none.plan().summary


def test_a_rule_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown rule 'cheapest' of a plan; known are auto"):
        Coordinator(profile_of(), ClusterFacts(4, 1e10), rule="cheapest")
