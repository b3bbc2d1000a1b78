"""Codecs in sessions over the compiled core: who gets which, all ranks alike, residuals kept."""

from __future__ import annotations

import copy
import itertools
import re
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlane
from gradlane.training.core import load_core
from gradlane.training.model.prepared import PreparedModel
from gradlane.training.options.codec_choice import (
    CodedTensor,
    check_codecs,
    choose_codecs,
    codec_rules,
)
from gradlane.training.options.options import Options
from gradlane.training.plans import active_plan
from gradlane.training.plans.plan import Plan
from gradlane.training.plans.settings import ClusterFacts, Settings
from gradlane.training.session import models
from gradlane.training.session.init import open_session
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import same_bits, snapshot

CORE: Any = load_core()
MODEL = [
    CodedTensor("conv.weight", "f32", (64, 64, 3, 3)),
    CodedTensor("conv.bias", "f32", (64,)),
    CodedTensor("fc.weight", "f32", (1000, 64)),
    CodedTensor("fc.bias", "f32", (1000,)),
    CodedTensor("scale", "f64", (1000, 1000)),
]


def chosen(codec: Any, tensors: list[CodedTensor] = MODEL) -> dict[str, str]:
    choices = choose_codecs(codec_rules(codec), tensors)
    assert all(choice.reason for choice in choices)
    return {choice.tensor: choice.codec for choice in choices}


def test_one_codec_leaves_out_the_smallest_below_one_percent() -> None:
    full = "qsgd:bits=4,bucket=512,norm=max,levels=sign"
    codecs = chosen("qsgd:bits=4")
    # 1,000 and 64 of 101,928 are over one percent together, and 64 are not.
    assert codecs == {
        "conv.weight": full,
        "conv.bias": "raw",
        "fc.weight": full,
        "fc.bias": full,
        "scale": "raw",
    }
    shares = [(1, 98), (1, 99), (1, 100), (1, 1000)]
    for small, large in shares:
        tensors = [
            CodedTensor("small", "f32", (small,)),
            CodedTensor("large", "f32", (large * 32,)),
        ]
        encoded = chosen("f16", tensors)
        total = small + large * 32
        assert (encoded["small"] == "raw") == (large * 32 > 0.99 * total)
        assert encoded["large"] == "f16"


@pytest.mark.parametrize("sizes", [[5], [5, 5, 5], [1, 2, 4, 8, 1000], [10] * 50 + [9_000]])
def test_more_than_99_percent_are_encoded_and_no_more_tensors_could_be_left_out(
    sizes: list[int],
) -> None:
    tensors = [CodedTensor(f"t{i}", "f32", (size,)) for i, size in enumerate(sizes)]
    encoded = [codec != "raw" for codec in chosen("f16", tensors).values()]
    kept = sum(itertools.compress(sizes, encoded))
    assert kept > 0.99 * sum(sizes)
    smallest = min(itertools.compress(sizes, encoded))
    assert kept - smallest * sizes.count(smallest) <= 0.99 * sum(sizes)


def test_the_first_pattern_that_fits_counts() -> None:
    codec = {"*.bias": "f32", "conv*": "qsgd:bits=8", "*": "bf16"}
    text = "*.bias=f32; conv*=qsgd:bits=8;*=bf16"
    assert codec_rules(codec) == codec_rules(text)
    expected = {
        "conv.weight": "qsgd:bits=8,bucket=512,norm=max,levels=sign",
        "conv.bias": "raw",
        "fc.weight": "bf16",
        "fc.bias": "raw",
        "scale": "raw",
    }
    assert chosen(codec) == expected
    assert chosen({"fc*": "f16"})["conv.weight"] == "raw"


def test_what_means_no_codec_is_none() -> None:
    for nothing in (None, "raw", "f32", " raw ", {"*": "f32"}, {}):
        assert codec_rules(nothing) == "raw"
    half = [CodedTensor("w", "f16", (100, 100))]
    assert chosen("f16", half) == {"w": "raw"}, "it changes nothing"


@pytest.mark.parametrize(
    ("codec", "named"),
    [
        ("zip", "no codec is named"),
        ("qsgd:bits=3", "bits"),
        ("qsgd:bots=4", "bots"),
        ("", "empty"),
        ({"*.bias": ""}, "empty"),
        ({"*.bias": 8}, "texts"),
        (8, "'qsgd:bits=4'"),
        ("*.bias=f32;conv", "no pattern"),
    ],
)
def test_texts_that_are_no_codec_are_refused(codec: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        check_codecs(codec_rules(codec))


# ---- training


torch.manual_seed(1)
INITIAL = nn.Sequential(nn.Linear(40, 90), nn.ReLU(), nn.Linear(90, 3))


def make_model() -> nn.Module:
    # Ranks are threads, which have torch's generator in common.
    return copy.deepcopy(INITIAL)


def backward(model: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn((8, 40), generator=generator)
    loss = (model(inputs) - inputs[:, :3]).square().mean()
    loss.backward()


def train(session: Any, steps: range, model: nn.Module, optimizer: Any) -> None:
    for step in steps:
        backward(model, session.rank, step)
        optimizer.step()
        optimizer.zero_grad()


def start(
    session: Any, values: list[Tensor] | None = None, plan: str | None = None
) -> tuple[nn.Module, Any]:
    model = make_model()
    if values is not None:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.copy_(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    prepared: tuple[nn.Module, Any] = session.prepare(model, optimizer, plan=plan)
    return prepared


@pytest.mark.parametrize(
    ("codec", "world_size", "ratio", "strategy"),
    [
        ("qsgd:bits=8", 2, 3.4, "p3"),
        ({"0.*": "qsgd:bits=4"}, 3, 4.0, "p3"),
        ("bf16:residual=on", 3, 1.7, "p3"),
        ("qsgd:bits=8", 3, 3.2, "ring"),
        ("qsgd:bits=8,ring=integer", 3, 2.6, "ring"),
    ],
)
def test_ranks_stay_alike_and_near_to_exact_training(
    codec: Any, world_size: int, ratio: float, strategy: str
) -> None:
    def body(session: Any) -> tuple[list[Tensor], int, list[str]]:
        model, optimizer = start(session)
        before = session.metrics()["tx_bytes"]
        train(session, range(1, 16), model, optimizer)
        session.synchronize()
        sent = session.metrics()["tx_bytes"] - before
        return snapshot(model), sent, [choice.codec for choice in session.monitoring.codecs]

    exact = run_ranks(world_size, body, core=CORE, strategy=strategy)
    lossy = run_ranks(world_size, body, core=CORE, codec=codec, strategy=strategy)
    assert {one for _, _, codecs in exact for one in codecs} == {"raw"}
    assert all(same_bits(parameters, lossy[0][0]) for parameters, _, _ in lossy)
    assert not same_bits(lossy[0][0], exact[0][0])
    for found, right in zip(lossy[0][0], exact[0][0], strict=True):
        assert torch.allclose(found, right, atol=0.02)
    # The statuses and headers travel as well.
    assert sum(sent for _, sent, _ in exact) > ratio * sum(sent for _, sent, _ in lossy)


def test_a_scaler_skips_steps_that_are_not_finite_and_goes_on() -> None:
    def body(session: Any) -> list[Tensor]:
        model, optimizer = start(session)
        train(session, range(1, 3), model, optimizer)
        before = snapshot(model)
        backward(model, session.rank, 3)
        if session.rank == 1:
            # The engine owns gradients from here on, so the poison has to be in the loss.
            optimizer.zero_grad()
            (model(torch.ones(1, 40)).sum() * float("nan")).backward()
        else:
            optimizer.zero_grad()
            model(torch.ones(1, 40)).sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        finite = all(one is not None and bool(one.isfinite().all()) for one in gradients)
        assert not finite, "it reaches every rank"
        optimizer.zero_grad()
        assert same_bits(snapshot(model), before)
        train(session, range(4, 6), model, optimizer)
        after = snapshot(model)
        assert all(bool(value.isfinite().all()) for value in after)
        return after

    results = run_ranks(3, body, core=CORE, codec="qsgd:bits=4,residual=on")
    assert all(same_bits(result, results[0]) for result in results)


# ---- residuals


@pytest.mark.parametrize("strategy", ["p3", "ring"])
def test_training_goes_on_to_the_bit_with_every_ranks_own_state(strategy: str) -> None:
    """Rounding to bf16 draws no numbers, so the bits do not depend on the steps' numbers."""
    states: dict[int, Any] = {}

    def whole(session: Any) -> list[Tensor]:
        model, optimizer = start(session)
        train(session, range(1, 9), model, optimizer)
        return snapshot(model)

    def first(session: Any) -> None:
        model, optimizer = start(session)
        train(session, range(1, 5), model, optimizer)
        states[session.rank] = (snapshot(model), session.state_dict())
        train(session, range(5, 6), model, optimizer)

    def second(session: Any) -> list[Tensor]:
        values, state = states[session.rank]
        model, optimizer = start(session, values)
        session.load_state_dict(state)
        train(session, range(5, 9), model, optimizer)
        return snapshot(model)

    codec = {"*.weight": "bf16:residual=on"}
    settings: dict[str, Any] = {"codec": codec, "strategy": strategy}
    right = run_ranks(3, whole, core=CORE, **settings)
    run_ranks(3, first, core=CORE, **settings)
    for found in run_ranks(3, second, core=CORE, slice_elems=700, **settings):
        assert same_bits(found, right[0])
    (state,) = states[0][1]["models"]
    assert set(state["worker_residual"]) == {"0.weight", "2.weight"}
    assert any(bool(value.any()) for value in state["owner_residual"].values())
    owners = [states[rank][1]["models"][0]["owner_residual"] for rank in range(3)]
    for name, value in owners[0].items():
        assert all(torch.equal(other[name], value) for other in owners)


def test_one_ranks_state_is_enough_for_a_world_of_another_size() -> None:
    saved: dict[int, Any] = {}

    def save(session: Any) -> None:
        model, optimizer = start(session)
        train(session, range(1, 5), model, optimizer)
        saved[session.rank] = session.state_dict()["models"][0]

    def load(session: Any) -> Any:
        start(session)
        session.load_state_dict({"version": 1, "models": [saved[0]]})
        return session.state_dict()["models"][0]

    codec = "qsgd:bits=2,residual=on"
    run_ranks(4, save, core=CORE, codec=codec)
    means = saved[0]["mean_worker_residual"]
    for name, mean in means.items():
        own = [saved[rank]["worker_residual"][name] for rank in range(4)]
        total = ((own[0] + own[1]) + own[2]) + own[3]
        assert torch.equal(mean, total / 4)
    for found in run_ranks(2, load, core=CORE, codec=codec):
        for kind, right in (
            ("worker_residual", means),
            ("owner_residual", saved[0]["owner_residual"]),
        ):
            assert all(torch.equal(found[kind][name], value) for name, value in right.items())


def test_connecting_anew_keeps_the_residuals_of_what_is_still_trained() -> None:
    def body(session: Any) -> None:
        model, optimizer = start(session)
        train(session, range(1, 4), model, optimizer)
        (before,) = session.state_dict()["models"]
        last: Any = list(model.children())[2]
        last.bias.requires_grad_(False)
        del optimizer.param_groups[0]["params"][3]
        session.prepare(model, optimizer)
        (after,) = session.state_dict()["models"]
        for kind in ("worker_residual", "owner_residual"):
            assert set(after[kind]) == {"0.weight", "0.bias", "2.weight"}
            assert any(bool(value.any()) for value in after[kind].values())
            for name, value in after[kind].items():
                assert torch.equal(value, before[kind][name])
        train(session, range(4, 6), model, optimizer)

    run_ranks(2, body, core=CORE, codec={"*": "bf16:residual=on"})


def test_other_settings_keep_all_residuals(monkeypatch: pytest.MonkeyPatch) -> None:
    switches: dict[int, Callable[[Plan], None]] = {}

    def search(prepared: PreparedModel, *rest: Any) -> SimpleNamespace:
        switches[id(prepared.model)] = rest[3]
        return SimpleNamespace(after_step=lambda: None, stop=lambda: None)

    monkeypatch.setattr(active_plan, "start_plan_search", search)
    monkeypatch.setattr(models, "measure_links", lambda *_, **__: SimpleNamespace())
    plan = Plan("any", ClusterFacts(3, 1e9), "found", Settings("slicing", slice_elems=512))

    def body(session: Any) -> list[Tensor]:
        model, optimizer = start(session, plan="auto")
        train(session, range(1, 4), model, optimizer)
        (before,) = session.state_dict()["models"]
        switches[id(model)](plan)
        assert session.planning.plan is plan
        (after,) = session.state_dict()["models"]
        for kind in ("worker_residual", "owner_residual"):
            for name, value in before[kind].items():
                assert torch.equal(value, after[kind][name])
        train(session, range(4, 6), model, optimizer)
        return snapshot(model)

    def straight(session: Any) -> list[Tensor]:
        model, optimizer = start(session)
        train(session, range(1, 6), model, optimizer)
        return snapshot(model)

    codec = {"*": "bf16:residual=on"}
    switched = run_ranks(3, body, core=CORE, codec=codec)
    (right, *_) = run_ranks(3, straight, core=CORE, codec=codec)
    assert all(same_bits(found, right) for found in switched)


def test_states_of_something_else_are_refused() -> None:
    def body(session: Any) -> list[str]:
        start(session)
        state = session.state_dict()
        texts = []
        broken = [
            {"version": 2, "models": []},
            {"version": 1, "models": []},
            {"version": 1, "models": [{"rank": 0}]},
            {
                "version": 1,
                "models": [{**state["models"][0], "owner_residual": {"9.weight": torch.ones(1)}}],
            },
            {
                "version": 1,
                "models": [{**state["models"][0], "owner_residual": {"0.weight": torch.ones(1)}}],
            },
        ]
        for one in broken:
            with pytest.raises(ValueError) as error:
                session.load_state_dict(one)
            texts.append(str(error.value))
        session.load_state_dict(state)
        return texts

    (texts,) = run_ranks(1, body, core=CORE, codec="bf16:residual=on")
    for text, named in zip(
        texts, ["version 2", "0 models", "lacks", "9.weight", "shape"], strict=True
    ):
        assert named in text


def test_ranks_with_other_codecs_are_told_so() -> None:
    def body(session: Any) -> None:
        start(session)

    core, results = CORE, []
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]

    def one(rank: int) -> None:
        try:
            with open_session(
                core,
                Options.of(
                    codec=["bf16", "f16"][rank],
                    rendezvous=gradlane.Rendezvous(
                        store=store, rank=rank, world_size=2, job="codecs"
                    ),
                    network=gradlane.Network(advertise="127.0.0.1", connect_timeout_s=20.0),
                ),
            ) as session:
                body(session)
        except gradlane.GradlaneError as error:
            results.append(str(error))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 2
    assert all("codec" in text for text in results), results


@pytest.mark.parametrize("codec", ["dgc", {"*": "dgc:ratio=0.1"}])
def test_momentum_of_one_rank_does_not_go_round_a_ring(codec: Any) -> None:
    with pytest.raises(ValueError, match=r"dgc.*momentum.*topk"):
        run_ranks(2, start, core=CORE, codec=codec, strategy="ring")


@pytest.mark.parametrize("pattern", ["*.wieght", "1.weight", "head.*"])
def test_a_pattern_that_fits_no_parameter_is_refused_with_what_is_near(pattern: str) -> None:
    def body(session: Any) -> None:
        model = nn.Sequential(nn.Linear(3, 3))
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    words = rf"codec pattern {re.escape(repr(pattern))} fits no parameter .* '0\.weight'"
    for error in run_ranks(2, body, codec={pattern: "raw", "*": "f16"}, expect_errors=True):
        assert re.search(words, str(error)), error


def test_patterns_may_fit_frozen_parameters_and_other_models() -> None:
    def body(session: Any) -> None:
        first: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        first[1].requires_grad_(False)
        session.prepare(first, torch.optim.SGD(first[0].parameters(), lr=0.1))
        second = nn.Linear(3, 3)
        session.prepare(second, torch.optim.SGD(second.parameters(), lr=0.1))

    run_ranks(2, body, codec={"1.*": "raw", "*": "f16"})
