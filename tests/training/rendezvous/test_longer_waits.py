"""Each error of a wait that has ended names the option, and its variable, that ends it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

import gradlane
from gradlane.errors import GradlaneError
from gradlane.formats.longer_waits import CLOSE, CONNECT, PROGRESS, SILENCE, with_variables
from gradlane.training.core import load_core, translate_error
from gradlane.training.options.option_fields import option_rules
from gradlane.training.rendezvous.bounded_store import BoundedStore
from gradlane.training.rendezvous.deadline import SuspendAwareDeadline
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.incarnation import agree_on_incarnation
from gradlane.training.rendezvous.join_requests import JoinRequest, join_keys, ranks_in_training
from gradlane.training.rendezvous.rendezvous import RendezvousScope, open_store
from tests.built import needs_core
from tests.training.model.ranks import run_ranks
from tests.training.rendezvous.stores import bounded

SHORT_S = 0.05


def test_the_options_and_variables_are_those_that_there_are() -> None:
    rules = option_rules(gradlane.Network)
    names = [one.name for one in fields(gradlane.Network) if one.name.endswith("_timeout_s")]
    assert {f"{name} or {rules[name].variable}" for name in names} == {CONNECT, PROGRESS, SILENCE}
    assert with_variables(f"{CONNECT}; silence_timeout_s") == f"{CONNECT}; {SILENCE}"


def scope(is_connected: bool) -> RendezvousScope:
    """Return a scope whose other rank writes nothing."""
    made = RendezvousScope(bounded(), RankInfo(0, 2, "job", 0), 0, SHORT_S)
    if is_connected:
        made.mark_connected(SHORT_S, lambda: None)
    return made


class Frozen:
    """A store that does not answer in time."""

    def check(self, keys: list[str]) -> bool:
        threading.Event().wait()
        return False

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        threading.Event().wait()
        return b""


def unreachable() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        given = silent.getsockname()
        open_store(RankInfo(1, 2, "job", 0), {}, 1.0, 1.0, None, given)


def closed_by_the_core() -> None:
    text = "no progress for 5 s: waiting for rank 1 (longer: progress_timeout_s, on all ranks)"
    raise translate_error(load_core(), load_core().ChannelTimeout(text, 3, None), "waiting")


WAITS: dict[str, tuple[Callable[[], Any], str]] = {
    "appears": (lambda: scope(False).get("word", 1), CONNECT),
    "takes part": (lambda: scope(True).get("word", 1), PROGRESS),
    "starts": (lambda: agree_on_incarnation(bounded(), RankInfo(0, 2, "job", 0), SHORT_S), CONNECT),
    "asks": (lambda: agree_on_incarnation(bounded(), RankInfo(1, 2, "job", 0), SHORT_S), CONNECT),
    "store opens": (unreachable, CONNECT),
    "store answers": (
        lambda: BoundedStore.wrapping(Frozen(), 1, "at host:5", 1.0).read("word", 0),  # type: ignore[arg-type]
        SILENCE,
    ),
    "training is there": (
        lambda: ranks_in_training(join_keys(bounded(), "job"), SuspendAwareDeadline(SHORT_S)),
        CONNECT,
    ),
    "members invite": (
        lambda: JoinRequest(join_keys(bounded(HashStore()), "job")).wait_for_invitation(
            SuspendAwareDeadline(SHORT_S),
            lambda told: None,  # type: ignore[arg-type, return-value]
        ),
        CONNECT,
    ),
    "core": (closed_by_the_core, PROGRESS),
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_that_ends_names_its_option(wait: str) -> None:
    call, named = WAITS[wait]
    with pytest.raises(GradlaneError) as told:
        call()
    assert named in str(told.value)


@needs_core
def test_a_close_that_is_not_waited_for_names_its_argument_on_all_ranks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    is_told = threading.Event()

    def train(session: gradlane.Session) -> str:
        model = torch.nn.Linear(2, 2)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if session.rank == 0:
            session.close(SHORT_S)
            is_told.set()
            return caplog.text
        assert is_told.wait(60.0)
        with pytest.raises(GradlaneError) as told:
            for _ in range(3):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        raise told.value

    logged, error = run_ranks(2, train, expect_errors=True)
    for text in (logged, str(error)):
        assert f"did the same within {SHORT_S} s (longer waits: {CLOSE})" in text
