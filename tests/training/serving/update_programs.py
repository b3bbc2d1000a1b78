"""What ranks do in the tests of ranks that serve and update: they train in every way, and err."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gradlane
from tests.training.model import scenarios
from tests.training.serving.rank_programs import run_roles


def _optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of two groups, listed in another order than the model's parameters."""
    parameters = list(model.parameters())
    groups = [
        {"params": parameters[1:], "weight_decay": 0.1},
        {"params": parameters[:1], "weight_decay": 0.0},
    ]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
    return torch.optim.AdamW(groups, lr=3e-3)


def _halve(model: nn.Module) -> None:
    """Change parameters in place, and where their memory is."""
    first, *others = model.parameters()
    with torch.no_grad():
        for parameter in others:
            parameter.mul_(0.5)
    first.data = first.detach().clone() * 0.5


def _training(
    model_name: str, kind: str, steps: int, events: dict[str, int], folder: str | None
) -> Callable[[Any], Any]:
    """Return what a rank that trains does.

    Args:
        model_name: of `scenarios.MODELS`.
        kind: `sgd` or `adamw`.
        steps: until which it trains; those of a checkpoint in the folder are not taken again.
        events: the step before which something else happens, by its name.
        folder: of checkpoints, or None.
    """

    def train(session: Any) -> Any:
        model = scenarios.MODELS[model_name]()
        if session.rank:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
        optimizer = _optimizer(kind, model)
        session.prepare(model, optimizer)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.05, total_steps=20, cycle_momentum=True
        )
        taken = session.restore() if folder is not None else 0
        for _ in range(taken):
            schedule.step()
        saved: Any = None
        for step in range(taken + 1, steps + 1):
            happens = {name for name, when in events.items() if when == step}
            if "halve" in happens:
                _halve(model)
            if "again" in happens:
                session.prepare(model, optimizer)
            if "save" in happens:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            if "load" in happens:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            if "forget" in happens:
                optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
            if "accumulate" in happens:
                with session.no_sync():
                    _loss(model_name, model, session.rank, 100 + step).backward()  # type: ignore[no-untyped-call]
            _loss(model_name, model, session.rank, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        session.synchronize()
        state = scenarios.state_digest(optimizer.state_dict())
        return scenarios.digest(model), state, session.metrics()["step"]

    return train


def _loss(model_name: str, model: nn.Module, rank: int, step: int) -> Tensor:
    return scenarios.loss_of(model_name, model, rank, step)


def digests(
    store: Any,
    process: int,
    processes: int,
    job: str,
    *,
    workers: int,
    servers: int,
    runs: list[dict[str, Any]],
) -> list[Any]:
    """Train each run; parameters, optimizer state and steps of each, or what was served."""
    results = []
    for number, run in enumerate(runs):
        options = dict(run)
        train = _training(
            options.pop("model_name"),
            options.pop("kind"),
            options.pop("steps"),
            options.pop("events"),
            options.get("checkpoint_folder"),
        )
        result = run_roles(
            store,
            process,
            processes,
            f"{job}-{number}",
            workers,
            servers,
            train,
            update="server",
            **options,
        )
        results.append(result)
    return results


def differ(store: Any, process: int, processes: int, job: str, *, how: str) -> str:
    """Ranks that train do what servers cannot follow; all ranks tell how they end."""

    def train(session: Any) -> None:
        model = scenarios.MODELS["attention"]()
        optimizer = _optimizer("sgd", model)
        session.prepare(model, optimizer)
        for step in range(1, 5):
            if step == 3 and how == "uncounted":
                next(model.parameters()).data.mul_(0.5)
            if step == 3 and how == "lr" and session.rank == 1:
                optimizer.param_groups[0]["lr"] = 0.25
            if step == 3 and how == "parameters" and session.rank == 1:
                _halve(model)
            _loss("attention", model, session.rank, step).backward()  # type: ignore[no-untyped-call]
            if step == 3 and how == "clip":
                session.clip_grad_norm_(1.0)
            if step == 3 and how == "scale":
                scaler = torch.amp.GradScaler("cpu")
                scaler.scale(torch.ones(()))
                scaler.unscale_(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        session.synchronize()

    try:
        run_roles(store, process, processes, job, 2, 1, train, update="server")
    except gradlane.GradlaneError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
