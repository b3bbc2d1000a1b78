"""Any call of the core may be the first to meet the end of a session; its error is translated."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradlane
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from tests.training.model.held_core import HeldCore
from tests.training.model.ranks import run_ranks

STEPS = 2
NEVER_RAISE = {
    *("abort", "all_connected", "forget_in_child", "has_measurable_squares", "metrics_json"),
    *("next_changes", "participation", "residual_squares", "take_timeline", "take_trace"),
    "waited_ns",
}
"""Calls that take no error of the session, or whose thread ends with it."""


class EndingChannel:
    """A channel whose session ends as its rank makes the fatal call."""

    def __init__(self, core: EndingCore, channel: Any) -> None:
        self._core, self._channel = core, channel

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._channel, name)
        if name in NEVER_RAISE:
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            self._core.made.append(name)
            if len(self._core.made) >= self._core.fatal:
                self._channel.abort("the link was cut")
                raise self._core.ChannelError("rank 1 was lost: the link was cut", None, 1)
            return found(*arguments, **options)

        return call


class EndingCore(HeldCore):
    """A core whose rank 0 meets the end of the session at a call."""

    def __init__(self, fatal: float) -> None:
        super().__init__()
        self.fatal = fatal
        self.made: list[str] = []

    def channel_type(self, _: Any, channel: Any, settings: Any, tensors: Any) -> Any:
        return EndingChannel(self, channel) if settings["rank"] == 0 else channel


def train(session: Any, optimizer: Callable[..., Any], *, clips: bool = False) -> None:
    """Train a small model, and read what a program reads."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    held = optimizer(model.parameters(), lr=0.1)
    session.prepare(model, held)
    for step in range(STEPS):
        model(torch.ones(2, 3) * (step + session.rank)).sum().backward()
        if clips:
            session.clip_grad_norm_(1.0)
        held.step()
        held.zero_grad()
        next(model.parameters()).sum().item()
    session.synchronize()
    model.state_dict()
    held.state_dict()
    session.state_dict()
    session.metrics()
    session.monitoring.take_trace()


def plain(session: Any) -> None:
    train(session, torch.optim.SGD)


def clipped(session: Any) -> None:
    train(session, torch.optim.AdamW, clips=True)


def shut(session: Any) -> None:
    train(session, torch.optim.SGD)
    session.close()


def arrays(session: Any) -> None:
    session.arrays.register("values", (4,), np.float32)
    session.arrays.spread({"values": np.ones(4, np.float32)})
    for _ in range(STEPS):
        session.arrays.push("values", np.ones(4, np.float32))
        session.arrays.wait("values")


def steps(model: Any, optimizer: Any, count: int = STEPS) -> None:
    for _ in range(count):
        model(torch.arange(3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def sgd_of_rows(session: Any, *, sparse: bool = False) -> tuple[Any, Any]:
    model = nn.Embedding(5, 3, sparse=sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    return model, optimizer


def joined(session: Any) -> None:
    pair = sgd_of_rows(session)
    with session.join():
        steps(*pair, STEPS + session.rank)


def weighted(session: Any) -> None:
    model, optimizer = sgd_of_rows(session)
    for _ in range(STEPS):
        session.weight(session.rank + 1)
        with session.no_sync():
            model(torch.arange(3)).sum().backward()
        steps(model, optimizer, 1)


def rows(session: Any) -> None:
    steps(*sgd_of_rows(session, sparse=True))


def prepared_again(session: Any) -> None:
    pair = sgd_of_rows(session)
    steps(*pair)
    session.prepare(*pair)
    steps(*pair)


def fragments(session: Any) -> None:
    steps(*sgd_of_rows(session), 2 * STEPS)
    session.synchronize()
    session.state_dict()


@pytest.mark.parametrize(
    ("body", "options"),
    [
        (plain, {}),
        (plain, {"check_every": 1}),
        (plain, {"strategy": "deferred-pull"}),
        (fragments, {"update": gradlane.Local(steps=2)}),
        (fragments, {"update": "server", "strategy": "asgd"}),
        (joined, {}),
        (weighted, {}),
        (rows, {}),
        (prepared_again, {}),
        (clipped, {}),
        (shut, {"update": "server"}),
        (arrays, {}),
    ],
)
def test_no_error_of_the_core_comes_through(
    body: Callable[[Any], None], options: dict[str, Any]
) -> None:
    core = EndingCore(float("inf"))
    run_ranks(2, body, core=core, summary=False, **options)
    assert len(core.made) > 10
    for fatal, name in enumerate(core.made, 1):
        if core.made[: fatal - 1].count(name) >= 2:
            # Later ones are made from the same places.
            continue
        errors = run_ranks(
            2, body, core=EndingCore(fatal), summary=False, expect_errors=True, **options
        )
        for error in errors:
            assert error is None or isinstance(error, gradlane.GradlaneError), (fatal, name, error)


@pytest.mark.parametrize("update", ["worker", gradlane.Local(steps=1)])
def test_a_store_that_stands_still_while_a_session_closes_tells_the_cause(
    monkeypatch: pytest.MonkeyPatch, update: Any
) -> None:
    """A rank that is cut off from rank 0, and so from its store, hears of it by its channel."""
    is_closing = threading.Event()
    core = HeldCore()

    def wait_for_the_store(scope: RendezvousScope, *_: Any) -> None:
        if scope.rank_info.rank == 0:
            assert is_closing.wait(20.0)
            next(one for one in core.channels if one.rank == 0).abort("the link was cut")
            return
        is_closing.set()
        end_s = time.monotonic() + 20.0
        while time.monotonic() < end_s:
            assert scope.on_poll is not None
            scope.on_poll()
            time.sleep(0.01)

    for module in ("model.prepared", "local_updates.local_model"):
        monkeypatch.setattr(f"gradlane.training.{module}.tell_ending", wait_for_the_store)

    def body(session: Any) -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    errors = run_ranks(2, body, core=core, update=update, summary=False, expect_errors=True)
    assert "the link was cut" in str(errors[1]), errors
