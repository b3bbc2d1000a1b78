"""Programs of ranks for the tests of the hook: small models under DDP over Gloo."""

from __future__ import annotations

import datetime
import gc
import hashlib
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Store

import gradlane
import gradlane.ddp
from gradlane.ddp.routes import ShardCodec
from gradlane.lab.runs.communication import mean_in_rank_order
from gradlane.lab.runs.ddp_hooks import register_hook
from gradlane_papers.accuracy.exchange import EmulatedExchange
from tests.dgc_oracle import DgcOracle

DGC_RATE = 0.02


def make_model(seed: int = 0) -> nn.Sequential:
    """Build a model of layers that fill several buckets of 64 kB, some of them tiny."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 64, 40),
        nn.ReLU(),
        nn.Linear(40, 65),
        nn.ReLU(),
        nn.Linear(65, 1),
    )


def _batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    inputs = torch.randn(8, 1, 8, 8, generator=generator)
    return inputs, inputs.mean(dim=(1, 2, 3)).unsqueeze(1) + 0.5


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def _train(ddp: nn.Module, rank: int, first: int, steps: int, lr: float) -> list[float]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
    losses = []
    for step in range(first, first + steps):
        inputs, targets = _batch(rank, step)
        loss = nn.functional.mse_loss(ddp(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


class _Group:
    """A Gloo group for one scenario."""

    def __init__(self, store: Store, rank: int, world_size: int, job: str) -> None:
        self._arguments = (dist.PrefixStore(job, store), rank, world_size)  # type: ignore[attr-defined]

    def __enter__(self) -> None:
        store, rank, world_size = self._arguments
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=60),
        )

    def __exit__(self, *_: object) -> None:
        gc.collect()
        dist.destroy_process_group()


def _wrapped(model: nn.Module) -> nn.parallel.DistributedDataParallel:
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.0625)


def train(
    store: Store,
    rank: int,
    world_size: int,
    job: str,
    *,
    hooks: list[dict[str, Any] | None],
    steps: int = 6,
    lr: float = 0.05,
) -> list[dict[str, Any]]:
    """Train once with each hook; None is the reference hook, which sums in rank order."""
    results = []
    with _Group(store, rank, world_size, job):
        for options in hooks:
            ddp = _wrapped(make_model())
            state = None
            if options is None:
                assert dist.group.WORLD is not None
                ddp.register_comm_hook(dist.group.WORLD, mean_in_rank_order)
            else:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    state, hook = gradlane.ddp.ddp_hook(model=ddp, **options)
                ddp.register_comm_hook(state, hook)
            losses = _train(ddp, rank, 0, steps, lr)
            result: dict[str, Any] = {"digest": _digest(ddp), "losses": losses}
            if state is not None:
                result |= {"sent_bytes": state.sent_bytes, "codecs": state.codecs}
                result |= {"route": state.route}
                state.close()
            results.append(result)
            del ddp, state
    return results


def conserve(
    store: Store, rank: int, world_size: int, job: str, *, spec: str, route: str, steps: int
) -> dict[str, Any]:
    """Return the sum of a parameter's means over steps, what is still kept of it, and the truth."""
    with _Group(store, rank, world_size, job), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = make_model()
        ddp = _wrapped(model)
        state, hook = gradlane.ddp.ddp_hook(spec, route=route, model=model, small_elems=0)
        ddp.register_comm_hook(state, hook)
        layer = model[3]
        assert isinstance(layer, nn.Linear)
        means = torch.zeros(layer.weight.numel(), dtype=torch.float64)
        truth = torch.zeros_like(means)
        for step in range(steps):
            inputs, targets = _batch(rank, step)
            loss = nn.functional.mse_loss(ddp(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            assert layer.weight.grad is not None
            means += layer.weight.grad.flatten().double()
            alone = make_model()
            alone.load_state_dict(model.state_dict())
            nn.functional.mse_loss(alone(inputs), targets).backward()  # type: ignore[no-untyped-call]
            gradient = alone[3].weight.grad
            assert isinstance(gradient, torch.Tensor)
            truth += gradient.flatten().double()
            ddp.zero_grad()
        number = [name for name, _ in model.named_parameters()].index("3.weight")
        # What the ranks keep of their gradients counts as a part of the mean of all.
        saved = state.state_dict()
        kept = saved["worker"][number].double() / world_size
        for (owner_number, first, numel), owned in saved["owner"].items():
            if owner_number == number:
                kept[first : first + numel] += owned.double()
        state.close()
        return {"means": means, "kept": kept, "truth": truth / world_size}


def resume(store: Store, rank: int, world_size: int, job: str, *, spec: str) -> dict[str, Any]:
    """Train 8 steps at once, and 4 and 4 with everything saved and loaded in between."""
    with _Group(store, rank, world_size, job):
        ddp = _wrapped(make_model())
        state, hook = gradlane.ddp.ddp_hook(spec, seed=3, small_elems=50)
        ddp.register_comm_hook(state, hook)
        _train(ddp, rank, 0, 4, 0.05)
        saved_state, saved_model = state.state_dict(), ddp.module.state_dict()
        saved_model = {name: value.clone() for name, value in saved_model.items()}
        _train(ddp, rank, 4, 4, 0.05)
        at_once = _digest(ddp)
        state.close()
        del ddp

        model = make_model(seed=1)
        model.load_state_dict(saved_model)
        # Buckets are made anew, in another order of parameters than those of a running DDP.
        ddp = _wrapped(model)
        state, hook = gradlane.ddp.ddp_hook(spec, seed=3, small_elems=50)
        state.load_state_dict(saved_state)
        ddp.register_comm_hook(state, hook)
        _train(ddp, rank, 4, 4, 0.05)
        resumed = _digest(ddp)
        step = state.step
        state.close()
        del ddp
    return {"at_once": at_once, "resumed": resumed, "step": step}


def spoil(store: Store, rank: int, world_size: int, job: str) -> dict[str, Any]:
    """Let one rank's gradient be NaN in one step, then see what the next step is."""
    finite = []
    with _Group(store, rank, world_size, job):
        model = make_model()
        ddp = _wrapped(model)
        state, hook = gradlane.ddp.ddp_hook("topk:ratio=0.01")
        ddp.register_comm_hook(state, hook)
        for step in range(3):
            inputs, targets = _batch(rank, step)
            if step == 1 and rank == world_size - 1:
                inputs[0, 0, 0, 0] = float("nan")
            nn.functional.mse_loss(ddp(inputs), targets).backward()  # type: ignore[no-untyped-call]
            gradients = [one.grad for one in model.parameters() if one.grad is not None]
            finite.append(all(bool(one.isfinite().all()) for one in gradients))
            ddp.zero_grad()
        state.close()
        del ddp
    return {"finite": finite}


def halve(store: Store, rank: int, world_size: int, job: str) -> dict[str, Any]:
    """Train a model whose gradients are bf16, with some parameters that no loss reaches."""
    with _Group(store, rank, world_size, job):
        model = make_model()
        model.append(nn.Identity())
        model.register_parameter("unused", nn.Parameter(torch.ones(300)))
        ddp = nn.parallel.DistributedDataParallel(
            model.bfloat16(), bucket_cap_mb=0.0625, find_unused_parameters=True
        )
        state, hook = gradlane.ddp.ddp_hook("qsgd:bits=8", small_elems=0)
        ddp.register_comm_hook(state, hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        losses = []
        for step in range(6):
            inputs, targets = _batch(rank, step)
            loss = nn.functional.mse_loss(ddp(inputs.bfloat16()).float(), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        parameters = torch.cat([one.detach().float().flatten() for one in model.parameters()])
        state.close()
        del ddp
    return {"parameters": parameters, "losses": losses}


def fail(store: Store, rank: int, world_size: int, job: str) -> str:
    """Let encoding fail in the second step, on every rank, and return what backward says."""
    with _Group(store, rank, world_size, job):
        ddp = _wrapped(make_model())
        state, hook = gradlane.ddp.ddp_hook("bf16")
        ddp.register_comm_hook(state, hook)
        _train(ddp, rank, 0, 2, 0.05)

        error = MemoryError("no room for the bytes")
        with mock.patch.object(ShardCodec, "encode", side_effect=error):
            try:
                _train(ddp, rank, 2, 1, 0.05)
            except RuntimeError as error:
                text = str(error)
        assert isinstance(state.failure, MemoryError)
        state.close()
        del ddp
    return text


def train_with_momentum(store: Store, rank: int, world_size: int, job: str) -> list[str]:
    """Step optimizers with momentum under `dgc`; return what each says, or nothing."""
    said = []
    with _Group(store, rank, world_size, job):
        model = make_model()
        ddp = _wrapped(model)
        state, hook = gradlane.ddp.ddp_hook("dgc:ratio=0.05")
        ddp.register_comm_hook(state, hook)
        other = nn.Linear(2, 2)
        plain = torch.optim.SGD(ddp.parameters(), lr=0.05)

        def step(optimizer: torch.optim.Optimizer, values: torch.Tensor) -> None:
            values.sum().backward()  # type: ignore[no-untyped-call]
            try:
                optimizer.step()
                said.append("")
            except gradlane.UsageError as error:
                said.append(str(error))

        inputs, _ = _batch(rank, 0)
        step(plain, ddp(inputs))
        step(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), ddp(inputs))
        step(torch.optim.AdamW(model.parameters()), ddp(inputs))
        step(torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9), other(torch.ones(1, 2)))
        torch.optim.lr_scheduler.OneCycleLR(plain, 0.1, total_steps=9)
        step(plain, ddp(inputs))
        state.close()
        step(plain, ddp.module(inputs))
        del ddp
    return said


def train_by_dgc(
    store: Store, rank: int, world_size: int, job: str, *, spec: str, steps: int
) -> list[torch.Tensor]:
    """Train under DDP with the hook's `dgc`, several buckets a step, and return the parameters."""
    with _Group(store, rank, world_size, job):
        model = make_model()
        ddp = _wrapped(model)
        state, hook = gradlane.ddp.ddp_hook(spec, model=ddp)
        ddp.register_comm_hook(state, hook)
        _train(ddp, rank, 0, steps, DGC_RATE)
        state.close()
        del ddp
    return [one.detach().clone() for one in model.parameters()]


def train_by_oracle(world_size: int, dgc: DgcOracle, steps: int) -> list[torch.Tensor]:
    """Do the same in one process, by the oracle."""
    model = make_model()
    parameters = list(model.parameters())
    for step in range(steps):
        gradients = []
        for rank in range(world_size):
            inputs, targets = _batch(rank, step)
            loss = nn.functional.mse_loss(model(inputs), targets)
            gradients.append(
                [one.flatten().numpy() for one in torch.autograd.grad(loss, parameters)]
            )
        means = dgc.step(step, gradients, [0.0] * len(parameters))
        with torch.no_grad():
            for one, mean in zip(parameters, means, strict=True):
                one.sub_(DGC_RATE * torch.from_numpy(mean).view_as(one))
    return [one.detach().clone() for one in parameters]


def train_in_lab(
    store: Store, rank: int, world_size: int, job: str, *, hooks: list[str]
) -> list[str]:
    """Train with hooks as the lab registers them and return digests of the parameters."""
    digests = []
    with _Group(store, rank, world_size, job):
        for hook in hooks:
            ddp = _wrapped(make_model())
            register_hook(ddp, hook)
            _train(ddp, rank, 0, 5, 0.05)
            digests.append(_digest(ddp))
            del ddp
    return digests


def emulate(spec: str, *, workers: int, steps: int, lr: float = 0.05) -> str:
    """Train as `train` does, with the study's emulated workers, and return the digest."""
    model = make_model()
    exchange = EmulatedExchange(model, spec, workers=workers, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    parameters = list(model.parameters())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for step in range(steps):
        gradients = []
        for worker in range(workers):
            inputs, targets = _batch(worker, step)
            loss = nn.functional.mse_loss(model(inputs), targets)
            gradients.append(torch.autograd.grad(loss, parameters))
        for parameter, mean in zip(parameters, exchange.average(gradients, step), strict=True):
            parameter.grad = mean
        optimizer.step()
    torch.set_num_threads(threads)
    return _digest(model)


def refusal_of(store: Store, rank: int, world_size: int, job: str, *, spec: str) -> str:
    """Return what is said of a codec that the hook refuses."""
    with _Group(store, rank, world_size, job):
        try:
            gradlane.ddp.ddp_hook(spec)
        except ValueError as error:
            return str(error)
    return ""
