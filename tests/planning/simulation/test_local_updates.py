"""Rare exchanges and sharded models in simulations, by hand; the first way that is enough."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradlane.planning.advice.advice import advise, required_links
from gradlane.planning.advice.verdict import RARE, verdict_on
from gradlane.planning.advice.ways import BITS, EXCHANGES, find_ways
from gradlane.planning.simulation.grid import SimulatedRow, evaluate, simulate
from gradlane.planning.simulation.local_updates import (
    fragment_profiles,
    local_step_s,
    outer_state_bytes,
)
from gradlane.planning.simulation.profiles import Profile, ProfileTensor, write_profile
from gradlane.planning.simulation.scenarios import Cluster
from gradlane.training.local_updates.fragments import divide
from gradlane.training.options.codec_choice import CodecChoice
from gradlane.training.options.local_updates import Local, parse_local
from gradlane.training.rendezvous.tensor_table import build_table
from tests.built import needs_core
from tests.command_line import run
from tests.training.model.ranks import run_ranks

pytestmark = needs_core

COMPUTE_S = 0.3
LAYERS = 8
PROFILE = Profile(
    "small",
    16,
    0.1,
    COMPUTE_S,
    tuple(
        ProfileTensor(f"layer{i}.weight", (250, 1000), "f32", 0.01 * i, 0.3 - 0.02 * i)
        for i in range(LAYERS)
    ),
)
PORT_BYTES = 2 * 3 / 4 * 4 * 250_000 * LAYERS
"""Of an exchange between four ranks: three quarters of all values, there and back."""
RATE_BPS = 1e8
EXCHANGE_S = 8 * PORT_BYTES / (RATE_BPS * 1448 / 1514)
FREE = Cluster(workers=4, rate_bps=RATE_BPS, free_host=True)


def row_of(update: Local | None, **changes: Any) -> SimulatedRow:
    return simulate(PROFILE, replace(FREE, update=update, **changes))[0]


@pytest.mark.parametrize("steps", [1, 4, 32])
def test_a_step_takes_its_compute_and_its_share_of_the_exchange(steps: int) -> None:
    row = row_of(Local(steps=steps))
    # The first slices of an exchange have no mean to go back yet, and the last none to go out.
    assert row.bound_step_s < row.step_s < COMPUTE_S + 1.2 * EXCHANGE_S / steps
    assert row.bound_step_s == pytest.approx(COMPUTE_S + EXCHANGE_S / steps, rel=0.02)
    assert row.tx_bytes_per_step == pytest.approx(PORT_BYTES / steps, rel=0.01)
    assert row.compression == steps
    assert row.samples_per_s == pytest.approx(4 * 16 / row.step_s)


def test_fragments_and_overlap_hide_what_compute_is_long_enough_for() -> None:
    whole = row_of(Local(steps=32))
    halves = row_of(Local(steps=32, fragments=2))
    assert halves.step_s == pytest.approx(whole.step_s, rel=0.03)
    assert halves.tx_bytes_per_step == pytest.approx(whole.tx_bytes_per_step, rel=0.01)
    # An exchange of half the model takes as long as 1.7 steps.
    assert pytest.approx(1.67, abs=0.01) == EXCHANGE_S / 2 / COMPUTE_S
    one = row_of(Local(steps=32, fragments=2, overlap_steps=1))
    waits_s = 2 * (EXCHANGE_S / 2 - COMPUTE_S)
    assert one.bound_step_s == pytest.approx(COMPUTE_S + waits_s / 32, rel=0.01)
    hidden_s = 2 * COMPUTE_S / 32
    assert one.step_s == pytest.approx(halves.step_s - hidden_s)
    assert row_of(Local(steps=32, fragments=2, overlap_steps=3)).step_s == COMPUTE_S


def test_the_slowest_rank_decides_and_codecs_count() -> None:
    plain, slow = row_of(Local(steps=4)), row_of(Local(steps=4), compute_spread=0.5)
    assert slow.step_s == pytest.approx(plain.step_s + 0.5 * COMPUTE_S)
    coded = row_of(Local(steps=4), codec="qsgd:bits=8")
    assert coded.bound_step_s == pytest.approx(COMPUTE_S + EXCHANGE_S / 4 / 3.97, rel=0.02)
    assert coded.bound_step_s < coded.step_s < COMPUTE_S + 1.2 * EXCHANGE_S / 4 / 3.97
    assert coded.compression == pytest.approx(4 * 3.97, rel=0.01)


@pytest.mark.parametrize("fragments", [1, 3, 8])
def test_fragments_are_those_of_training(fragments: int) -> None:
    sizes = [(40, 7), (7, 120), (120, 5), (5, 64), (64, 64), (64, 3), (3, 90), (90, 2)]
    model = nn.Sequential(*(nn.Linear(*one) for one in sizes))
    table = build_table(model)
    profile = Profile(
        "as trained",
        1,
        0.1,
        0.3,
        tuple(ProfileTensor(one.name, tuple(one.shape), "f32", 0.0, 0.3) for one in table),
    )
    parts = fragment_profiles(profile, Local(fragments=fragments))
    names = [[tensor.name for tensor in part.tensors] for part in parts]
    divided = divide(model, table, fragments)
    assert names == [[table[index].name for index in held] for held in divided]
    with pytest.raises(ValueError, match="8 layers"):
        fragment_profiles(profile, Local(fragments=9))


def test_memory_is_common_values_momentum_differences_and_residuals() -> None:
    size = PROFILE.size_bytes
    raw = [CodecChoice(one.name, "raw", "") for one in PROFILE.tensors]
    sparse = [CodecChoice(one.name, "topk:ratio=0.02,bits=2", "") for one in PROFILE.tensors]
    for local, choices, expected in (
        (Local(), raw, 3 * size),
        (Local(fragments=4), raw, 2.25 * size),
        (Local(outer="average"), raw, 2 * size),
        (Local(outer="sgd", outer_momentum=0.0), raw, 2 * size),
        (Local(outer="average"), sparse, 3.25 * size),
    ):
        assert outer_state_bytes(PROFILE, local, choices, 4) == expected
    assert row_of(Local()).outer_bytes == 3 * size and row_of(None).outer_bytes is None


def test_local_step_by_hand() -> None:
    assert local_step_s(1.0, [6.0], Local(steps=4)) == 2.5
    assert local_step_s(1.0, [6.0, 2.0], Local(steps=4, fragments=2, overlap_steps=2)) == 2.0
    assert local_step_s(1.0, [2.0, 2.0], Local(steps=4, fragments=2, overlap_steps=2)) == 1.0


def test_a_sharded_model_is_its_nodes_behind_their_ports() -> None:
    nodes, sharded = (
        row_of(None, workers=2),
        row_of(None, workers=8, ranks_per_node=4, sharded=True),
    )
    # Forward begins when all means are there; the first gradient leaves in mid-backward.
    first_s = min(tensor.ready_s for tensor in PROFILE.tensors)
    wire_s = 8 * PROFILE.size_bytes / (RATE_BPS * 1448 / 1514)
    assert sharded.bound_step_s == pytest.approx(first_s + wire_s, rel=0.01)
    assert sharded.bound_step_s <= sharded.step_s < 1.1 * sharded.bound_step_s
    assert sharded.step_s > 1.1 * nodes.step_s
    assert sharded.tx_bytes_per_step == pytest.approx(PROFILE.size_bytes, rel=0.01)
    assert (sharded.workers, sharded.ranks_per_node) == (8, 4)
    assert sharded.samples_per_s == pytest.approx(8 * 16 / sharded.step_s)
    hsdp = row_of(None, workers=8, ranks_per_node=4, sharded=True, strategy="ddp")
    assert hsdp.tx_bytes_per_step == pytest.approx(PROFILE.size_bytes)


def test_rare_exchanges_of_a_sharded_model_are_those_of_its_nodes() -> None:
    nodes = row_of(Local(steps=8, fragments=2), workers=2)
    shards = row_of(Local(steps=8, fragments=2), workers=8, ranks_per_node=4, sharded=True)
    assert shards.step_s == pytest.approx(nodes.step_s, rel=0.02)
    assert shards.tx_bytes_per_step == pytest.approx(PROFILE.size_bytes / 8, rel=0.01)
    assert shards.outer_bytes == nodes.outer_bytes // 4  # type: ignore[operator]
    assert shards.sharded and shards.samples_per_s == pytest.approx(8 * 16 / shards.step_s)
    # Error feedback, which exact training of shards refuses.
    sparse = row_of(Local(outer="average"), workers=8, ranks_per_node=4, sharded=True, codec="topk")
    assert sparse.step_s < shards.step_s


@pytest.mark.parametrize(
    ("ranks", "codec"),
    [
        (2, "topk:ratio=0.02"),
        (4, "topk:ratio=0.02,broadcast_ratio=0.08,bits=2,bucket=4096,decay=0.95"),
        (3, "topk:ratio=0.01,broadcast_ratio=0.3"),
    ],
)
def test_sparse_codecs_have_the_bytes_that_connections_carry(ranks: int, codec: str) -> None:
    update, sizes = Local(steps=4, outer="average"), [(512, 512), (512, 256), (256, 512)]

    def body(session: Any) -> float:
        model = nn.Sequential(*(nn.Linear(*one, bias=False) for one in sizes))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        session.exchange("all have rank 0's values")
        before = session.metrics()["tx_bytes"]
        draws = torch.Generator().manual_seed(session.rank)
        for _ in range(16):
            optimizer.zero_grad()
            model(torch.randn(4, 512, generator=draws)).square().mean().backward()
            optimizer.step()
        session.exchange("all have what this rank has sent")
        return float(session.metrics()["tx_bytes"] - before) / 16

    sent = run_ranks(ranks, body, update=update, local="off", codec=codec)
    profile = Profile(
        "as trained",
        1,
        0.1,
        0.3,
        tuple(
            ProfileTensor(f"{index}.weight", (one[1], one[0]), "f32", 0.0, 0.3)
            for index, one in enumerate(sizes)
        ),
    )
    row, _ = simulate(profile, replace(FREE, workers=ranks, update=update, codec=codec))
    assert row.tx_bytes_per_step == pytest.approx(sum(sent) / ranks, rel=0.05)


def test_a_sharded_model_may_exchange_rarely_where_that_is_allowed() -> None:
    base = replace(FREE, workers=8, ranks_per_node=4, sharded=True, rate_bps=1e7)
    (found,) = find_ways(
        [base], evaluate(PROFILE, [base]), (EXCHANGES,), lambda it: simulate(PROFILE, it)[0]
    )
    assert found.is_enough and found.chosen.sharded and found.chosen.update.startswith("local")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"update": Local(), "strategy": "asgd"}, "asgd"),
        ({"update": Local(), "strategy": "sfb"}, "sfb"),
        ({"update": Local(), "codec": "dgc"}, "dgc"),
        ({"update": Local(), "serving": 1}, "serve"),
        ({"update": Local(), "stragglers": "drop"}, "stragglers"),
        ({"update": Local(), "strategy": "in-network"}, "not simulated"),
        ({"codec": "topk", "ranks_per_node": 2, "sharded": True}, "topk"),
        ({"strategy": "hierarchical", "ranks_per_node": 2, "sharded": True}, "hierarchical"),
        ({"strategy": "kvstore", "ranks_per_node": 2, "sharded": True}, "kvstore"),
    ],
)
def test_what_training_refuses_is_not_simulated(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        simulate(PROFILE, replace(FREE, **changes))


def test_rare_exchanges_are_an_offer_of_their_own_and_no_baseline() -> None:
    clusters = [FREE, replace(FREE, update=Local(steps=32))]
    rows = evaluate(PROFILE, clusters)
    verdict = verdict_on(rows)
    assert verdict is not None and verdict.fastest.cost == RARE
    assert "with local changes" not in verdict.text and "rare exchanges" in verdict.text
    needs = required_links(rows, lambda row: "network")
    assert [need.strategy for need in needs] == ["p3"]
    (advice,) = advise(rows, needs, lambda row, enough: None)  # type: ignore[arg-type, return-value]
    assert advice.baseline == "p3" and advice.cheapest is None


def ways(rate_bps: float, allowed: tuple[str, ...]) -> tuple[Any, list[Cluster]]:
    asked = []

    def simulated(cluster: Cluster) -> SimulatedRow:
        asked.append(cluster)
        return simulate(PROFILE, cluster)[0]

    clusters = [replace(FREE, rate_bps=rate_bps, strategy=one) for one in ("ddp", "p3")]
    (found,) = find_ways(clusters, evaluate(PROFILE, clusters), allowed, simulated)
    return found, asked


def test_the_smallest_change_that_is_enough_is_chosen() -> None:
    exact, asked = ways(1e10, (BITS, EXCHANGES))
    assert exact.is_enough and not asked and "exact training is enough" in exact.text
    bits, asked = ways(2.2e8, (BITS, EXCHANGES))
    assert bits.is_enough and bits.chosen.codec != "raw" and bits.chosen.update == "worker"
    assert asked[-1].codec == bits.chosen.codec and all(one.update is None for one in asked)
    rare, _ = ways(1e7, (BITS, EXCHANGES))
    assert rare.is_enough and rare.chosen.update.startswith("local") and "more memory" in rare.text
    assert rare.tried[-1] is rare.chosen


def test_nothing_that_changes_learning_is_looked_at_without_leave() -> None:
    none, asked = ways(1e7, ())
    assert not asked and not none.is_enough and "were not allowed" in none.text
    some, asked = ways(1e7, (BITS,))
    assert asked and all(one.update is None for one in asked)
    assert "fewer exchanges were not allowed" in some.text


def test_whatif_asks_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "whatif.json"
    given = ["--workers", "4", "--rate", "1gbit", "--batch-time-s", "0.3"]
    given += ["--update", "local:steps=8,outer=average", "--fewer", "bits,exchanges"]
    status, said, _ = run(monkeypatch, capsys, "whatif", "alexnet", *given, "--json", str(path))
    assert status == 0 and "local:steps=8" in said
    content = json.loads(path.read_text())
    updates = [row["update"] for row in content["rows"]]
    assert updates == ["worker", "worker", "local:steps=8,outer=average"]
    (cell,) = content["answers"]
    assert cell["verdict"]["fastest"]["cost"] == RARE and cell["verdict"]["text"] in cell["text"]
    assert "exchange in each step" in cell["text"]
    (ways,) = content["ways"]
    assert ways["text"] in " ".join(said.split()) and ways["is_enough"]
    for words, told in (
        (["--update", "local:stepps=8"], "no option"),
        (["--sharded"], "--ranks-per-node"),
        (["--fewer", "steps"], "bits"),
        (["--update", "local", "--strategy", "ddp"], "--update has no effect"),
    ):
        status, _, why = run(monkeypatch, capsys, "whatif", "alexnet", *words)
        assert status == 2 and told in why


def test_plan_names_the_smallest_change_where_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, path = tmp_path / "profile.json", tmp_path / "plan.json"
    write_profile(PROFILE, profile)
    given = [str(profile), "--workers", "4", "--rate", "10mbit", "--budget-s", "0.1"]
    given += ["--json", str(path)]
    status, said, _ = run(monkeypatch, capsys, "plan", *given)
    assert status == 0 and "gradlane.Local" not in said
    exact = json.loads(path.read_text())
    status, said, _ = run(monkeypatch, capsys, "plan", *given, "--fewer", "bits,exchanges")
    assert status == 0 and "gradlane.init(update=gradlane.Local(" in " ".join(said.split())
    # Of exact settings the plan takes the best that it came to in its time.
    planned = json.loads(path.read_text())
    assert planned["settings"].keys() == exact["settings"].keys(), "the plan changes no result"
    assert planned["settings"]["strategy"] in ("p3", "slicing", "wfbp", "kvstore")
    assert planned.get("codec") == exact.get("codec")
    status, said, _ = run(monkeypatch, capsys, "plan", *given, "--fewer", "bits")
    assert status == 0 and "gradlane.Local" not in said and "were not allowed" in said
    for words, told in ((["--update", "server"], "no effect"), ([], "fewer")):
        kinds = "bits" if words else "steps"
        status, _, why = run(monkeypatch, capsys, "plan", *given, *words, "--fewer", kinds)
        assert status == 2 and told in why


def test_texts_of_local_updates_are_read_back() -> None:
    for local in (
        Local(),
        Local(steps=8, outer="average"),
        Local(fragments=8, overlap_steps=4, mix=0.5),
    ):
        assert parse_local(local.text) == local
    for text, words in (
        ("worker", "local"), ("local:steps=none", "steps"), ("local:steps=0", "steps"),
        ("local:depth=1", "no option"), ("local:outer=adam", "outer"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            parse_local(text)
