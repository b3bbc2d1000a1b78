"""What ranks do in the tests of stragglers: real processes, one of which is stopped at times."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import gradlane
from gradlane.training.core import rank_channel
from tests.training.model.prepared_models import seen_prepared

_LR = 0.01


@contextmanager
def _stopped(every_s: float, burst_s: float) -> Iterator[None]:
    """Stop this process again and again, from outside: a stopped one cannot continue itself."""
    me = os.getpid()
    # Whoever ends it may be stopped by it at that very moment.
    ends = f"trap 'kill -CONT {me}; exit' TERM"
    loop = f"while sleep {every_s}; do kill -STOP {me}; sleep {burst_s}; kill -CONT {me}; done"
    watcher = subprocess.Popen(["sh", "-c", f"{ends}; {loop}"])
    try:
        yield
    finally:
        watcher.terminate()
        watcher.wait()


def _digest(model: nn.Module) -> str:
    whole = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    return hashlib.sha256(whole).hexdigest()


def follow(
    store: Any,
    rank: int,
    world_size: int,
    job: str,
    *,
    stragglers: str,
    late: str,
    paced: bool,
    stops: bool,
    steps: int = 24,
    lanes: int | None = None,
) -> dict[str, Any]:
    """Train on gradients that are numbers; say which were given, and which steps have them."""
    model = nn.Linear(40, 30, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR)
    given: dict[int, float] = {}
    session = gradlane.init(
        strategy=gradlane.Strategy(slice_elems=100),
        stragglers=gradlane.Stragglers(rule=stragglers, late=late),
        servers=world_size - 1,
        rendezvous=gradlane.Rendezvous(store=store, rank=rank, world_size=world_size, job=job),
        monitoring=gradlane.Monitoring(summary=False),
        network=gradlane.Network(lanes=lanes),
    )
    with seen_prepared() as prepared_of:
        model, optimizer = session.prepare(model, optimizer)
    channel = prepared_of(model).channel
    passed: list[int] = []
    mine = range(1, steps + 1)
    batches = session.keep_pace(mine, lambda: passed.append(0)) if paced else iter(mine)
    stopping = stops and rank == world_size - 1
    with _stopped(0.05, 0.04) if stopping else _nothing():
        for step in batches:
            given[step] = float((rank + 1) * (step % 3 + 1))
            (model.weight * given[step]).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        session.synchronize()
    was_in = {step: rank_channel(channel, "participation").participation(step)[0] for step in mine}
    metrics = session.metrics()
    result = {
        "digest": _digest(model),
        "value": float(model.weight.detach().flatten()[0]),
        "uniform": bool((model.weight == model.weight.flatten()[0]).all()),
        "given": given,
        "was_in": was_in,
        "passed": len(passed),
        "decided": metrics["decided_steps"],
        "left_out": [row["left_out_steps"] for row in metrics["left_out"]],
    }
    session.close()
    return result


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def learn(
    store: Any,
    rank: int,
    world_size: int,
    job: str,
    *,
    stragglers: str,
    steps: int,
    late: str = "discard",
    codec: str = "raw",
) -> dict[str, Any]:
    """Train a small classifier with Adam, its rate scheduled, and return losses and a digest."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.8)
    draws = torch.Generator().manual_seed(rank)
    session = gradlane.init(
        codec=codec,
        stragglers=gradlane.Stragglers(rule=stragglers, late=late),
        servers=world_size - 1,
        rendezvous=gradlane.Rendezvous(store=store, rank=rank, world_size=world_size, job=job),
        monitoring=gradlane.Monitoring(summary=False),
    )
    model, optimizer = session.prepare(model, optimizer)
    losses = []
    with _stopped(0.1, 0.05) if rank == world_size - 1 else _nothing():
        for _ in session.keep_pace(range(steps), scheduler.step):
            samples = torch.randn(32, 16, generator=draws)
            loss = nn.functional.cross_entropy(model(samples), (samples.sum(1) > 0).long())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
        session.synchronize()
    result = {"digest": _digest(model), "losses": losses, "lr": scheduler.get_last_lr()}
    session.close()
    return result
