"""A process that attacks a store until it is ended: `attacker JOB.json`.

It waits for the file `attack` in the job's folder, and writes `attacked` once it has begun.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistStoreError

from tests.faults.isolation import isolate

_MAGIC = 0x3C85F7CE
"""With which a client of torch's store begins, after a zero byte."""
_SET = b"\x01"
_PATIENT_S = 20.0
_GONE_S = 0.5
_POLL_S = 0.01
_ROUNDS = 40


class Attacker:
    """One attack, drawn from the seed of its scenario."""

    def __init__(self, job: dict[str, Any]) -> None:
        """Take the job."""
        self._folder = Path(job["folder"])
        self._port: int = job["port"]
        self._random = random.Random(job["scenario"]["seed"])
        self._held: list[socket.socket] = []

    def run(self, fault: str) -> None:
        """Attack, and hold what is held until this process ends."""
        attacks: dict[str, Callable[[], None]] = {
            "hold a byte": self._hold_a_byte,
            "hold half a request": self._hold_half,
            "garbage": self._send_garbage,
            "many clients": self._connect_often,
            "reset in mid-write": self._reset,
            "delete keys": lambda: self._forge(self._delete),
            "replace keys": lambda: self._forge(self._replace),
            "replay keys": lambda: self._forge(self._replay),
        }
        while not (self._folder / "attack").exists():
            time.sleep(_POLL_S)
        try:
            attacks[fault]()
        finally:
            # A training that has ended has taken its store with it: there is nothing to wait for.
            self._note()
        time.sleep(600)

    def _note(self) -> None:
        (self._folder / "attacked").touch()

    def _connect(self) -> socket.socket:
        deadline_s = time.monotonic() + _PATIENT_S
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self._port), timeout=_PATIENT_S)
            except OSError:
                # Where rank 0 stands still before it hosts the store, the fault is that it comes.
                self._note()
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(_POLL_S)

    def _hold(self, sent: bytes) -> None:
        one = self._connect()
        one.sendall(sent)
        self._held.append(one)

    def _request(self) -> bytes:
        """Return the bytes of a client that sets a key."""
        key, value = b"/attack", bytes(self._random.randrange(1, 4000))
        parts = [struct.pack("<Q", len(one)) + one for one in (key, value)]
        return b"\x00" + struct.pack("<I", _MAGIC) + _SET + b"".join(parts)

    def _hold_a_byte(self) -> None:
        for _ in range(self._random.choice((1, 1, 3, 8))):
            self._hold(self._random.choice((b"\0", b"\0", b"\1", b"\xff")))

    def _hold_half(self) -> None:
        for _ in range(self._random.choice((1, 3))):
            request = self._request()
            self._hold(request[: self._random.randrange(2, len(request))])

    def _send_garbage(self) -> None:
        for _ in range(_ROUNDS // 4):
            start = self._random.choice((b"", self._request()[:5], self._request()[:6]))
            with contextlib.suppress(OSError):
                self._hold(start + self._random.randbytes(self._random.randrange(1, 2000)))
            if self._held and self._random.random() < 0.5:
                self._held.pop().close()

    def _connect_often(self) -> None:
        for _ in range(5 * _ROUNDS):
            self._held.append(self._connect())

    def _reset(self) -> None:
        for _ in range(_ROUNDS):
            request = self._request()
            self._hold(request[: self._random.randrange(1, len(request))])
            one = self._held.pop()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()

    def _forge(self, forge: Callable[[TCPStore, str], None]) -> None:
        self._connect().close()
        store = TCPStore("127.0.0.1", self._port, timeout=timedelta(seconds=_PATIENT_S))
        # A key may be gone that was there a moment ago: nobody sets it any more.
        store.set_timeout(timedelta(seconds=_GONE_S))
        for _ in range(_ROUNDS):
            keys = sorted(store.list_keys())
            for key in self._random.sample(keys, min(len(keys), self._random.randrange(1, 6))):
                with contextlib.suppress(DistStoreError):
                    forge(store, key)
            self._note()
            time.sleep(0.05 * self._random.random())

    def _delete(self, store: TCPStore, key: str) -> None:
        store.delete_key(key)

    def _replace(self, store: TCPStore, key: str) -> None:
        store.set(key, self._random.choice(("", "1", "{}", "null", "\0" * 40)))

    def _replay(self, store: TCPStore, key: str) -> None:
        """Set a key to what another one, or it itself a moment ago, was set to."""
        other = key if self._random.random() < 0.5 else self._random.choice(store.list_keys())
        if store.check([other]):
            value = store.get(other)
            time.sleep(0.05 * self._random.random())
            store.set(key, value)  # type: ignore[arg-type]


def main() -> None:
    """Attack the store of a job."""
    job = json.loads(Path(sys.argv[1]).read_text())
    isolate(job, job["nodes"][-1])
    Attacker(job).run(job["scenario"]["fault"])


if __name__ == "__main__":
    main()
