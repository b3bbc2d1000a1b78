"""The command `gradlane store`: a rendezvous store that no rank's end ends."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import random
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from gradlane.training.node.group import open_node_store
from gradlane.training.node.layout import NodeLayout
from gradlane.training.rendezvous import addresses, torch_reports
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.rendezvous import RendezvousScope, open_store
from gradlane.training.rendezvous.store_server import bind_store, host_store
from tests.built import needs_core
from tests.command_line import run
from tests.forked_programs import ForkedPrograms
from tests.ports import reserve_port
from tests.training.rendezvous.stores import bounded
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


PARTIAL_REQUESTS = {
    # Of torch's protocol: a byte for the kind, numbers and texts of eight bytes of length.
    "a kind": b"\0",
    "half of the number that a connection begins with": b"\0\xce\xf7",
    "a key without its end": b"\0\xce\xf7\x85\x3c\1" + struct.pack("<Q", 1 << 20) + b"half",
    "a value without its end": b"\0\xce\xf7\x85\x3c\1"
    + struct.pack("<Q", 1)
    + b"k"
    + struct.pack("<Q", 1 << 20)
    + b"half",
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
}
TOO_LONG = b"\0\xce\xf7\x85\x3c\1" + struct.pack("<Q", 1 << 60)
ERRORS_ALONE = 2
ATTACKERS = 300


def client_of(port: int) -> TCPStore:
    """Return a store's client, as ranks have it."""
    return TCPStore(
        "127.0.0.1", port, timeout=datetime.timedelta(seconds=PATIENCE_S), wait_for_workers=False
    )


@contextlib.contextmanager
def unfinished(port: int, requests: list[bytes], clients: int = ATTACKERS) -> Iterator[None]:
    """Hold many connections to a store that have sent a part of a request."""
    with contextlib.ExitStack() as held:
        for index in range(clients):
            caller = held.enter_context(socket.create_connection(("127.0.0.1", port)))
            caller.sendall(requests[index % len(requests)])
        yield


@pytest.mark.parametrize("kind", [*PARTIAL_REQUESTS, "all of them"])
def test_unfinished_requests_hold_up_no_client_and_no_signal(
    hosted: HostedStore, kind: str
) -> None:
    """Also the request of a client whose cable was pulled while it wrote."""
    early = client_of(hosted.port)
    requests = list(PARTIAL_REQUESTS.values()) if kind not in PARTIAL_REQUESTS else []
    with unfinished(hosted.port, requests or [PARTIAL_REQUESTS[kind]]):
        early.set("word", "1")
        late = client_of(hosted.port)
        assert late.get("word") == b"1"
        assert late.compare_set("word", "1", "2") == early.get("word") == b"2"
        assert hosted.end(signal.SIGTERM) == 0
    assert hosted.errors.read_text() == ""


@pytest.mark.parametrize("seed", range(3))
def test_drawn_bytes_end_no_store(hosted: HostedStore, seed: int) -> None:
    drawn = random.Random(seed)
    client = client_of(hosted.port)
    for number in range(200):
        request = b"" if drawn.random() < 0.2 else PARTIAL_REQUESTS["a kind"] + b"\xce\xf7\x85\x3c"
        for _ in range(drawn.randint(1, 4)):
            request += drawn.randbytes(1)
            length = drawn.choice([0, 1, 1 << 31, 1 << 63, (1 << 64) - 1, drawn.randint(0, 40)])
            request += struct.pack("<Q", length) + drawn.randbytes(min(length, 40))
        with socket.create_connection(("127.0.0.1", hosted.port)) as caller:
            caller.sendall(request)
        client.set("number", str(number))
        assert client.get("number") == str(number).encode()


@pytest.fixture
def torch_warns() -> Iterator[Callable[[], int]]:
    """Have torch log warnings; returns the level from which on it logs."""
    level = torch_reports.log_level()
    before, level.value = level.value, 1
    yield lambda: level.value
    level.value = before


@pytest.mark.parametrize(
    "opens", ["rank 0", "rank 0 for other machines", "a node's first rank", "the command"]
)
def test_every_store_that_gradlane_hosts_answers_beside_unfinished_requests_and_logs_none(
    opens: str,
    torch_warns: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    store: Any
    clients = ATTACKERS
    if opens.startswith("rank 0"):
        if opens != "rank 0":
            # Torch looks up the names of all clients of a port that is open to other machines.
            clients = len(PARTIAL_REQUESTS)
            monkeypatch.setattr(addresses, "names_loopback", lambda host: False)
        port = reserve_port()
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        store = open_store(RankInfo(0, 2, "job", 0), environment, PATIENCE_S, PATIENCE_S).store
    elif opens == "the command":
        store = host_store(bind_store("127.0.0.1", 0))
    else:
        scope = RendezvousScope(bounded(), RankInfo(0, 2, "job", 0), 0, PATIENCE_S)
        layout = NodeLayout(nodes=1, local_size=2, node=0, local_rank=0, leaders=1)
        store = open_node_store(layout, scope, PATIENCE_S)
    with unfinished(store.port, list(PARTIAL_REQUESTS.values()), clients):
        client_of(store.port).set("word", "1")
        assert store.get("word") == b"1"
        with socket.create_connection(("127.0.0.1", store.port)) as caller:
            caller.sendall(TOO_LONG)
            # Closed once it is refused, and so reported.
            caller.settimeout(PATIENCE_S)
            assert caller.recv(1) == b""
        assert torch_warns() == ERRORS_ALONE
        begun_s = time.monotonic()
        del store
        assert time.monotonic() - begun_s < PATIENCE_S
    assert eventually(lambda: torch_warns() == 1, PATIENCE_S)
    assert capfd.readouterr().err == ""


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
