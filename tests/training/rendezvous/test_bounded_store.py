"""Calls on a store end whatever its host does, and no other module makes any."""

from __future__ import annotations

import ast
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

import gradlane
from gradlane.errors import PeerLostError, RendezvousError
from gradlane.training.core import load_core
from gradlane.training.options.options import Options
from gradlane.training.rendezvous.bounded_store import BoundedStore, StoreLostError
from gradlane.training.rendezvous.deadlock import DeadlockDetector
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.rendezvous import RendezvousScope, open_store
from gradlane.training.rendezvous.signatures import StoreSigner
from gradlane.training.session.init import open_session
from tests.forked_programs import SOURCES, ForkedPrograms
from tests.paths import PACKAGES, ROOT
from tests.ports import reserve_port
from tests.training.rendezvous.stores import bounded
from tests.waiting import eventually

PATIENCE_S = 60.0
"""Far beyond all limits in this file: whatever takes as long has none."""
MAKERS = {
    # The types of stores, and those that sessions open.
    "training/torch_internals.py",
    "training/rendezvous/bounded_store.py",
    "training/rendezvous/rendezvous.py",
    "training/rendezvous/store_server.py",
    # What a user's program hands over.
    "training/options/option_groups.py",
    # torch's own groups call theirs: on this node alone, or in runs that their starter ends.
    "training/node/group.py",
    # In memory, to open a group whose addresses the ranks of the doctor exchange themselves.
    "planning/doctor/group.py",
    "lab/cluster/rank_program.py",
    "lab/transport/node.py",
    "lab/runs/communication.py",
    "lab/runs/trial.py",
    "accuracy/asynchronous.py",
}


class FrozenStore:
    """A store whose host stands still once it is told to."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.frozen = threading.Event()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self.store, name)

        def call(*arguments: Any) -> Any:
            if self.frozen.is_set():
                threading.Event().wait()
            return method(*arguments)

        return call


def frozen(limit_s: float = 1.0) -> BoundedStore:
    """Return a store that answers nothing."""
    store = FrozenStore()
    store.frozen.set()
    return BoundedStore.wrapping(store, 1, "at host:5, which rank 0 keeps", limit_s)  # type: ignore[arg-type]


@contextmanager
def listening(answer: bytes | None) -> Iterator[int]:
    """Accept connections on a port; say something and hang up, or, with None, say nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        kept = []

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                if answer is None:
                    kept.append(client)
                    continue
                # The caller may have gone already.
                with client, suppress(OSError):
                    client.sendall(answer)

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        server.join(PATIENCE_S)
        for client in kept:
            client.close()


@pytest.mark.parametrize("answer", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_listener_that_is_no_store_is_named_in_time(
    answer: bytes | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with listening(answer) as port:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        begun_s = time.monotonic()
        with pytest.raises(RendezvousError, match=f"127.0.0.1:{port}, which rank 0 keeps") as told:
            open_session(
                load_core(),
                Options.of(
                    rendezvous=gradlane.Rendezvous(rank=1, world_size=2),
                    network=gradlane.Network(connect_timeout_s=1.0),
                ),
            )
        assert "does not answer as a store does" in str(told.value)
        assert "frame #" not in capfd.readouterr().err
        assert time.monotonic() - begun_s < PATIENCE_S


def test_a_port_without_a_listener_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        with pytest.raises(RendezvousError, match=r"nothing listens there.*rank 0 is running"):
            open_store(RankInfo(1, 2, "job", 0), environment, 0.5, 1.0)
        agents = {**environment, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        with pytest.raises(RendezvousError, match=r"torchrun took 127.0.0.1.*--local-addr"):
            open_store(RankInfo(1, 2, "job", 0), agents, 0.5, 1.0)
        taken.listen()
        with pytest.raises(RendezvousError, match="rank 0 cannot open the rendezvous store"):
            open_store(RankInfo(0, 2, "job", 0), environment, 0.5, 1.0)


def test_rank_0_hosts_no_store_where_one_is_given_by_its_address() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        given = nobody.getsockname()
        for world_size in (1, 2):
            with pytest.raises(
                RendezvousError, match=r"own keeps: .*GRADLANE_STORE.*gradlane store"
            ):
                open_store(RankInfo(0, world_size, "job", 0), {}, 0.5, 1.0, None, given)


@pytest.mark.parametrize(
    "call",
    [
        lambda scope: scope.put("word", "1"),
        lambda scope: scope.get("word", 0),
        lambda scope: scope.peek("word", 0),
        lambda scope: scope.secret(None),
        lambda scope: scope.agree({"options": {}, "tensors": []}),
        lambda scope: scope.exchange_addresses("127.0.0.1", 1),
        lambda scope: scope.wait_until_opened(lambda: None),
    ],
)
def test_each_call_of_a_scope_ends_when_the_store_does_not_respond(
    call: Callable[[RendezvousScope], Any],
) -> None:
    scope = RendezvousScope(frozen(), RankInfo(1, 2, "job", 0), 0, PATIENCE_S)
    with pytest.raises(StoreLostError, match=r"host:5, which rank 0 keeps, does not answer"):
        call(scope)
    # A store that is lost is not asked again.
    begun_s = time.monotonic()
    for _ in range(20):
        with pytest.raises(StoreLostError):
            scope.get("word", 0)
        scope.delete("word")
    scope.delete_keys()
    assert time.monotonic() - begun_s < PATIENCE_S


def test_waits_for_the_store_end_with_the_session() -> None:
    def lost() -> None:
        raise PeerLostError("rank 0 was lost: silent", 0)

    scope = RendezvousScope(frozen(PATIENCE_S), RankInfo(1, 2, "job", 0), 0, PATIENCE_S)
    scope.mark_connected(PATIENCE_S, lost)
    with pytest.raises(PeerLostError, match="silent"):
        scope.put("word", "1")
    with pytest.raises(PeerLostError, match="silent"):
        scope.peek("word", 0)


def test_a_store_that_is_gone_is_the_loss_of_the_rank_that_the_channel_names() -> None:
    class Gone:
        def compare_set(self, *arguments: str) -> bytes:
            raise RuntimeError("Connection reset by peer\nframe #0: torch")

    looks = iter([None, None])

    def lost() -> None:
        if next(looks, 0) == 0:
            raise PeerLostError("rank 0 was lost: it closed the connection", 0)

    store = BoundedStore.wrapping(Gone(), 1, "at host:5, which rank 0 keeps", 1.0)  # type: ignore[arg-type]
    with pytest.raises(StoreLostError) as told:
        store.read("word", 0)
    assert str(told.value).endswith("(Connection reset by peer)")
    assert "rank 1 lost the rendezvous store at host:5, which rank 0 keeps:" in str(told.value)
    with pytest.raises(PeerLostError, match="it closed"):
        store.read("word", 0, on_poll=lost)


def test_a_store_that_does_not_answer_may_be_a_cut_link_that_the_channel_names() -> None:
    store = frozen()
    begun_s = time.monotonic()

    def on_poll() -> None:
        if time.monotonic() - begun_s > 1.3:
            raise PeerLostError("the link between rank 0 and rank 1 is cut", 0)

    for call in (
        lambda: store.increment("word", on_poll=on_poll),
        lambda: store.read("word", 0, on_poll=on_poll),
    ):
        with pytest.raises(PeerLostError, match="link"):
            call()


def test_a_deadlock_detector_over_a_frozen_store_ends() -> None:
    class Model:
        step = 1

        def unsubmitted_tensors(self) -> list[int]:
            return [0]

    watch = DeadlockDetector(frozen(PATIENCE_S), RankInfo(0, 2, "job", 0))
    for name in ("a", "b"):
        watch.watch(name, Model(), lambda reason: None)
    with watch.waiting("a", 1, None):
        time.sleep(1.2)
        closing = threading.Thread(target=watch.close, daemon=True)
        closing.start()
        closing.join(PATIENCE_S / 2)
    assert not closing.is_alive()


def test_torchs_own_frames_of_a_lost_store_stay_hidden(capfd: pytest.CaptureFixture[str]) -> None:
    """The error says it in a sentence."""
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", host.port, wait_for_workers=False)
    store = BoundedStore.wrapping(client, 1, "at host:5, which rank 0 keeps", 10.0)
    store.set("word", "1")
    del host
    for _ in range(3):
        with pytest.raises(StoreLostError, match="rank 1 lost the rendezvous store at host:5"):
            store.read("word", 0)
    store.close()
    assert capfd.readouterr() == ("", "")


def test_the_thread_ends_with_its_store() -> None:
    def names() -> list[str]:
        return [one.name for one in threading.enumerate() if one.name == "gradlane-store"]

    before = len(names())
    store = bounded()
    store.set("word", "1")
    store.with_prefix("part").set("word", "2")
    assert store.read_first({"part/word": 0, "word": 0}) == ("part/word", b"2")
    assert store.set_if_absent("word", "3") == "1" and store.set_if_absent("new", "3") == "3"
    store.close()
    assert len(names()) == before
    with pytest.raises(StoreLostError):
        store.read("word", 0)


def test_an_earlier_key_written_meanwhile_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    compare_set = HashStore.compare_set

    def then_write(self: HashStore, *arguments: str) -> bytes:
        found = bytes(compare_set(self, *arguments))
        for key, value in (("verdict", "why"), ("reason", "closed")):
            self.set(key, signer.sign(key, value).decode())
        return found

    store = bounded()
    signer = StoreSigner.of(0, None, "", "in memory")
    monkeypatch.setattr(HashStore, "compare_set", then_write)
    assert store.read_first({"verdict": 0, "reason": None}) == ("verdict", b"why")
    store.close()


class DeletingStore(TCPStore):
    """A store whose keys another rank deletes after each look at them."""

    def check(self, keys: list[str]) -> bool:
        """Return whether they were there."""
        found = bool(super().check(keys))
        for key in keys:
            self.delete_key(key)
        return found

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        """Return the value."""
        found = bytes(super().compare_set(key, expected, wanted))
        self.delete_key(key)
        return found


def test_a_key_deleted_while_it_is_read_is_there_or_is_not() -> None:
    """Torch's `get` would wait for it to come back, or return no bytes, which no rank writes."""
    store = bounded(DeletingStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), 0, 2.0)
    for read in (lambda: store.read("word", 0), lambda: store.read_claimed("word")):
        store.set("word", "1")
        assert read() in (b"1", (b"1", True))
        assert read() is None
    store.set("word", "1")
    assert store.replace("word", b"1", "2") is None
    store.close()


USER = """
import sys
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.rendezvous import RendezvousScope, open_store
environment = {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": sys.argv[1],
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
rank_info = RankInfo(1, 2, "job", 0)
store = open_store(rank_info, environment, 30.0, 2.0)
scope = RendezvousScope(store, rank_info, 0, 60.0)
scope.put("word", "1")
print("here", flush=True)
sys.stdin.readline()
try:
    scope.get("other", 0)
except Exception as error:
    print(type(error).__name__, error, flush=True)
"""


LEAVES = """
import threading
from tests.training.rendezvous.stores import bounded
store = bounded()
for number in range(200):
    threading.Thread(target=store.set, args=(f"key {number}", "1"), daemon=True).start()
raise SystemExit(7)
"""


def test_a_process_that_ends_with_calls_under_way_ends_as_it_wants(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES)
    for number in range(5):
        name = f"{tmp_path}-{number}"
        programs.start(
            name,
            program=str(tmp_path / "leaves.py"),
            arguments=[],
            output=str(tmp_path / "output"),
            errors=str(tmp_path / "errors"),
            environment={},
        )
        assert programs.wait(name, PATIENCE_S) == 7, (tmp_path / "errors").read_text()


def test_a_host_that_stands_still_holds_up_no_process(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    """With torch's own store, whose calls would not come back: the process ends as well."""
    address = tmp_path / "address"
    host = programs.start(
        f"{tmp_path}-host",
        program="tests.training.rendezvous.store_host",
        arguments=[str(address)],
        output=str(tmp_path / "output"),
        errors=str(tmp_path / "errors"),
        environment={},
    )
    try:
        assert eventually(address.exists, PATIENCE_S)
        port = address.read_text()
        with subprocess.Popen(
            [sys.executable, "-c", USER, port],
            cwd=ROOT,
            env={**os.environ, **SOURCES},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as user:
            try:
                assert user.stdout is not None
                assert user.stdout.readline() == "here\n"
                os.kill(host, signal.SIGSTOP)
                printed, _ = user.communicate("\n", timeout=PATIENCE_S)
            finally:
                user.kill()
    finally:
        os.kill(host, signal.SIGKILL)
    assert user.returncode == 0
    where = f"127.0.0.1:{port}, which the launcher's agent on rank 0's host keeps,"
    assert printed.startswith("StoreLostError rank 1: the rendezvous store at " + where)
    assert "does not answer" in printed


def test_no_other_module_calls_a_store() -> None:
    found = set()
    paths = {path: package for package in PACKAGES for path in package.rglob("*.py")}
    for path, package in paths.items():
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Attribute):
                names = [node.attr]
            if {"Store", "TCPStore", "HashStore", "FileStore", "PrefixStore"}.intersection(names):
                found.add(str(path.relative_to(package)))
    assert found == MAKERS


LISTENER = """
import os, sys
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.rendezvous import open_store

environment = {"MASTER_ADDR": sys.argv[1], "MASTER_PORT": sys.argv[2]}
stores = [open_store(RankInfo(0, 2, "job", 0), environment, 30.0, 5.0) for _ in range(2)]
stores[0].set("word", "1")
assert stores[1].read("word", 0) == b"1"
inodes = {os.readlink(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")
          if os.path.exists(f"/proc/self/fd/{one}")}
for name in ("tcp", "tcp6"):
    for line in open(f"/proc/self/net/{name}").readlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            print(fields[1].split(":")[0])
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_at_a_loopback_address_listens_there_alone(
    programs: ForkedPrograms, tmp_path: Path, host: str
) -> None:
    program = tmp_path / "listener.py"
    program.write_text(LISTENER)
    (printed,) = programs.run_all(tmp_path, str(program), [host, str(reserve_port())], [{}])
    assert printed.split() == ["0100007F"]
