"""A man in the middle: changes what ranks read from the store, and relays what they say.

A proxy stands between the ranks and the store. In every answer of the store it puts a port of its
own in the place of each port that a rank has published, with as many digits. Where the job has no
secret he makes the value's code anew. Behind each of these ports a relay passes all bytes to the
rank and back: hello, proof of the secret, and frames.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable
from types import TracebackType

from gradlane.training.rendezvous.signatures import StoreSigner
from tests.ports import reserve_port

_PORT = re.compile(rb'"port": ([0-9]{5})')
_KEY = re.compile(rb"gradlane/[\w./-]+/address/\d+")
_UNSIGNED = re.compile(rb"gradlane-value 1 (\d+) [0-9a-f]{64} (\{[^}]*\})")
_READ_BYTES = 1 << 16


class ManInTheMiddle:
    """A proxy of the store at a port, and relays of the connections between ranks."""

    def __init__(self, store_port: int) -> None:
        """Start to listen; ranks find `port` in place of the store's."""
        self.relayed_bytes = 0
        """Bytes between ranks that have passed here."""
        self._relays: dict[bytes, bytes] = {}
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._keys: set[str] = set()
        self.port = self._listen(store_port, learn=self._learn, change=self._change)

    def __enter__(self) -> ManInTheMiddle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _learn(self, data: bytes) -> bytes:
        """See which ports ranks publish."""
        self._keys |= {key.decode() for key in _KEY.findall(data)}
        for port in _PORT.findall(data):
            with self._lock:
                if port not in self._relays:
                    relay = self._listen(int(port), learn=self._count, change=self._count)
                    self._relays[port] = b"%d" % relay
        return data

    def _change(self, data: bytes) -> bytes:
        return _PORT.sub(
            lambda found: b'"port": ' + self._relays.get(found.group(1), found.group(1)),
            _UNSIGNED.sub(self._forge, data),
        )

    def _forge(self, found: re.Match[bytes]) -> bytes:
        """Change a value of a job without a secret, for the key that it is of."""
        signer = StoreSigner.of(int(found[1]), None, "", "")
        for key in list(self._keys):
            if signer.sign(key, found[2]) == found[0]:
                return signer.sign(key, self._change(found[2]))
        return found[0]

    def _count(self, data: bytes) -> bytes:
        self.relayed_bytes += len(data)
        return data

    def _listen(
        self, port: int, learn: Callable[[bytes], bytes], change: Callable[[bytes], bytes]
    ) -> int:
        """Pass what callers say to a port; returns the port for callers, of five digits."""
        listener = socket.create_server(("127.0.0.1", reserve_port()))
        self._sockets.append(listener)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    caller, _ = listener.accept()
                    called = socket.create_connection(("127.0.0.1", port))
                    self._sockets += [caller, called]
                    self._start(_pass, caller, called, learn)
                    self._start(_pass, called, caller, change)

        self._start(accept)
        found: int = listener.getsockname()[1]
        return found

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()


def _pass(source: socket.socket, target: socket.socket, seen: Callable[[bytes], bytes]) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_READ_BYTES):
            target.sendall(seen(data))
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
