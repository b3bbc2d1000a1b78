"""Ranks that are busy before a meeting are waited for; those that are gone are not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradlane
from gradlane.training.rendezvous.presence import Presence, RankDeadline
from tests.training.model.ranks import run_ranks
from tests.training.rendezvous.stores import bounded
from tests.waiting import eventually

CONNECT_S = 1.0
BUSY_S = 1.5


class Signs(Presence):
    """The signs of ranks of which some beat at each look."""

    def __init__(self, beating: set[int], longest_s: float) -> None:
        super().__init__(bounded(), 0, 8.0, longest_s)
        self.beating = beating
        self.looks = 0

    def sign_of(self, rank: int) -> bytes | None:
        self.looks += 1
        return str(self.looks if rank in self.beating else 7).encode()


class Clock:
    """A clock that each reading moves on."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def waited_s(deadline: RankDeadline, clock: Clock, ranks: list[int]) -> float:
    """Wait for ranks that never come; return how long, in virtual seconds."""
    while not deadline.is_over(0.1, ranks):
        clock.now_s += 0.1
    return clock.now_s


@pytest.mark.parametrize(
    ("beating", "expected_s", "text"),
    [
        ({1, 2}, 60.0, "60 s for ranks 1, 2"),
        ({1}, 8.0, "8 s for rank 2"),
        (set(), 8.0, "8 s for ranks 1, 2"),
    ],
)
def test_only_signs_of_all_awaited_ranks_renew_the_limit(
    beating: set[int], expected_s: float, text: str
) -> None:
    clock = Clock()
    deadline = RankDeadline(8.0, Signs(beating, 60.0), clock=clock)
    assert waited_s(deadline, clock, [1, 2]) == pytest.approx(expected_s, abs=0.3)
    assert deadline.describe([1, 2]) == text
    assert deadline.silent([1, 2]) == [rank for rank in (1, 2) if rank not in beating]


def test_a_rank_that_stops_giving_signs_is_waited_for_from_then_on() -> None:
    clock = Clock()
    signs = Signs({1}, 1000.0)
    deadline = RankDeadline(8.0, signs, clock=clock)
    while clock.now_s < 100.0:
        assert not deadline.is_over(0.1, [1])
        clock.now_s += 0.1
    signs.beating.clear()
    assert waited_s(deadline, clock, [1]) == pytest.approx(108.0, abs=2.5)
    assert deadline.silent([1]) == [1]


def test_signs_end_once_the_ranks_are_connected_and_leave_no_key() -> None:
    store = bounded()
    presence = Presence(store, 0, 0.08, 10.0)
    presence.begin()
    assert eventually(lambda: presence.sign_of(0) is not None)
    presence.connected("job/0")
    presence.end()
    assert eventually(lambda: presence.sign_of(0) is None) and presence.is_connected
    presence.parted("job/0")
    assert not presence.is_connected


def linear() -> tuple[Any, Any]:
    """Return a model and its optimizer."""
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def first(session: Any, busy: Callable[[], None]) -> None:
    busy()
    session.prepare(*linear())


def again(session: Any, busy: Callable[[], None]) -> None:
    pair = linear()
    session.prepare(*pair)
    busy()
    session.prepare(*pair)


def second_model(session: Any, busy: Callable[[], None]) -> None:
    session.prepare(*linear())
    busy()
    session.prepare(*linear())


def exchange(session: Any, busy: Callable[[], None]) -> None:
    busy()
    assert session.exchange(session.rank) == [0, 1]


def spread(session: Any, busy: Callable[[], None]) -> None:
    busy()
    session.arrays.register("values", (4,), np.float32)
    found = session.arrays.spread({"values": np.full(4, session.rank, np.float32)})
    assert found["values"].sum() == 0.0


def probe(session: Any, busy: Callable[[], None]) -> None:
    busy()
    assert len(session.planning.probe(window_s=0.05, directions=False).ports) == 2


@pytest.mark.parametrize("call", [first, again, second_model, exchange, spread, probe])
@pytest.mark.parametrize("late", [0, 1])
def test_a_busy_rank_is_waited_for(call: Callable[..., None], late: int) -> None:
    def body(session: Any) -> None:
        call(session, lambda: time.sleep(BUSY_S if session.rank == late else 0.0))

    run_ranks(2, body, connect_timeout_s=CONNECT_S)


def gathers(session: Any, busy: Callable[[], None]) -> None:
    session.prepare(*linear())
    busy()
    assert session.gather_integers([session.rank]) == [[0], [1]]


def server_state(session: Any, busy: Callable[[], None]) -> None:
    model, optimizer = linear()
    session.prepare(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    busy()
    assert optimizer.state_dict()


def pushes(session: Any, busy: Callable[[], None]) -> None:
    session.arrays.register("values", (4,), np.float32)
    busy()
    session.arrays.push("values", np.full(4, session.rank, np.float32))
    assert session.arrays.wait("values").sum() == 2.0


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (gathers, {"going_on": True}),
        (server_state, {"update": "server"}),
        (pushes, {}),
        (first, {"update": gradlane.Local(steps=2)}),
        (first, {"update": "server", "strategy": "asgd"}),
        (first, {"going_on": True}),
    ],
)
def test_a_busy_rank_is_waited_for_by_calls_that_options_make_collective(
    call: Callable[..., None], options: dict[str, Any]
) -> None:
    def body(session: Any) -> None:
        call(session, lambda: time.sleep(BUSY_S if session.rank == 0 else 0.0))

    run_ranks(2, body, connect_timeout_s=CONNECT_S, **options)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_busy_for_too_long_is_named_as_such(late: int) -> None:
    def body(session: Any) -> None:
        if session.rank != late:
            session.prepare(*linear())
        time.sleep(2 * BUSY_S)

    errors = run_ranks(
        2, body, connect_timeout_s=CONNECT_S, progress_timeout_s=BUSY_S, expect_errors=True
    )
    error = errors[1 - late]
    assert isinstance(error, gradlane.RendezvousError)
    assert f"waited 1.5 s for rank {late}" in str(error)
    assert "alive and busy before that call" in str(error) and "progress_timeout_s" in str(error)
