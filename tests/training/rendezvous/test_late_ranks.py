"""Rank 0, which hosts the store, ends a session before others have come to it."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, Store

from gradlane.training.rendezvous.bounded_store import BoundedStore
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.session.scopes import SessionScopes
from tests.built import needs_core
from tests.forked_programs import PATIENCE_S, ForkedPrograms
from tests.ports import reserve_port
from tests.waiting import eventually

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
    rank_info = RankInfo(rank, 2, job, 0)
    return bounded, SessionScopes(bounded, rank_info, timeout_s, deadlocks, lambda: None)


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
def test_a_late_rank_still_finds_the_store(programs: ForkedPrograms, tmp_path: Path) -> None:
    program, port = tmp_path / "late.py", str(reserve_port())
    program.write_text(PROGRAM)
    outputs = [tmp_path / f"output-{rank}" for rank in range(2)]

    def start(rank: int) -> None:
        programs.start(
            str(outputs[rank]),
            program=str(program),
            arguments=[],
            output=str(outputs[rank]),
            errors=str(tmp_path / f"errors-{rank}"),
            environment={
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
        )

    start(0)
    assert eventually(lambda: outputs[0].read_text() == "opened\n", PATIENCE_S)
    start(1)
    assert [programs.wait(str(one), PATIENCE_S) for one in outputs] == [0, 0]
    assert [one.read_text() for one in outputs] == ["opened\nclosed\n"] * 2
