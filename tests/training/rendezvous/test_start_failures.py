"""When one rank fails before all are connected, all know within seconds who and why."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from gradlane.errors import RendezvousError
from gradlane.training.rendezvous import start_failures
from gradlane.training.rendezvous.bounded_store import BoundedStore
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.start_failures import StartFailures
from tests.built import needs_core
from tests.forked_programs import ForkedPrograms
from tests.ports import reserve_port
from tests.training.rendezvous.stores import bounded

PATIENCE_S = 120.0
"""Less than the time to connect of a start, and far more than a failure takes."""
SECRETS = ["0123456789abcdef" * 4, "fedcba9876543210" * 4]
REASONS = {
    "page": "Address already in use",
    "prometheus": "Address already in use",
    "folder": "cannot be made",
    "keyword": "stratgy is unknown",
    "value": "p4",
    "codec": "77",
    "world": "servers",
    "variable": "GRADLANE_LANES",
    "secret file": "nothing",
    "before prepare": "FileNotFoundError: data.bin",
    "exit": "its program ended with exit status 3",
    "in prepare": "KeyError: 'meeting'",
    "busy": "FileNotFoundError: data.bin",
}
OWN = {"exit": "SystemExit: 3"}
"""What the rank that fails prints, where the others have other words for it."""


def run_start(
    programs: ForkedPrograms,
    folder: Path,
    environments: list[dict[str, str]],
    **job: Any,
) -> list[str]:
    """Run ranks of a start that fails; returns what each has printed."""
    (folder / "file").write_text("a file, and no folder")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = json.dumps({"folder": str(folder), "port": taken.getsockname()[1], **job})
        return programs.run_all(
            folder,
            "tests.training.rendezvous.failing_start",
            [settings],
            [
                {"RANK": str(rank), "WORLD_SIZE": str(len(environments)), **environment}
                for rank, environment in enumerate(environments)
            ],
            PATIENCE_S,
        )


@needs_core
# Rank 0 alone serves a page.
@pytest.mark.parametrize(("moment", "rank"), [(one, at % 2) for at, one in enumerate(REASONS)])
def test_all_ranks_know_which_rank_failed_and_why(
    programs: ForkedPrograms, tmp_path: Path, moment: str, rank: int
) -> None:
    """Rank 0 hosts the store: it stays until the others have heard it."""
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_port())}
    printed = run_start(programs, tmp_path, [environment] * 3, moment=moment, rank=rank)
    assert OWN.get(moment, REASONS[moment].split(": ")[-1]) in printed[rank]
    for other in {0, 1, 2} - {rank}:
        assert printed[other].startswith(f"RendezvousError: rank {rank} "), printed
        assert REASONS[moment] in printed[other], printed


@pytest.fixture
def store() -> TCPStore:
    """A store that outlives the starts."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@needs_core
def test_a_start_in_the_store_of_one_that_failed_hears_nothing_of_it(
    programs: ForkedPrograms, tmp_path: Path, store: TCPStore
) -> None:
    environments = [{"GRADLANE_STORE": f"127.0.0.1:{store.port}"}] * 3
    for moment, rank in (("before prepare", 2), ("keyword", 0)):
        printed = run_start(programs, tmp_path, environments, moment=moment, rank=rank)
        assert sum(f"rank {rank} gave up" in one for one in printed) == 2, printed
    printed = run_start(programs, tmp_path, environments)
    assert printed == [f"rank {rank} is connected\n" for rank in range(3)]


@needs_core
@pytest.mark.parametrize("lacking", [0, 2])
def test_a_rank_without_the_secret_or_with_another_one_ends_all_at_once(
    programs: ForkedPrograms, tmp_path: Path, store: TCPStore, lacking: int
) -> None:
    for other in ({}, {"GRADLANE_SECRET": SECRETS[1]}):
        environments = [
            {
                "GRADLANE_STORE": f"127.0.0.1:{store.port}",
                "GRADLANE_JOB": f"{lacking}-{len(other)}",
                **(other if rank == lacking else {"GRADLANE_SECRET": SECRETS[0]}),
            }
            for rank in range(3)
        ]
        printed = run_start(programs, tmp_path, environments)
        assert all("Error" in one and "secret" in one for one in printed), printed


@needs_core
@pytest.mark.parametrize("key", ["asked/1", "told/2", "heard/1"])
def test_leftovers_of_another_secret_are_told_to_all_at_once(
    programs: ForkedPrograms, tmp_path: Path, store: TCPStore, key: str
) -> None:
    left = bounded(store, job="default", secret=SECRETS[1])
    left.set(f"gradlane/default/start/{key}", "of an earlier start")
    environment = {
        "GRADLANE_STORE": f"127.0.0.1:{store.port}",
        "GRADLANE_SECRET": SECRETS[0],
    }
    printed = run_start(programs, tmp_path, [environment] * 4)
    # A rank may have written its own value over it before it was read.
    if "rank 0 is connected\n" not in printed:
        assert all(f"start/{key}" in one and "another secret" in one for one in printed), printed


def pair(store: HashStore, secrets: tuple[str | None, str | None]) -> list[StartFailures]:
    """Return both ranks' failures in one store."""
    return [
        StartFailures(bounded(store, rank, secret=secrets[rank]), RankInfo(rank, 2, "job", 0))
        for rank in range(2)
    ]


@pytest.mark.parametrize("secrets", [(None, None), (SECRETS[0], SECRETS[0])])
def test_an_answer_to_another_request_is_none(secrets: tuple[str | None, str | None]) -> None:
    store = HashStore()
    early, first = pair(store, secrets)
    early.listen(lambda: False)
    first.tell("rank 1 gave up: of an earlier start")
    early.stop()
    with pytest.raises(RendezvousError, match="of an earlier start"):
        early.check()
    late, second = pair(store, secrets)
    late.listen(lambda: False, is_first=False)
    late.check()
    second.tell("rank 1 gave up: of this start")
    with pytest.raises(RendezvousError, match="of this start"):
        late.check()
    late.stop()


class PausedStore:
    """A store whose host stands still for a while."""

    def __init__(self, store: HashStore) -> None:
        self.responds = threading.Event()
        self._store = store

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            self.responds.wait()
            return method(*arguments)

        return call


@pytest.mark.parametrize("tells_before", [False, True])
@pytest.mark.parametrize(
    "call", [lambda store: store.set("key", "value"), lambda store: store.read("key", 1)]
)
def test_a_rank_that_has_lost_a_store_that_responds_again_tells_its_reason(
    call: Callable[[BoundedStore], object], tells_before: bool
) -> None:
    """A rank that connected to the store meanwhile would wait for it in vain."""
    store = HashStore()
    paused = PausedStore(store)
    own = bounded(paused, 1, 1.0)  # type: ignore[arg-type]
    failing = StartFailures(own, RankInfo(1, 2, "job", 0))
    with pytest.raises(RendezvousError) as error:
        call(own)
    if tells_before:
        failing.tell(f"rank 1 gave up: {error.value}", 0.1)
    threading.Timer(0.5, paused.responds.set).start()
    hears = StartFailures(bounded(store, 0), RankInfo(0, 2, "job", 0))
    hears.listen(lambda: False, is_first=False)
    failing.tell(f"rank 1 gave up: {error.value}")
    with pytest.raises(RendezvousError, match=r"rank 1 gave up: .* does not answer"):
        hears.check()
    hears.stop()


def late_rank(store: HashStore) -> StartFailures:
    """Return a rank that opens its session when nobody tells of a failure any more."""
    hears, tells = pair(store, (None, None))
    tells.tell("rank 1 gave up: no such file", 0.0)
    return hears


def looked(hears: StartFailures, *, is_first: bool = True) -> StartFailures:
    """Have a rank look for failures, and stop."""
    hears.listen(lambda: True, is_first=is_first)
    hears.stop()
    return hears


def test_a_rank_that_comes_when_nobody_tells_any_more_hears_of_a_failure() -> None:
    with pytest.raises(RendezvousError, match=r"no such file \(\d s before this rank came\)"):
        looked(late_rank(HashStore())).check()


def test_a_process_that_is_younger_than_a_failure_or_had_a_session_hears_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = HashStore()
    restarted = late_rank(store)
    with monkeypatch.context() as patched:
        patched.setattr(start_failures, "process_age_s", lambda: 0.0)
        looked(restarted).check()
    looked(pair(store, (None, None))[0], is_first=False).check()
    with pytest.raises(RendezvousError):
        looked(pair(store, (None, None))[0]).check()


def test_a_rank_that_comes_again_takes_its_failure_back() -> None:
    store = HashStore()
    hears = late_rank(store)
    looked(pair(store, (None, None))[1])
    looked(hears).check()


@pytest.mark.parametrize("other", [None, SECRETS[1]])
def test_words_that_are_not_signed_are_marked_and_escaped(other: str | None) -> None:
    hears, tells = pair(HashStore(), (SECRETS[0], other))
    hears.listen(lambda: False)
    tells.tell("rank 1 gave up: \x1b[2J no such file")
    with pytest.raises(RendezvousError) as told:
        hears.check()
    hears.stop()
    assert "not signed with this job's secret" in str(told.value)
    assert r"\x1b[2J no such file" in str(told.value)


def test_a_rank_that_is_connected_hears_nothing_more_and_one_that_knows_tells_nothing() -> None:
    store = HashStore()
    hears, tells = pair(store, (None, None))
    # Its thread looks once, and ends.
    looked(hears)
    tells.tell("rank 1 gave up: too late", 0.3)
    hears.check()
    hears, tells = pair(store, (None, None))
    hears.listen(lambda: False, is_first=False)
    tells.listen(lambda: False, is_first=False)
    hears.tell("rank 0 gave up: first")
    tells.tell("rank 1 gave up: second")
    assert "second" not in str(bounded(store).read_claimed("gradlane/job/start/failed/0"))
    tells.stop()
    hears.stop()
    with pytest.raises(RendezvousError, match="first"):
        tells.check()
