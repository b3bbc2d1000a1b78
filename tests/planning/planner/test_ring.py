"""Rings in sessions and plans: the same bits on all ranks, and at two ranks those of servers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import Store

from gradlane.planning.planner.coordinator import Coordinator
from gradlane.planning.planner.search import search
from gradlane.planning.simulation.profiles import Profile, ProfileTensor
from gradlane.training.options.options import Options
from gradlane.training.options.strategy import strategy_of
from gradlane.training.plans.plan import Plan, PlanError, parse_plan
from gradlane.training.plans.settings import ClusterFacts, Settings
from tests.built import needs_core
from tests.training.model.pool import FirstRanks
from tests.training.model.scenarios import MODELS, digest, loss_of, open_session, optimizer_of

HERE = "tests.planning.planner.test_ring"
FACTS = ClusterFacts(workers=3, rate_bps=1e9)


def plan_for(model_name: str, schemes: dict[str, str]) -> Plan:
    """Return a plan for a model, with a scheme for some of its tensors."""
    named = list(MODELS[model_name]().named_parameters())
    tensors = tuple(
        ProfileTensor(name, tuple(one.shape), "f32", 0.001 * at, 0.1, layer=None)
        for at, (name, one) in enumerate(named)
    )
    profile = Profile(model_name, 4, 0.05, 0.1, tensors)
    plan = Coordinator(profile, replace(FACTS, workers=1)).plan()
    rows = tuple(
        replace(row, scheme=schemes.get(row.name, row.scheme), reason="a test")
        for row in plan.tensors
    )
    return replace(plan, facts=FACTS, tensors=rows)


def train_by_plan(
    store: Store, rank: int, world_size: int, job: str, plan: dict[str, Any] | None
) -> dict[str, Any]:
    """Train with a plan; returns digests, and kinds of frames that were sent, by tensor's name.

    Those of "joined" are of gradients that leave together.
    """
    with open_session(store, rank, world_size, job, frame_trace=True) as session:
        model = MODELS["cnn"]()
        optimizer = optimizer_of("sgd", model)
        given = parse_plan(json.dumps(plan), "the plan") if plan else None
        session.prepare(model, optimizer, plan=given)
        digests = []
        for step in range(1, 6):
            loss_of("cnn", model, rank, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            digests.append(digest(model))
        session.synchronize()
        names = [name for name, _ in model.named_parameters()]
        kinds: dict[str, set[int]] = {name: set() for name in (*names, "joined")}
        for _, way, kind, _, step, tensor, _, _ in session.monitoring.take_trace():
            if way == "tx" and step > 0 and kind in (1, 2, 16, 17):
                kinds[names[tensor] if tensor < len(names) else "joined"].add(kind)
    return {"digests": digests, "kinds": kinds}


@needs_core
@pytest.mark.parametrize(("model", "optimizer"), [("cnn", "sgd"), ("awkward", "adamw")])
def test_two_ranks_get_the_bits_of_servers(pool: FirstRanks, model: str, optimizer: str) -> None:
    training: dict[str, Any] = {
        "ranks": 2,
        "model_name": model,
        "steps": 12,
        "optimizer_name": optimizer,
        "digest_every": 1,
    }
    servers = pool.run("train", **training)
    for options in ({"strategy": "ring"}, {"scheme": "ring", "slice_elems": 1_000}):
        ring = pool.run("train", **training, **options)
        assert [one["digests"] for one in ring] == [one["digests"] for one in servers]


@needs_core
def test_three_ranks_agree_whatever_the_slices(pool: FirstRanks) -> None:
    """The order of addition is another one than servers', so that roundings differ at most."""
    training: dict[str, Any] = {"model_name": "wide", "steps": 4, "digest_every": 1}
    servers = pool.run("train", **training)
    runs = [
        pool.run("train", strategy="ring", **options, **training)
        for options in ({}, {"slice_elems": 700}, {"frame_bytes": 4096, "work_threads": 0})
    ]
    digests = {tuple(one["digests"]) for run in runs for one in run}
    assert len(digests) == 1
    assert digests != {tuple(servers[0]["digests"])}
    for one, other in zip(servers, runs[0], strict=True):
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-5)
        for name, value in one["state"].items():
            torch.testing.assert_close(value, other["state"][name], rtol=1e-4, atol=1e-6)


@needs_core
@pytest.mark.parametrize("model", ["awkward", "bf16", "f16"])
def test_absent_gradients_and_short_dtypes(pool: FirstRanks, model: str) -> None:
    results = pool.run("train", model_name=model, steps=12, strategy="ring", digest_every=1)
    assert len({tuple(result["digests"]) for result in results}) == 1
    assert len(set(results[0]["digests"])) > 10


@needs_core
def test_a_plan_says_which_tensors_go_round(pool: FirstRanks) -> None:
    names = [name for name, _ in MODELS["cnn"]().named_parameters()]
    plan = plan_for("cnn", dict.fromkeys(names[::2], "ring"))
    results = pool.run(f"{HERE}:train_by_plan", plan=plan.to_json())
    assert len({tuple(result["digests"]) for result in results}) == 1
    for name in (*names, "joined"):
        sent = set().union(*(result["kinds"][name] for result in results))
        # Biases are small enough to leave together.
        others = {1, 2} if name == "joined" else set()
        assert sent == ({16, 17} if name in names[::2] else others), name


@needs_core
def test_a_ring_stays_a_ring_when_it_is_planned() -> None:
    profile = Profile(
        "small", 1, 0.05, 0.1, (ProfileTensor("w", (900, 900), "f32", 0.0, 0.1, layer=None),)
    )
    found = search(profile, FACTS, Settings(strategy="ring"), budget_s=1e3)
    assert found is not None and found.settings.strategy == "ring"
    assert all(one.value == "ring" for one in found.choices[0].tried)
    plan = Coordinator(profile, FACTS, base=Settings(strategy="ring")).plan()
    assert plan.schemes == {"w": "ring"}
    assert plan.tensors[0].slices >= 50
    assert parse_plan(json.dumps(plan.to_json()), "p").digest == plan.digest


@pytest.mark.parametrize(
    ("strategy", "scheme", "expected"),
    [
        ("p3", None, "p3"),
        ("p3", "ps", "p3"),
        ("p3", "ring", "ring"),
        ("ring", "ring", "ring"),
        ("ring", None, "ring"),
        ("kvstore", "ps", "kvstore"),
    ],
)
def test_a_scheme_makes_a_strategy(strategy: str, scheme: str | None, expected: str) -> None:
    assert strategy_of(strategy, scheme) == expected


@pytest.mark.parametrize(
    ("strategy", "scheme", "message"),
    [
        ("kvstore", "ring", "workers pull from servers"),
        ("wfbp", "ring", "use strategy 'p3'"),
        ("ring", "ps", 'use strategy="p3"'),
        ("p3", "tree", "known are ps, ring"),
    ],
)
def test_schemes_that_do_not_go_with_a_strategy(strategy: str, scheme: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        strategy_of(strategy, scheme)


def test_servers_with_optimizers_and_rings_exclude_each_other() -> None:
    with pytest.raises(ValueError, match='use update="worker"'):
        Options.of(strategy="ring", update="server")


@needs_core
def test_a_plan_with_a_scheme_that_cannot_be_is_refused() -> None:
    content: Any = plan_for("cnn", {}).to_json()
    del content["digest"]
    content["settings"] |= {"strategy": "kvstore", "slice_elems": None}
    content["tensors"][1]["scheme"] = "ring"
    with pytest.raises(PlanError, match=r"tensors\[1\].scheme: is 'ring': a ring with strategy"):
        parse_plan(json.dumps(content), "p.json")
