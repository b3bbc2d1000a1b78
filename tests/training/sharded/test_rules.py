"""What does not go with sharded models is refused by name, with what to write instead."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

import gradlane
from tests.built import needs_core
from tests.training.sharded.fsdp2 import needs_fsdp2

pytestmark = [needs_core, needs_fsdp2]


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def mesh(*sizes: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=("node", "shard")[-len(sizes) :])


def sharded(on: Any = None, **options: Any) -> Any:
    """Return a model of two units, and parameters of its own."""
    from torch.distributed.fsdp import fully_shard

    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    on = mesh(1) if on is None else on
    fully_shard(model[0], mesh=on, **options)
    fully_shard(model, mesh=on, **options)
    return model


def adam(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


@contextlib.contextmanager
def session(**options: Any) -> Iterator[Any]:
    rendezvous = gradlane.Rendezvous(rank=0, world_size=1)
    opened = gradlane.init(rendezvous=rendezvous, **options)
    try:
        yield opened
    finally:
        opened.abort("the test has ended")


def backward(model: Any) -> None:
    model(torch.ones(2, 3)).square().sum().backward()


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "going_on": ({"going_on": True}, "restart from a checkpoint"),
    "stragglers": ({"stragglers": "drop"}, 'use stragglers="wait"'),
    "update": ({"update": "server"}, 'use update="worker"'),
    "asgd": ({"update": "server", "strategy": "asgd"}, 'use update="worker"'),
    "scheme": ({"strategy": gradlane.Strategy("p3", scheme="sfb")}, "leave the scheme out"),
    "strategy": ({"strategy": "kvstore"}, "use p3, slicing, wfbp or ring"),
    "servers": ({"servers": 1}, "leave servers out"),
    "local": ({"local": "leader"}, "different shards"),
    "checkpoints": (
        {"checkpoints": gradlane.Checkpoints("/tmp/unused")},
        "use torch.distributed.checkpoint",
    ),
    "codecs": ({"codec": {"*": gradlane.codecs.Bf16()}}, "give one codec for all"),
    "residual": ({"codec": gradlane.codecs.TopK(ratio=0.1)}, "without error feedback"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    options, words = OPTIONS[name]
    with session(**options) as opened:
        model = sharded()
        with pytest.raises(gradlane.UsageError, match=words):
            opened.prepare(model, adam(model))


@pytest.mark.parametrize(
    ("local", "words"),
    [
        ({}, "parameter '0.weight' of torch.bfloat16 with"),
        ({"fragments": 3}, "the model has 2 layers with trained parameters"),
    ],
)
def test_models_with_local_updates(local: dict[str, Any], words: str) -> None:
    with session(update=gradlane.Local(steps=4, **local)) as opened:
        model = sharded().bfloat16() if not local else sharded()
        with pytest.raises((ValueError, gradlane.UsageError), match=words):
            opened.prepare(model, adam(model))


def test_codecs_with_local_updates_may_keep_residuals_and_go_by_names() -> None:
    """What exact training refuses."""
    codec = {"0.*": gradlane.codecs.TopK(ratio=0.1), "*": None}
    with session(update=gradlane.Local(steps=2), codec=codec) as opened:
        model = sharded()
        optimizer = adam(model)
        opened.prepare(model, optimizer)
        for _ in range(3):
            backward(model)
            optimizer.step()
        assert opened.step == 3 and opened.state_dict()["models"][0]["local_updates"]["step"] == 3
        with pytest.raises(
            gradlane.UsageError, match=r"fully_shard has sharded: .*scale each loss"
        ):
            opened.weight(3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"defer": True}, "leave defer out"),
        ({"buffers": "average"}, 'give buffers="local"'),
        ({"plan": "auto"}, "leave plan out"),
    ],
)
def test_arguments_of_prepare(arguments: dict[str, Any], words: str) -> None:
    with session() as opened:
        model = sharded()
        with pytest.raises(gradlane.UsageError, match=words):
            opened.prepare(model, adam(model), **arguments)


def hsdp() -> Any:
    return sharded(mesh(1, 1))


def hooked() -> Any:
    model = sharded()
    model[0].set_all_reduce_hook(lambda buffer: None)
    return model


def partly() -> Any:
    from torch.distributed.fsdp import fully_shard

    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    fully_shard(model[0], mesh=mesh(1))
    return model


def ignoring() -> Any:
    from torch.distributed.fsdp import fully_shard

    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    fully_shard(model, mesh=mesh(1), ignored_params={model[1].weight})
    return model


def frozen() -> Any:
    model = sharded()
    model.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (hsdp, r"2 dimensions .*mesh=mesh\['shard'\]"),
        (hooked, "unit '0' has an all-reduce hook already"),
        (partly, "parameter '1.weight' is in no unit .*on the whole model"),
        (ignoring, "parameter '1.weight' is in no unit"),
        (frozen, "no trained parameter"),
    ],
)
def test_models(build: Callable[[], Any], words: str) -> None:
    with session() as opened:
        model = build()
        with pytest.raises(gradlane.UsageError, match=words):
            opened.prepare(model, adam(model))


@pytest.mark.parametrize("update", ["worker", gradlane.Local(steps=2)])
def test_an_optimizer_may_hold_frozen_parameters(update: Any) -> None:
    """Of a unit of which some are trained, and of one without any."""
    with session(update=update) as opened:
        model = sharded()
        model[0].requires_grad_(False)
        model[1].bias.requires_grad_(False)
        optimizer = adam(model)
        opened.prepare(model, optimizer)
        before = [one.full_tensor().clone() for one in model.parameters()]
        backward(model)
        optimizer.step()
        after = [one.full_tensor() for one in model.parameters()]
    moved = [not torch.equal(*pair) for pair in zip(before, after, strict=True)]
    assert moved == [False, False, True, False]


def test_an_optimizer_of_another_model() -> None:
    with session() as opened:
        model = sharded()
        with pytest.raises(ValueError, match="the model does not have"):
            opened.prepare(model, adam(nn.Linear(2, 2)))


def test_a_model_that_is_prepared_already() -> None:
    with session() as opened:
        model = sharded()
        optimizer = adam(model)
        opened.prepare(model, optimizer)
        with pytest.raises(gradlane.UsageError, match="hook already, of another session"):
            opened.prepare(model, optimizer)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda one: one.clip_grad_norm_(1.0), "torch.nn.utils.clip_grad_norm_"),
        (lambda one: one.no_sync().__enter__(), r"set_requires_gradient_sync\(False\)"),
        (lambda one: one.weight(3), "scale each loss"),
        (lambda one: one.join(), "as many batches"),
        (lambda one: one.planning.query("layers"), "plans know whole models"),
        (lambda one: one.planning.best_scheme(0, batch_size=2), "plans know whole models"),
    ],
)
def test_calls_of_the_session(call: Callable[[Any], Any], words: str) -> None:
    with session() as opened:
        model = sharded()
        opened.prepare(model, adam(model))
        with pytest.raises(gradlane.UsageError, match=f"that fully_shard has sharded: .*{words}"):
            call(opened)


@pytest.mark.parametrize("lacking", ["hook", "group", "divisors"])
def test_another_torch_is_named(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import fsdp
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    model = sharded()
    if lacking == "hook":
        monkeypatch.delattr(fsdp.FSDPModule, "set_all_reduce_hook")
        words = "FSDPModule.set_all_reduce_hook"
    elif lacking == "group":
        group = model[0]._get_fsdp_state()._fsdp_param_groups[0]
        del group.all_reduce_grads
        words = "FSDPParamGroup.all_reduce_grads"
    else:
        monkeypatch.setattr(collectives, "_get_gradient_divide_factors", lambda group: None)
        words = "_get_gradient_divide_factors in the form that is known"
    refused = pytest.raises(gradlane.UsageError, match=f"torch 2.* has not {words}.*native HSDP")
    with session() as opened, refused:
        opened.prepare(model, adam(model))


def test_a_hook_that_reads_gradients_in_backward() -> None:
    with session() as opened:
        model = sharded()
        opened.prepare(model, adam(model))
        model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
        with pytest.raises(gradlane.UsageError, match=r"hook\(\) of parameter '0\.weight'"):
            backward(model)


def test_reduction_outside_of_backward() -> None:
    with session() as opened:
        model = sharded()
        opened.prepare(model, adam(model))
        model.set_manual_backward_finalization(True)
        with pytest.raises(gradlane.UsageError, match="set_manual_backward_finalization"):
            backward(model)
            model.finalize_backward()


def test_another_dtype_than_in_prepare() -> None:
    with session() as opened:
        model = sharded()
        optimizer = adam(model)
        opened.prepare(model, optimizer)
        model.double()
        with pytest.raises(gradlane.UsageError, match=r"in torch\.float64, and had .*float32"):
            model(torch.ones(2, 3).double()).square().sum().backward()


def test_a_backward_that_an_exception_ends() -> None:
    """The other nodes wait for the rest of its gradients, so the session cannot go on."""

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Any) -> Any:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *gradient: Any) -> Any:
            raise RuntimeError("out of memory")

    with session() as opened:
        model = sharded()
        optimizer = adam(model)
        opened.prepare(model, optimizer)
        backward(model)
        optimizer.step()
        inputs = Failing.apply(torch.ones(2, 3, requires_grad=True))
        with pytest.raises(RuntimeError, match="out of memory"):
            model(inputs).square().sum().backward()
        with pytest.raises(gradlane.UsageError, match="an exception has ended a backward"):
            model(torch.ones(2, 3))
        with pytest.raises(gradlane.UsageError, match="an exception has ended a backward"):
            optimizer.step()


def test_buffers_are_each_ranks_own(recwarn: pytest.WarningsRecorder) -> None:
    with session() as opened:
        model = sharded()
        model.register_buffer("count", torch.zeros(2))
        opened.prepare(model, adam(model))
    # Alone there is nobody whose buffers could differ.
    assert not [one for one in recwarn if "leaves 'count'" in str(one.message)]


def test_a_closed_session_leaves_fsdp_as_it_was() -> None:
    model = sharded()
    optimizer = adam(model)
    with session() as opened:
        opened.prepare(model, optimizer)
        assert opened.models == [model] and "models=1" in repr(opened)
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        assert opened.step == 1
        metrics = json.loads(json.dumps(opened.metrics()))
        assert metrics["step"] == 1 and len(metrics["channels"]) == 1
        assert [choice.tensor for choice in opened.monitoring.codecs] == ["<root>", "0"]
        opened.close()
    backward(model)
    optimizer.step()
    with session() as opened:
        opened.prepare(model, optimizer)
        backward(model)
