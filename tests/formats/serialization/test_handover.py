"""Broadcast of one rank's optimizer state: unchanged, or refused on all ranks."""

from __future__ import annotations

import decimal
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradlane.errors import UsageError
from gradlane.training.model import broadcast_state as handover
from tests.training.model import test_training
from tests.training.model.models import Attention, seeded
from tests.training.model.ranks import run_ranks

attention_loss: Any = test_training.attention_loss


class Keeping(torch.optim.Optimizer):
    """Gradient descent that keeps all kinds of things, which rank 0 alone has at the end."""

    kept: Any = None

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05, "note": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])
                    self.state[parameter].setdefault("steps", torch.zeros(()))
                    self.state[parameter]["steps"] += 1


def broadcast_state(change: Any, *, expect_errors: bool = False) -> list[Any]:
    """Train on two ranks, rank 0 longer and with a change; return what every rank's state is."""

    def body(session: Any) -> Any:
        model = seeded(Attention)
        optimizer = Keeping(model.parameters())
        session.prepare(model, optimizer, defer=False)
        parameter = next(iter(model.parameters()))
        with session.join():
            for step in range(3 if session.rank == 0 else 1):
                attention_loss(model, session.rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            if session.rank == 0:
                change(optimizer, parameter)
        group = optimizer.param_groups[0]
        others = {key: one for key, one in optimizer.state.items() if isinstance(key, str)}
        return dict(optimizer.state[parameter]), others, group["lr"], group["note"]

    return run_ranks(2, body, expect_errors=expect_errors, connect_timeout_s=5.0)


def test_all_kinds_of_state_are_handed_over() -> None:
    def change(optimizer: Any, parameter: nn.Parameter) -> None:
        optimizer.state[parameter]["history"] = [
            torch.ones(2),
            (torch.tensor(1, dtype=torch.int8),),
        ]
        optimizer.state[parameter][7] = {1: "int", "1": "text"}
        optimizer.state["whole"] = {"count": 5, "mean": torch.full((2,), 0.5)}
        optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
        optimizer.param_groups[0]["note"] = (1, float("inf"), torch.bfloat16)

    first, second = broadcast_state(change)
    assert repr(first) == repr(second)
    state, others, rate, note = second
    assert state["steps"].item() == 3 and torch.equal(state["history"][0], torch.ones(2))
    assert state[7] == {1: "int", "1": "text"}
    assert torch.equal(others["whole"]["mean"], torch.full((2,), 0.5))
    assert rate.item() == 0.25 and note == (1, float("inf"), torch.bfloat16)


@pytest.mark.parametrize("value", [np.float64(0.5), np.float32(0.5), np.int64(3), np.bool_(True)])
def test_scalars_of_numpy_arrive_as_pythons(value: Any) -> None:
    def change(optimizer: Any, parameter: nn.Parameter) -> None:
        optimizer.param_groups[0]["note"] = value
        optimizer.state[parameter]["note"] = value

    _, (state, _, _, note) = broadcast_state(change)
    assert note == state["note"] == value and type(note) is type(state["note"]) is type(
        value.item()
    )


@pytest.mark.parametrize("where", ["settings", "state", "others"])
def test_what_cannot_be_handed_over_is_named_on_every_rank(where: str) -> None:
    def change(optimizer: Any, parameter: nn.Parameter) -> None:
        value = {"a": [decimal.Decimal(1)]}
        if where == "settings":
            optimizer.param_groups[0]["note"] = value
        else:
            optimizer.state[parameter if where == "state" else "all"]["note"] = value

    paths = {
        "settings": "param_groups[0]['note']['a'][0]",
        "state": "state[0]['note'][0]['a'][0]",
        "others": "others['all']['note']['a'][0]",
    }
    for error in broadcast_state(change, expect_errors=True):
        assert isinstance(error, UsageError), error
        assert f"rank 0 cannot hand its state over: in its optimizer, {paths[where]} is a" in str(
            error
        )


class Runs:
    def __reduce__(self) -> Any:
        return (print, ("run by a pickle",))


@pytest.mark.parametrize("content", [pickle.dumps(Runs()), b"", b"{}", b"\0" * 100])
def test_bytes_of_a_stranger_are_refused_and_run_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], content: bytes
) -> None:
    monkeypatch.setattr(handover, "describe_state", lambda *_: content)
    first, second = broadcast_state(lambda *_: None, expect_errors=True)
    for error in (first, second):
        assert "state of rank 0" in str(error), error
    assert "run by a pickle" not in capfd.readouterr().out
