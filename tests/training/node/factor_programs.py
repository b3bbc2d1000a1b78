"""Programs of ranks on emulated nodes whose weights travel as factors or rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradlane.training.plans.settings import LEARNING_STEPS
from tests.training.node.node_programs import digest, opened

WIDE, LONG = 256, 512


class Weights(nn.Module):
    """Weights alone, all of which have factors: one is used twice, one by some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(900, WIDE)
        self.first = nn.Linear(WIDE, LONG, bias=False)
        self.again = nn.Linear(LONG, LONG, bias=False)
        self.sometimes = nn.Linear(LONG, LONG, bias=False)
        self.last = nn.Linear(LONG, 3, bias=False)

    def forward(self, words: Tensor, more: bool) -> Tensor:
        hidden = self.again(self.again(self.first(self.words(words))).tanh())
        out: Tensor = self.last(self.sometimes(hidden) if more else hidden)
        return out


def loss_of(model: nn.Module, rank: int, step: int, *, more: bool = True) -> Tensor:
    """Return a rank's loss; batches differ from rank to rank."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    words = torch.randint(900, (1 + rank % 3,), generator=draw)
    loss: Tensor = model(words, more).square().sum()
    return loss


def plain(session: Any, model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    loss_of(model, rank, step).backward()  # type: ignore[no-untyped-call]


def clipped(session: Any, model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    plain(session, model, optimizer, rank, step)
    assert session.clip_grad_norm_(0.05) > 0


def missing(session: Any, model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    """Of some weights one rank, one node or nobody has a gradient."""
    if step == 1 and rank < 2:
        model.get_submodule("words")(torch.tensor([rank])).sum().backward()
        return
    more = (rank == 3, rank > 1, False, True)[step % 4]
    loss_of(model, rank, step, more=more).backward()  # type: ignore[no-untyped-call]


def accumulated(session: Any, model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    """Whole gradients travel in place of factors in every other step."""
    if step % 2:
        with session.no_sync():
            plain(session, model, optimizer, rank, 50 + step)
    plain(session, model, optimizer, rank, step)


PROGRAMS: dict[str, Callable[..., None]] = {
    one.__name__: one for one in (plain, clipped, missing, accumulated)
}


def trained(
    store: Any, rank: int, world_size: int, job: str, *, program: str, **options: Any
) -> dict[str, Any]:
    """Train the weights, two ranks a node if they say nothing else."""
    with opened(store, rank, world_size, job, **options) as session:
        model = Weights()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
        session.prepare(model, optimizer)
        before = session.metrics()["tx_payload_bytes"]
        for step in range(4):
            PROGRAMS[program](session, model, optimizer, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        session.synchronize()
        sent = session.metrics()["tx_payload_bytes"] - before
        return {
            "digest": digest(model),
            "sent": sent,
            "peers": [row["tx_payload_bytes"] for row in session.metrics()["peers"]],
            "schemes": dict(session.monitoring.schemes),
        }


def sparse(store: Any, rank: int, world_size: int, job: str, **options: Any) -> dict[str, Any]:
    """Train an embedding whose gradient is sparse, with an optimizer that takes no other."""
    with opened(store, rank, world_size, job, **options) as session:
        torch.manual_seed(3)
        model = nn.Embedding(900, 40, sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        for step in range(3):
            draw = torch.Generator().manual_seed(100 * step + rank)
            words = torch.randint(900, (2 + rank,), generator=draw)
            model(words).square().sum().backward()
            optimizer.step()  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
        session.synchronize()
        return {"digest": digest(model), "sent": session.metrics()["tx_payload_bytes"]}


def planned(store: Any, rank: int, world_size: int, job: str, **options: Any) -> dict[str, Any]:
    """Train by the plan that Poseidon's rule finds."""
    with opened(store, rank, world_size, job, **options) as session:
        model = Weights()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer, plan="poseidon")
        for step in range(LEARNING_STEPS + 3):
            plain(session, model, optimizer, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        session.synchronize()
        return {"digest": digest(model), "schemes": dict(session.monitoring.schemes)}
