"""Training over real connections between real processes, held against torch's own DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.built import needs_core
from tests.training.model import scenarios
from tests.training.model.loops import LOOPS
from tests.training.model.pool import RankPool
from tests.training.model.reference import run_reference, train_reference

pytestmark = needs_core

STRATEGIES = ("p3", "slicing", "wfbp", "kvstore", "deferred-pull")


TRAININGS = (("cnn", "sgd"), ("transformer", "adamw"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "model", "steps"),
    [(2, "cnn", 100), (2, "transformer", 100), (4, "cnn", 100), (4, "transformer", 100)],
)
def test_many_steps_equal_ddp_with_a_rank_order_hook(
    pool: RankPool, world_size: int, model: str, steps: int
) -> None:
    optimizer = "sgd" if model == "cnn" else "adamw"
    results = pool.run(
        "compare_with_ddp",
        ranks=world_size,
        runs=[{}],
        model_name=model,
        steps=steps,
        optimizer_name=optimizer,
        cosine=model == "transformer",
    )
    assert len({digest for result in results for digest in result}) == 1


@pytest.mark.parametrize(("model", "optimizer"), TRAININGS)
def test_two_ranks_equal_stock_ddp(pool: RankPool, model: str, optimizer: str) -> None:
    results = pool.run(
        "compare_with_ddp",
        ranks=2,
        runs=[{}],
        model_name=model,
        steps=200,
        optimizer_name=optimizer,
        gather=False,
    )
    assert len({digest for result in results for digest in result}) == 1


@pytest.mark.parametrize(("model", "optimizer"), TRAININGS)
def test_what_gradlane_has_saved_goes_on_under_ddp(
    pool: RankPool, model: str, optimizer: str
) -> None:
    results = pool.run("back_to_ddp", ranks=2, model_name=model, optimizer_name=optimizer)
    assert len({digest for result in results for digest in result}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("model", "optimizer"), TRAININGS)
def test_four_ranks_stay_close_to_stock_ddp(pool: RankPool, model: str, optimizer: str) -> None:
    """Stock DDP sums in another order, so that roundings differ and then drift apart."""
    training: dict[str, Any] = {"model_name": model, "steps": 200, "optimizer_name": optimizer}
    ddp = pool.run("train_ddp", gather=False, **training)
    ours = pool.run("train", **training)
    for one, other in zip(ddp, ours, strict=True):
        assert one["losses"][:10] == pytest.approx(other["losses"][:10], abs=1e-5)
        assert one["losses"][199] == pytest.approx(other["losses"][199], rel=0.01)


def test_strategies_and_slice_sizes_give_the_same_bits(pool: RankPool) -> None:
    runs: list[dict[str, Any]] = [{"strategy": strategy} for strategy in STRATEGIES]
    runs += [{"slice_elems": elems} for elems in (1_000, 50_000, 1_000_000)]
    runs += [{"strategy": "wfbp", "slice_elems": 1_000}, {"defer": False}, {"frame_bytes": 4096}]
    runs += [{"strategy": "kvstore", "seed": 5}, {"work_threads": 2}, {"work_threads": 0}]
    runs += [{"lanes": 2, "frame_bytes": 4096}]
    results = pool.run("compare_with_ddp", ranks=3, runs=runs, model_name="wide", steps=5)
    assert len({digest for result in results for digest in result}) == 1


def test_all_ranks_are_identical_after_each_step(pool: RankPool) -> None:
    results = pool.run("train", model_name="cnn", steps=20, digest_every=1)
    assert len(results[0]["digests"]) == 21
    assert len(set(results[0]["digests"])) >= 20
    for result in results[1:]:
        assert result["digests"] == results[0]["digests"]
    for result in results:
        assert result["metrics"]["tx_bytes"] > 0


@pytest.mark.parametrize("model", ["awkward", "attention", "bf16", "f16"])
@pytest.mark.parametrize("strategy", ["p3", "deferred-pull"])
def test_models_equal_the_reference(pool: RankPool, model: str, strategy: str) -> None:
    results = pool.run(
        "train", ranks=3, model_name=model, steps=12, optimizer_name="adamw", strategy=strategy
    )
    reference = train_reference(
        3,
        12,
        scenarios.MODELS[model],
        lambda one: scenarios.optimizer_of("adamw", one),
        lambda one, rank, step: scenarios.loss_of(model, one, rank, step),
    )
    for result in results:
        assert result["digests"][-1] == scenarios.digest(reference[0])


def test_clipping_equals_ddp(pool: RankPool) -> None:
    results = pool.run(
        "compare_with_ddp",
        ranks=3,
        runs=[{}, {"defer": False}],
        model_name="transformer",
        steps=20,
        clip_norm=0.1,
    )
    assert len({digest for result in results for digest in result}) == 1


def test_one_rank_alone(pool: RankPool) -> None:
    results = pool.run("train", ranks=1, model_name="cnn", steps=5)
    reference = train_reference(
        1,
        5,
        scenarios.MODELS["cnn"],
        lambda one: scenarios.optimizer_of("sgd", one),
        lambda one, rank, step: scenarios.loss_of("cnn", one, rank, step),
    )
    assert results[0]["digests"][-1] == scenarios.digest(reference[0])


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("shape", "'1.weight'"),
        ("extra", "4 tensors on rank 0 and 6 on rank 2; the first that only one of them has is"),
        ("dtype", "dtype 'float32' on rank 0"),
        ("strategy", "rank 0 has strategy='p3', rank 2 has 'slicing'"),
        ("refused", "float8_e4m3fn"),
    ],
)
def test_mismatches_are_named_on_every_rank(pool: RankPool, how: str, words: str) -> None:
    for error in pool.run("mismatch", ranks=3, how=how):
        assert words in error


def test_forked_loader_workers(pool: RankPool) -> None:
    results = pool.run("forked_workers", ranks=2)
    assert results[0] == results[1]
    assert len(set(results[0])) == 2


def test_evaluation_on_rank_0_only(pool: RankPool) -> None:
    assert len(set(pool.run("evaluate_on_one_rank", ranks=3))) == 1


def test_the_default_store_of_torch_distributed(pool: RankPool) -> None:
    assert len(set(pool.run("default_store", ranks=2))) == 1


def test_observed_order_becomes_the_priority_of_frames(pool: RankPool) -> None:
    results = pool.run("two_models_and_trace", ranks=2)
    assert results[0]["digests"] == results[1]["digests"]
    names = [name for name, _ in scenarios.MODELS["attention"]().named_parameters()]
    assert names == [
        "attention.in_proj_weight",
        "attention.in_proj_bias",
        "attention.out_proj.weight",
        "attention.out_proj.bias",
        "norm.weight",
        "norm.bias",
    ]
    for result in results:
        priorities = {row[5]: row[7] for row in result["trace"] if row[4] == 5 and row[2] == 1}
        assert priorities and all(value <= 0 for value in priorities.values())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-2},
        {"momentum": 0.5, "dampening": 0.1, "maximize": True},
        {"kind": "Adam", "lr": 3e-3},
        {"kind": "Adam", "lr": 3e-3, "weight_decay": 0.1, "betas": (0.4, 0.9)},
        {"kind": "AdamW", "lr": 3e-3, "weight_decay": 0.1, "maximize": True},
    ],
)
def test_updates_on_the_server(pool: RankPool, settings: dict[str, Any]) -> None:
    results = pool.run("server_update", ranks=3, settings=settings, steps=15)
    settings = dict(settings)
    kind = getattr(torch.optim, settings.pop("kind", "SGD"))
    # Small gradients are divided by their own size: a last bit of theirs counts for more.
    tolerance = 1e-6 if kind is torch.optim.SGD else 1e-5
    assert len({result["digest"] for result in results}) == 1
    (reference, *_) = train_reference(
        3,
        15,
        scenarios.MODELS["attention"],
        lambda model: kind(model.parameters(), **{"lr": 0.05, **settings}),
        lambda model, rank, step: scenarios.loss_of("attention", model, rank, step),
        make_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    )
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(results[0]["state"][name], value, rtol=tolerance, atol=tolerance)
    start = nn.ModuleList([scenarios.MODELS["attention"]()])
    assert results[0]["digest"] != scenarios.digest(start)


@pytest.mark.parametrize(
    ("name", "strategy"),
    # The others release tensors only with their step, or pull them when they are asked for.
    [*((name, "p3") for name in LOOPS), ("accumulation", "wfbp"), ("join", "deferred-pull")],
)
def test_loops_equal_the_reference(pool: RankPool, name: str, strategy: str) -> None:
    results = pool.run("loop", ranks=3, name=name, strategy=strategy)
    assert results == run_reference(3, LOOPS[name])
    assert len(set(results)) == 1


def test_a_rank_that_gives_up_while_others_go_along(pool: RankPool) -> None:
    results = pool.run("lost_in_join", ranks=3)
    assert results[1].startswith("SessionClosedError")
    for rank in (0, 2):
        assert results[rank].startswith("PeerLostError: rank 1 gave up: the test says so")


def test_synchronized_batch_norm_needs_an_accelerator(pool: RankPool) -> None:
    """Torch has none on the CPU; with one, its process group lives beside the session."""
    for words in pool.run("synchronized_batch_norm", ranks=2):
        assert "SyncBatchNorm expected input tensor to be on" in words
