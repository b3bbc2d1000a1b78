"""The command `gradlane store`: a rendezvous store that no rank's end ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradlane.training.rendezvous.store_server import bind_store, host_store
from tests.built import needs_core
from tests.command_line import run
from tests.forked_programs import ForkedPrograms
from tests.waiting import eventually

PATIENCE_S = 120.0
TRAINING = "tests.training.model.launched_rank"
RANK_0 = """
import os, signal, sys
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.rendezvous import open_store

store = open_store(RankInfo(0, 2, "job", 0), {}, 60.0, 60.0, None, ("127.0.0.1", int(sys.argv[1])))
store.set("word", "of rank 0")
os.kill(os.getpid(), signal.SIGKILL)
"""
RANK_1 = """
import sys
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.rendezvous import open_store

store = open_store(RankInfo(1, 2, "job", 0), {}, 60.0, 60.0, None, ("127.0.0.1", int(sys.argv[1])))
print(store.read("word", 0))
"""


class HostedStore:
    """A `gradlane store` in a process of its own, at a port that it has chosen."""

    def __init__(self, programs: ForkedPrograms, folder: Path) -> None:
        """Start it, and wait until it is ready."""
        self._programs, self._name = programs, f"{folder}-store"
        self.output, self.errors = folder / "store-output", folder / "store-errors"
        self.pid = programs.start(
            self._name,
            program="gradlane.__main__",
            arguments=["store", "--port", "0", "--json"],
            output=str(self.output),
            errors=str(self.errors),
            environment={},
        )
        assert eventually(lambda: self.output.read_text().endswith("\n"), PATIENCE_S)
        self.ready = json.loads(self.output.read_text())
        self.port = int(self.ready["port"])

    def end(self, number: signal.Signals) -> int:
        """Send a signal, and return the exit status."""
        os.kill(self.pid, number)
        return self._programs.wait(self._name, PATIENCE_S)


@pytest.fixture
def hosted(programs: ForkedPrograms, tmp_path: Path) -> Iterator[HostedStore]:
    store = HostedStore(programs, tmp_path)
    yield store
    with contextlib.suppress(ProcessLookupError):
        store.end(signal.SIGKILL)


def test_a_taken_port_and_a_foreign_address_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, shown, errors = run(monkeypatch, capsys, "store", "--port", port)
    assert (status, shown) == (1, "")
    assert errors.startswith(f"gradlane: no store can listen at 127.0.0.1:{port}: Address already")
    assert "give another --port" in errors
    # An address for documentation, which no machine has.
    status, _, errors = run(monkeypatch, capsys, "store", "--host", "192.0.2.7", "--port", "0")
    assert status == 1 and "at 192.0.2.7:0: Cannot assign" in errors and "give --host" in errors
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGINT, signal.SIGTERM}


def listening_at(port: int) -> list[str]:
    """Return the IPv4 addresses at which this machine listens on a port."""
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state = line.split()[:4]
        address, _, local_port = local.partition(":")
        if state == "0A" and int(local_port, 16) == port:
            found.append(socket.inet_ntoa(struct.pack("=I", int(address, 16))))
    return found


def test_it_listens_on_loopback_alone_unless_told_otherwise(hosted: HostedStore) -> None:
    assert listening_at(hosted.port) == ["127.0.0.1"]
    store = host_store(bind_store("0.0.0.0", 0))
    assert listening_at(store.port) == ["0.0.0.0"]
    store.set("word", "1")


def test_it_keeps_what_a_killed_rank_0_wrote(
    programs: ForkedPrograms, hosted: HostedStore, tmp_path: Path
) -> None:
    assert hosted.ready == {
        "host": "127.0.0.1",
        "port": hosted.port,
        "pid": hosted.pid,
        "environment": {"GRADLANE_STORE": f"127.0.0.1:{hosted.port}"},
    }
    for rank, text in enumerate((RANK_0, RANK_1)):
        (tmp_path / f"rank_{rank}.py").write_text(text)
    name = f"{tmp_path}-rank-0"
    programs.start(
        name,
        program=str(tmp_path / "rank_0.py"),
        arguments=[str(hosted.port)],
        output=str(tmp_path / "output"),
        errors=str(tmp_path / "errors"),
        environment={},
    )
    assert programs.wait(name, PATIENCE_S) == -signal.SIGKILL, (tmp_path / "errors").read_text()
    arguments = [str(hosted.port)]
    assert programs.run_all(tmp_path, str(tmp_path / "rank_1.py"), arguments, [{}]) == [
        "b'of rank 0'\n"
    ]


@needs_core
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_two_starts_of_a_job_meet_in_it_and_a_signal_ends_it_in_order(
    programs: ForkedPrograms, hosted: HostedStore, tmp_path: Path, number: signal.Signals
) -> None:
    """Without MASTER_ADDR: no rank hosts a store."""
    environments = [
        {"RANK": str(rank), "WORLD_SIZE": "2", **hosted.ready["environment"]} for rank in range(2)
    ]
    for _ in range(2):
        printed = programs.run_all(tmp_path, TRAINING, [], environments)
        assert len({line.split()[-1] for line in printed}) == 1
        assert [line.split(" saw")[0] for line in printed] == ["rank 0 of 2", "rank 1 of 2"]
    assert hosted.end(number) == 0
    assert hosted.errors.read_text() == ""
