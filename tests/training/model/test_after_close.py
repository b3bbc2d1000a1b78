"""Training outside of a session, and ends of the program that say that it has failed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradlane
from gradlane.training.session import after_close
from tests.training.model.ranks import run_ranks

Pair = tuple[nn.Module, torch.optim.Optimizer]


def trained(session: Any, steps: int, pair: Pair | None = None) -> Pair:
    """Prepare a model, and train some steps."""
    if pair is None:
        model = nn.Linear(3, 2)
        pair = model, torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(*pair)
    for _ in range(steps):
        train(pair)
    return pair


def train(pair: Pair) -> None:
    model, optimizer = pair
    loss: Any = model(torch.ones(2, 3)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_loop_outside_of_the_session_is_refused() -> None:
    for pair in run_ranks(2, lambda session: trained(session, 0)):
        with pytest.raises(gradlane.UsageError, match="has trained no step: each of the 2 ranks"):
            train(pair)
        train(pair)  # Said once.


def test_steps_after_the_session_are_warned_of_once() -> None:
    for pair in run_ranks(2, lambda session: trained(session, 3)):
        with pytest.warns(UserWarning, match="from step 3 on this rank trains alone"):
            train(pair)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(pair)


def by_scaler(pair: Pair) -> None:
    model, optimizer = pair
    scaler = torch.amp.GradScaler("cpu")
    loss: Any = model(torch.ones(2, 3)).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def by_closure(pair: Pair) -> None:
    model, optimizer = pair

    def closure() -> float:
        optimizer.zero_grad()
        loss: Any = model(torch.ones(2, 3)).sum()
        loss.backward()
        return float(loss.detach())

    optimizer.step(closure)


def with_a_scheduler(pair: Pair) -> None:
    torch.optim.lr_scheduler.StepLR(pair[1], 1)
    train(pair)


def with_loaded_state(pair: Pair) -> None:
    pair[1].load_state_dict(pair[1].state_dict())
    train(pair)


@pytest.mark.parametrize("go_on", [by_scaler, by_closure, with_a_scheduler, with_loaded_state])
@pytest.mark.parametrize(
    "options",
    [{}, {"update": "server"}, {"update": gradlane.Local(steps=2)}, {"going_on": True}],
    ids=str,
)
def test_loops_of_all_kinds_after_the_session(
    go_on: Callable[[Pair], None], options: dict[str, Any]
) -> None:
    pairs = run_ranks(2, lambda session: trained(session, 0), **options)
    with pytest.raises(gradlane.UsageError, match="has trained no step"):
        go_on(pairs[0])
    pairs = run_ranks(2, lambda session: trained(session, 2), **options)
    with pytest.warns(UserWarning, match="from step 2 on this rank trains alone"):
        go_on(pairs[1])


@pytest.mark.parametrize("where", ["alone", "first", "last"])
def test_another_optimizer_after_the_session_is_warned_of_once(where: str) -> None:
    """As for a second phase of a training that is no more in a session."""
    for model, _ in run_ranks(2, lambda session: trained(session, 3)):
        head = nn.Linear(2, 2)
        parameters = [*model.parameters()]
        if where == "first":
            parameters = [*parameters, *head.parameters()]
        elif where == "last":
            parameters = [*head.parameters(), *parameters]
        second = torch.optim.AdamW(parameters)
        with pytest.warns(UserWarning, match=r"another AdamW .* closed after step 3: this rank"):
            train((model, second))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train((model, second))
            train((model, torch.optim.SGD(parameters, lr=0.1)))


def test_another_optimizer_in_another_session_is_no_mistake() -> None:
    pairs = run_ranks(2, lambda session: trained(session, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        others = [torch.optim.AdamW(model.parameters()) for model, _ in pairs]
        run_ranks(
            2, lambda session: trained(session, 1, (pairs[session.rank][0], others[session.rank]))
        )
        train((nn.Linear(3, 2), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)))


def test_several_optimizers_after_the_session() -> None:
    def body(session: Any) -> list[torch.optim.Optimizer]:
        model = nn.Linear(3, 2)
        optimizers: Any = [
            torch.optim.SGD([model.weight], lr=0.1),
            torch.optim.AdamW([model.bias]),
        ]
        session.prepare(model, optimizers)
        return optimizers  # type: ignore[no-any-return]

    for optimizers in run_ranks(2, body):
        for optimizer in optimizers:
            with pytest.raises(gradlane.UsageError, match="after the session was closed"):
                optimizer.step()


def test_another_session_and_one_rank_alone_are_no_mistake() -> None:
    def body(session: Any) -> None:
        pair = trained(session, 1)
        session.close()
        after_close.forget(pair[1])
        train(pair)

    run_ranks(2, body)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (pair,) = run_ranks(1, lambda session: trained(session, 0))
        train(pair)


def test_a_model_that_is_trained_in_session_after_session() -> None:
    pairs = run_ranks(2, lambda session: trained(session, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pairs = run_ranks(2, lambda session: trained(session, 2, pairs[session.rank]))
