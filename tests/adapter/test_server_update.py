"""Updates on the servers: what is right, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlane
from tests.adapter.models import Awkward, seeded
from tests.adapter.ranks import run_ranks
from tests.adapter.reference import snapshot, train_reference
from tests.adapter.test_training import awkward_loss


def run_alone(body: Callable[[Any], Any], **options: Any) -> Any:
    return run_ranks(1, body, update="server", **options)[0]


def prepared(session: Any, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **settings)
    session.prepare(model, optimizer)
    return model, optimizer


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 3)).square().sum().backward()


def test_training_is_close_to_torchs_and_equal_on_all_ranks() -> None:
    settings: dict[str, Any] = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}

    def body(session: Any) -> list[Tensor]:
        model = seeded(Awkward)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, **settings)
        session.prepare(model, optimizer)
        for step in range(1, 11):
            awkward_loss(model, session.rank, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model)

    (expected, *_) = train_reference(
        2,
        10,
        lambda: seeded(Awkward),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.05, **settings),
        awkward_loss,
    )
    first, second = run_ranks(2, body, update="server")
    for one, other, wanted in zip(first, second, snapshot(expected), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, wanted, rtol=1e-6, atol=1e-6)


def test_only_plain_sgd() -> None:
    def body(session: Any) -> None:
        model = nn.Linear(2, 2)
        with pytest.raises(ValueError, match=r"runs torch\.optim\.SGD, not Adam"):
            session.prepare(model, torch.optim.Adam(model.parameters()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(ValueError, match="momentum buffer"):
            session.prepare(model, optimizer)

    run_alone(body)


def test_learning_rate_changed_too_late() -> None:
    def body(session: Any) -> None:
        model, optimizer = prepared(session)
        backward(model)
        optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(gradlane.SessionFailed, match="changed between the first gradient and"):
            optimizer.step()
        with pytest.raises(gradlane.SessionFailed):
            model.state_dict()

    (error,) = run_ranks(1, body, update="server", expect_errors=True)
    assert isinstance(error, gradlane.SessionFailed)


def test_forward_before_step() -> None:
    def body(session: Any) -> None:
        model, optimizer = prepared(session)
        backward(model)
        with torch.no_grad():
            model(torch.ones(2, 3))
        with pytest.raises(gradlane.UsageError, match="a forward after backward"):
            model(torch.ones(2, 3))
        optimizer.step()
        model(torch.ones(2, 3))

    run_alone(body)


def test_gradients_cannot_be_read_or_forgotten() -> None:
    def body(session: Any) -> None:
        model, optimizer = prepared(session)
        backward(model)
        with pytest.raises(gradlane.UsageError, match="stay on the servers"):
            list(model.parameters())
        with pytest.raises(gradlane.UsageError, match="the update has already begun"):
            optimizer.zero_grad()
        optimizer.step()

    run_alone(body)


def test_momentum_on_the_servers_is_not_in_the_state() -> None:
    def body(session: Any) -> None:
        model, optimizer = prepared(session, momentum=0.9)
        backward(model)
        optimizer.step()
        with pytest.raises(gradlane.UsageError, match="momentum"):
            optimizer.state_dict()

    run_alone(body)
