"""What each rank does in the tests of default devices and dtypes: trains, saves, goes on.

The model is made before the defaults are set, as a program's own tensors are made with a device and
a dtype of their own: whatever takes the defaults then is the package's.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Store

import gradlane.ddp
from tests.training.node.node_programs import opened

STEPS = 3


class Model(nn.Module):
    """Layers for factors, one that rank 1 leaves out, an expanded buffer, batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)
        self.rest = nn.Linear(64, 64)
        self.register_buffer("places", torch.arange(2.0).expand(3, 2), persistent=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)

    def forward(self, values: Tensor, more: bool) -> Tensor:
        hidden: Tensor = self.norm(self.first(values)).tanh()
        return self.rest(hidden) if more else hidden


@contextlib.contextmanager
def defaults(are_set: bool) -> Iterator[None]:
    """Make tensors on the meta device, in float64, where nothing else is said."""
    if are_set:
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def values_of(rank: int, step: int) -> Tensor:
    """The inputs of a step."""
    numbers = np.random.default_rng(10 * step + rank).standard_normal((4, 64), dtype=np.float32)
    return torch.from_numpy(numbers)


def steps(model: Any, optimizer: torch.optim.Optimizer, rank: int, first: int) -> None:
    """Train some steps."""
    for step in range(first, first + STEPS):
        model(values_of(rank, step), more=rank != 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)


def digest(*states: Any) -> str:
    """Return a hash of all tensors in some states."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            found.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for one in value:
                add(one)

    add(list(states))
    return found.hexdigest()[:16]


def trained(
    store: Store,
    rank: int,
    world_size: int,
    job: str,
    *,
    are_set: bool,
    optimizer_name: str = "sgd",
    **options: Any,
) -> str:
    """Train, take all states, load them into another model, and go on."""
    makes: dict[str, Any] = {
        "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    }
    first, second = Model(), Model()
    others = [makes[optimizer_name](model) for model in (first, second)]
    with defaults(are_set):
        with opened(store, rank, world_size, job, **options) as session:
            session.prepare(first, others[0])
            steps(first, others[0], rank, 0)
            states = first.state_dict(), others[0].state_dict(), session.state_dict()
            before = digest(*states)
        with opened(store, rank, world_size, job, **options) as session:
            session.prepare(second, others[1])
            second.load_state_dict(states[0])
            others[1].load_state_dict(states[1])
            session.load_state_dict(states[2])
            steps(second, others[1], rank, STEPS)
            session.synchronize()
            after = digest(second.state_dict(), others[1].state_dict(), session.state_dict())
    return before + after


def checkpointed(
    store: Store, rank: int, world_size: int, job: str, *, are_set: bool, folder: str
) -> str:
    """Train with checkpoints, and restore one into another model."""
    options: dict[str, Any] = {
        "checkpoint_folder": folder,
        "checkpoint_every": 2,
        "update": "server",
    }
    first, second = Model(), Model()
    others = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (first, second)]
    with defaults(are_set):
        with opened(store, rank, world_size, job, **options) as session:
            session.prepare(first, others[0])
            steps(first, others[0], rank, 0)
        with opened(store, rank, world_size, job, **options) as session:
            session.prepare(second, others[1])
            session.restore()
            session.synchronize()
            return digest(second.state_dict(), others[1].state_dict())


def pushed(store: Store, rank: int, world_size: int, job: str, *, are_set: bool) -> str:
    """Average arrays in a codec, some of which a rank does not have."""
    with defaults(are_set), opened(store, rank, world_size, job, codec="int8") as session:
        for name in ("one", "other"):
            session.arrays.register(name, (4, 64), "float32")
        session.arrays.spread(
            {name: values_of(rank, 0).numpy().copy() for name in ("one", "other")}
        )
        session.arrays.push("one", values_of(rank, 1).numpy())
        session.arrays.push("other", None if rank == 1 else values_of(rank, 2))
        return digest(
            *(torch.from_numpy(np.asarray(session.arrays.wait(name))) for name in ("one", "other"))
        )


def under_ddp(
    store: Store, rank: int, world_size: int, job: str, *, are_set: bool, spec: str, route: str
) -> str:
    """Train under DDP with a codec, and go on from the hook's state."""
    prefix = dist.PrefixStore(job, store)  # type: ignore[attr-defined]
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=prefix, rank=rank, world_size=world_size, timeout=limit)
    last = nn.Linear(64, 1, bias=False)
    nn.init.constant_(last.weight, 0.1)
    model = nn.Sequential(Model().first, nn.Tanh(), last)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        with defaults(are_set):
            state, hook = gradlane.ddp.ddp_hook(spec, route=route, model=wrapped)
            wrapped.register_comm_hook(state, hook)
            for step in range(STEPS):
                wrapped(values_of(rank, step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            state.load_state_dict(state.state_dict())
            found = digest(model.state_dict(), state.state_dict())
            state.close()
        del wrapped
        return found
    finally:
        dist.destroy_process_group()
