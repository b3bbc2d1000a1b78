"""Rank 0, which hosts the store, ends a session before others have come to it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, Store

from gradlane.training.rendezvous.bounded_store import BoundedStore
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.session.scopes import SessionScopes
from tests.built import needs_core
from tests.paths import ROOT
from tests.ports import reserve_port

PROGRAM = """
import gradlane
session = gradlane.init()
print("opened", flush=True)
session.close()
print("closed", flush=True)
"""


def scopes_of(rank: int, store: Store, job: str, timeout_s: float) -> tuple[BoundedStore, Any]:
    """Open the scopes of one of two ranks, whose store rank 0 is taken to host."""
    bounded = BoundedStore.wrapping(store, rank, "of the test", 5.0, job=job)
    bounded.ends_with_rank_0 = True
    deadlocks: Any = None
    place = RankInfo(rank, 2, job, 0)
    return bounded, SessionScopes(bounded, place, timeout_s, deadlocks, lambda: None)


def test_rank_0_waits_for_a_rank_that_has_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    store, job = HashStore(), uuid.uuid4().hex
    bounded, first = scopes_of(0, store, job, 300.0)
    asked, events = threading.Event(), []
    real = BoundedStore.read

    def read(*arguments: Any, **options: Any) -> bytes | None:
        found = real(*arguments, **options)
        asked.set()
        return found

    def leave() -> None:
        first.wait_for_arrivals()
        events.append("left")

    monkeypatch.setattr(BoundedStore, "read", read)
    leaving = threading.Thread(target=leave, daemon=True)
    leaving.start()
    assert asked.wait(60)
    events.append("came")
    other, _ = scopes_of(1, store, job, 300.0)
    leaving.join(60)
    assert events == ["came", "left"]
    bounded.close()
    other.close()


def test_a_rank_that_never_comes_is_named(caplog: pytest.LogCaptureFixture) -> None:
    bounded, first = scopes_of(0, HashStore(), uuid.uuid4().hex, 0.1)
    first.wait_for_arrivals()
    (message,) = caplog.messages
    assert message.startswith("rank 1 has not opened the session in the 0.1 s that rank 0 waited")
    bounded.close()


@needs_core
def test_a_late_rank_still_finds_the_store() -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "python"),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(reserve_port()),
    }

    def start(rank: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )

    with start(0) as first:
        assert first.stdout is not None and first.stdout.readline() == "opened\n"
        with start(1) as second:
            late, _ = second.communicate(timeout=300)
        ended, _ = first.communicate(timeout=300)
    assert (late, ended) == ("opened\nclosed\n", "closed\n")
    assert (first.returncode, second.returncode) == (0, 0)
