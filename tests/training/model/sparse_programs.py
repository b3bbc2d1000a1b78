"""Models with sparse gradients, loops over them, and what rank processes run with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import Store

import gradlane
from tests.training.model.models import seeded
from tests.training.model.reference import ReferenceSession, average, snapshot
from tests.training.model.scenarios import digest, open_session
from tests.training.node.node_programs import opened

STEPS = 5
COUNT = 30


class Words(nn.Module):
    """A sparse embedding."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.words = nn.Embedding(COUNT, 6, sparse=True, padding_idx=0, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.words(tokens)
        return output


class Bags(nn.Module):
    """Means of bags of rows, some of them empty."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(COUNT, 6, sparse=True, mode="mean")

    def forward(self, tokens: Tensor) -> Tensor:
        offsets = torch.tensor([0, 0, tokens.numel() // 2])
        output: Tensor = self.words(tokens.flatten(), offsets)
        return output


class Mixed(nn.Module):
    """A sparse embedding that is used twice, another one, and layers that are dense."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(COUNT, 6, sparse=True)
        self.places = nn.EmbeddingBag(9, 6, sparse=True, mode="sum")
        self.inner = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, tokens: Tensor) -> Tensor:
        values = self.words(tokens) + self.places(tokens.flatten().remainder(9)[None])
        output: Tensor = self.inner(values).tanh() * self.scale + self.words(tokens + 1)
        return output


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "words": Words,
    "bags": Bags,
    "mixed": Mixed,
    "bf16": lambda: Words(torch.bfloat16),
    "f64": lambda: Words(torch.float64),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda given: torch.optim.SGD(given, lr=0.1),
    "sgd-maximize": lambda given: torch.optim.SGD(given, lr=0.1, maximize=True, foreach=True),
    "sgd-momentum": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
    "sgd-decay": lambda given: torch.optim.SGD(given, lr=0.1, weight_decay=0.1),
    "adagrad": lambda given: torch.optim.Adagrad(given, lr=0.1, initial_accumulator_value=0.1),
    "adagrad-decay": lambda given: torch.optim.Adagrad(given, lr=0.1, lr_decay=0.1),
    "adam": lambda given: torch.optim.Adam(given, lr=0.1),
    "sparse-adam": lambda given: torch.optim.SparseAdam(list(given), lr=0.1),
}


def loss_of(model: nn.Module, rank: int, step: int, count: int | None = None) -> Tensor:
    """The loss of a rank's own batch, whose size differs from rank to rank; maybe of no words."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    shape = (2, 2 + rank if count is None else count)
    tokens = torch.randint(COUNT - 1, shape, generator=generator)
    output: Tensor = model(tokens).float().square()
    return output.sum() * (1 + rank)


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


Program = Callable[[Any, nn.Module, torch.optim.Optimizer, int], None]


def plain(session: Any, model: nn.Module, optimizer: Any, step: int) -> None:
    backward(loss_of(model, session.rank, step))


def accumulated(session: Any, model: nn.Module, optimizer: Any, step: int) -> None:
    with session.no_sync():
        backward(loss_of(model, session.rank, 50 + step))
    backward(loss_of(model, session.rank, step))


def only_accumulated(session: Any, model: nn.Module, optimizer: Any, step: int) -> None:
    with session.no_sync():
        backward(loss_of(model, session.rank, 50 + step))
        backward(loss_of(model, session.rank, step))


def twice(session: Any, model: nn.Module, optimizer: Any, step: int) -> None:
    backward(loss_of(model, session.rank, 50 + step))
    backward(loss_of(model, session.rank, step))


def sometimes(session: Any, model: nn.Module, optimizer: Any, step: int) -> None:
    """In some steps ranks have no gradient of the embeddings, or one without rows."""
    skips = (session.rank + step) % 3 == 0
    if skips and isinstance(model, Mixed):
        backward(model.scale.square().sum())
    else:
        backward(loss_of(model, session.rank, step, count=0 if skips else None))


def no_rows(session: Any, model: nn.Module, optimizer: Any, step: int) -> None:
    backward(loss_of(model, session.rank, step, count=0 if step % 2 else None))


def all_rows(session: Any, model: nn.Module, optimizer: Any, step: int) -> None:
    backward(model(torch.arange(COUNT - 1).view(1, -1)).float().square().sum() * session.rank)


def weighted(session: Any, model: nn.Module, optimizer: Any, step: int) -> None:
    session.weight(3 + 5 * session.rank)
    backward(loss_of(model, session.rank, step))


def clipped(session: Any, model: nn.Module, optimizer: Any, step: int) -> None:
    backward(loss_of(model, session.rank, step))
    session.clip_grad_norm_(0.05, model=model)


def clipped_by_torch(session: Any, model: nn.Module, optimizer: Any, step: int) -> None:
    backward(loss_of(model, session.rank, step))
    if isinstance(session, ReferenceSession):
        average(session, model)
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.05) > 0.05


def zeroed_in_place(session: Any, model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    backward(loss_of(model, session.rank, step))


def forgotten(session: Any, model: nn.Module, optimizer: Any, step: int) -> None:
    """A step that is not taken, and one that is."""
    backward(loss_of(model, session.rank, 90 + step))
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    backward(loss_of(model, session.rank, step))


def on_top_of_means(session: Any, model: nn.Module, optimizer: Any, step: int) -> None:
    """The mean is looked at, and another backward adds to it."""
    backward(loss_of(model, session.rank, step))
    average(session, model)
    if step % 2:
        backward(loss_of(model, session.rank, 50 + step))
        if isinstance(session, ReferenceSession):
            session.forget()


def scaled(session: Any, model: nn.Module, optimizer: Any, step: int) -> None:
    """A scaler of one step, whose loss is finite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    backward(scaler.scale(loss_of(model, session.rank, step)))
    if isinstance(session, ReferenceSession):
        average(session, model)
    scaler.unscale_(optimizer)


def weighted_and_clipped(session: Any, model: nn.Module, optimizer: Any, step: int) -> None:
    session.weight(4 << session.rank)
    backward(loss_of(model, session.rank, step))
    session.clip_grad_norm_(0.05, model=model)


def scaled_and_clipped(session: Any, model: nn.Module, optimizer: Any, step: int) -> None:
    scaled(session, model, optimizer, step)
    session.clip_grad_norm_(0.05, model=model)


def clipped_and_forgotten(session: Any, model: nn.Module, optimizer: Any, step: int) -> None:
    """The norm of a step that is not taken is read all the same."""
    sometimes(session, model, optimizer, 90 + step)
    norm = session.clip_grad_norm_(0.05, model=model)
    optimizer.zero_grad()
    if isinstance(session, ReferenceSession):
        session.forget()
    sometimes(session, model, optimizer, step)
    session.clip_grad_norm_(0.01 * norm.item(), model=model)


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        plain,
        accumulated,
        only_accumulated,
        twice,
        sometimes,
        no_rows,
        all_rows,
        weighted,
        clipped,
        clipped_by_torch,
        zeroed_in_place,
        forgotten,
        on_top_of_means,
        scaled,
        scaled_and_clipped,
        clipped_and_forgotten,
    )
}


def trains(
    session: Any, build: str, optimizer_name: str, program: str = "plain", **given: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Train; return the parameters and the optimizer's tensors."""
    model = seeded(BUILDS[build])
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    session.prepare(model, optimizer, **given)
    for step in range(STEPS):
        PROGRAMS[program](session, model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model), state_of(optimizer)


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all tensors of an optimizer's state."""
    return [
        value.clone()
        for group in optimizer.param_groups
        for parameter in group["params"]
        for _, value in sorted(optimizer.state[parameter].items())
        if isinstance(value, Tensor)
    ]


# ---- what processes run


def compare(
    store: Store, rank: int, world_size: int, job: str, cases: list[tuple[str, str, str]]
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Train each (model, optimizer, program) over real connections."""
    found = []
    for number, case in enumerate(cases):
        with open_session(store, rank, world_size, f"{job}-{number}") as session:
            found.append(trains(session, *case))
    return found


def count_bytes(
    store: Store, rank: int, world_size: int, job: str, rows: int, sparse: bool
) -> dict[str, Any]:
    """Count what a port sends of an embedding of 200,000 x 64 in each of three steps."""
    with open_session(store, rank, world_size, job) as session:
        model = seeded(lambda: nn.Embedding(200_000, 64, sparse=sparse))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        before = 0
        for step in range(4):
            if step == 1:
                session.synchronize()
                before = session.metrics()["tx_payload_bytes"]
            generator = torch.Generator().manual_seed(10 * step + rank)
            tokens = torch.randperm(200_000, generator=generator)[:rows]
            backward(model(tokens).square().sum())
            optimizer.step()
            optimizer.zero_grad()
        session.synchronize()
        sent = session.metrics()["tx_payload_bytes"] - before
        return {"sent": sent / 3, "digest": digest(model), "schemes": session.monitoring.schemes}


def on_nodes(
    store: Store,
    rank: int,
    world_size: int,
    job: str,
    inner: int,
    optimizer_name: str,
    **options: Any,
) -> dict[str, Any]:
    """Train a sparse embedding of 1,000 x 64 and a dense square matrix, two ranks a node."""
    with opened(store, rank, world_size, job, **options) as session:
        model = nn.Sequential(nn.Embedding(1000, 64, sparse=True))
        if inner:
            model.append(nn.Linear(64, inner))
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        session.prepare(model, optimizer)
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * step + rank)
            backward(model(torch.randint(1000, (8,), generator=generator)).square().sum())
            optimizer.step()
            optimizer.zero_grad()
        session.synchronize()
        return {"digest": digest(model), "schemes": session.monitoring.schemes}


def resumed(
    store: Store, rank: int, world_size: int, job: str, folder: str, stops_after: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Train four steps with checkpoints; end after some of them, or go on where others ended."""
    checkpoints = gradlane.Checkpoints(folder, every=2) if folder else gradlane.Checkpoints()
    with open_session(store, rank, world_size, job, checkpoints=checkpoints) as session:
        model = seeded(Words)
        optimizer = OPTIMIZERS["sparse-adam"](model.parameters())
        session.prepare(model, optimizer)
        for step in range(session.restore() if folder else 0, stops_after):
            plain(session, model, optimizer, step)
            optimizer.step()
            optimizer.zero_grad()
        session.synchronize()
        return snapshot(model), state_of(optimizer)
