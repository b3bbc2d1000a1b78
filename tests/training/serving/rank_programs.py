"""What ranks do in the tests of ranks that only serve: some processes train, the others serve.

There may be more ranks that serve than processes left for them: those are threads then, which a
rank that has no model may well be.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

import gradlane
from gradlane.training.options.options import keywords_of
from tests.training.model import scenarios


def _init(store: Any, rank: int, job: str, workers: int, servers: int, **options: Any) -> Any:
    given = {"connect_timeout_s": 60.0, "summary": False, **options}
    return gradlane.init(
        **keywords_of(
            store=store,
            rank=rank,
            world_size=workers + servers,
            workers=workers if servers else None,
            job=job,
            advertise="127.0.0.1",
            **given,
        )
    )


def run_roles(
    store: Any,
    process: int,
    processes: int,
    job: str,
    workers: int,
    servers: int,
    train: Callable[[Any], Any],
    **options: Any,
) -> Any:
    """Train on the first processes, in a session each; all others serve these."""
    if process < workers:
        with _init(store, process, job, workers, servers, **options) as session:
            assert (session.world_size, session.serves) == (workers, False)
            return train(session)
    left = processes - workers
    mine = range(workers + process - workers, workers + servers, left)

    def serve(rank: int) -> list[dict[str, int]]:
        with _init(store, rank, job, workers, servers, **options) as session:
            return [asdict(one) for one in session.serve()]

    with ThreadPoolExecutor(max(1, len(mine))) as threads:
        return list(threads.map(serve, mine))


def digests(
    store: Any,
    process: int,
    processes: int,
    job: str,
    *,
    workers: int,
    servers: int,
    runs: list[dict[str, Any]],
    model_name: str,
    steps: int,
) -> list[Any]:
    """Train with each of some options; parameters as a digest, or what was served."""

    def train(session: Any) -> str:
        model = scenarios.MODELS[model_name]()
        if session.rank:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
        optimizer = scenarios.optimizer_of("adamw", model)
        session.prepare(model, optimizer)
        for step in range(1, steps + 1):
            loss = scenarios.loss_of(model_name, model, session.rank, step)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        session.synchronize()
        return scenarios.digest(model)

    return [
        run_roles(store, process, processes, f"{job}-{number}", workers, servers, train, **options)
        for number, options in enumerate(runs)
    ]


def whole_life(store: Any, process: int, processes: int, job: str, *, servers: int) -> Any:
    """Two models, one of them connected anew, and uneven data in the end."""

    def train(session: Any) -> Any:
        torch.manual_seed(0)
        models = [nn.Linear(30, 20) for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            session.prepare(model, optimizer)

        def step(number: int) -> None:
            for model, optimizer in zip(models, optimizers, strict=True):
                generator = torch.Generator().manual_seed(100 * number + session.rank)
                model(torch.randn(4, 30, generator=generator)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        for number in range(3):
            step(number)
        list(models[1].parameters())[1].requires_grad_(False)
        optimizers[1] = torch.optim.SGD(list(models[1].parameters())[:1], lr=0.1)
        session.prepare(models[1], optimizers[1])
        with session.join():
            for number in range(3, 5 + session.rank):
                step(number)
        session.synchronize()
        state = session.state_dict()
        return [scenarios.digest(model) for model in models], sorted(state)

    return run_roles(store, process, processes, job, 2, servers, train)


def disagree(store: Any, process: int, processes: int, job: str) -> str:
    """One rank is told another number of ranks that train than the others."""
    workers = 1 if process == 2 else 2
    try:
        with gradlane.init(
            workers=workers,
            rendezvous=gradlane.Rendezvous(
                store=store, rank=process, world_size=processes, job=job
            ),
            network=gradlane.Network(advertise="127.0.0.1", connect_timeout_s=30.0),
            monitoring=gradlane.Monitoring(summary=False),
        ) as session:
            if session.serves:
                session.serve()
            else:
                model = nn.Linear(3, 2)
                session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    except gradlane.GradlaneError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
