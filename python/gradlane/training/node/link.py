"""Connections between the ranks of one node: shared memory, and sockets for messages about it.

Every rank has one block of anonymous shared memory, which the others map. It has no name in the
file system, so nothing is left behind however a process ends. One Unix socket connects each pair of
ranks; it closes when a rank ends, also when it is killed. At the end of its memory a rank's process
increments a counter while it runs, so that the others notice a process that stands still.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import selectors
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gradlane.errors import RendezvousError
from gradlane.formats.longer_waits import CONNECT
from gradlane.training.core import CoreModule
from gradlane.training.node.layout import NodeLayout
from gradlane.training.rendezvous.rendezvous import RendezvousScope

CONTRIBUTION, RESULT, ORDER, FAILED, BYE, DISCONNECTED = range(6)
"""Kinds of messages: a contribution is in the sender's memory; a mean is there; new priorities; the
sender's session has failed; goodbye; the sender has disconnected (reported by the link itself)."""
READY, MEAN, SUM, BROADCAST = range(6, 10)
"""Kinds for collectives. To the coordinator: the sender's gradient of a tensor is on its device;
the sender has the mean of a part over all nodes. From the coordinator: all ranks add up a tensor
now; all ranks receive the mean of a part now."""
NORM, RESIDUAL, MEMBERS = 10, 11, 12
"""From the leader: the norm of all gradients of a step. To the leader: the sender's memory is free
for a piece of a residual; from the leader: the piece is there. From the leader: the ranks that
training goes on with."""
COLLECTIVE_KINDS = (READY, MEAN, SUM, BROADCAST)
_HEADER = struct.Struct("<BBHIq")
_MESSAGE_BYTES_MAX = 1 << 20
_PATH_BYTES_MAX = 100
_PULSE_BYTES = 8


@dataclass(frozen=True)
class Message:
    """A message of a rank of the node.

    Attributes:
        sender: its local rank.
        kind: `CONTRIBUTION` to `MEMBERS`.
        absent: True if there is no gradient or mean.
        part: number of the part; of `READY` and `SUM`, of the tensor.
        step: number of the step.
        text: of `ORDER`, `FAILED`, `NORM` and `MEMBERS`; of blocks, their bytes.
    """

    sender: int
    kind: int
    absent: bool
    part: int
    step: int
    text: bytes


class LocalLink:
    """This rank's connections to the other ranks of its node."""

    def __init__(
        self,
        layout: NodeLayout,
        nbytes: int,
        sockets: dict[int, socket.socket],
        core: CoreModule,
        interval_s: float,
    ) -> None:
        """Make this rank's memory, exchange it with all others and map theirs.

        Args:
            layout: of the ranks on nodes.
            nbytes: of every rank's memory.
            sockets: connected to each other rank of the node, by local rank.
            core: increments the heartbeat counter.
            interval_s: seconds between heartbeats.
        """
        self.layout = layout
        self.peers = sorted(sockets)
        self._sockets = sockets
        self._maps: list[mmap.mmap] = []
        self._addresses: dict[int, int] = {}
        self._pulse_offset = -(-nbytes // _PULSE_BYTES) * _PULSE_BYTES
        nbytes = max(self._pulse_offset + _PULSE_BYTES, mmap.PAGESIZE)
        own = os.memfd_create("gradlane")
        try:
            os.ftruncate(own, nbytes)
            self._map(layout.local_rank, own, nbytes)
            for peer in self.peers:
                socket.send_fds(sockets[peer], [b"m"], [own])
            for peer in self.peers:
                _, descriptors, _, _ = socket.recv_fds(sockets[peer], 1, 1)
                if not descriptors:
                    rank = layout.rank_of(layout.node, peer)
                    raise RendezvousError(
                        f"rank {rank} ended while the ranks of its node connected"
                    )
                self._map(peer, descriptors[0], nbytes)
                os.close(descriptors[0])
        finally:
            os.close(own)
        self._selector = selectors.DefaultSelector()
        for peer in self.peers:
            self._selector.register(sockets[peer], selectors.EVENT_READ, peer)
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, None)
        self._pulse = core.Pulse(self.address(layout.local_rank, self._pulse_offset), interval_s)

    def pulse(self, peer: int) -> int:
        """Return a rank's heartbeat counter, which changes while its process runs."""
        return ctypes.c_uint64.from_address(self.address(peer, self._pulse_offset)).value

    def address(self, local_rank: int, offset: int) -> int:
        """Return the address in this process of an offset in a rank's memory."""
        return self._addresses[local_rank] + offset

    def send(
        self,
        peer: int,
        kind: int,
        part: int = 0,
        step: int = 0,
        *,
        absent: bool = False,
        text: bytes = b"",
    ) -> None:
        """Send a message; a peer that is gone is ignored."""
        with contextlib.suppress(OSError):
            self._sockets[peer].send(_HEADER.pack(kind, absent, 0, part, step) + text)

    def send_text(self, peer: int, kind: int, text: bytes, *, waits: bool = True) -> None:
        """Send a text to a rank.

        Args:
            peer: its local rank.
            kind: `ORDER`, `FAILED`, `NORM` or `MEMBERS`.
            text: at most a megabyte.
            waits: whether to wait for room; if not, a full socket drops the text.
        """
        flags = 0 if waits else socket.MSG_DONTWAIT
        with contextlib.suppress(OSError):
            self._sockets[peer].send(_HEADER.pack(kind, 0, 0, 0, 0) + text, flags)

    def messages(self, interval_s: float) -> Iterator[Message | None]:
        """Yield messages until `close`; a rank that ends yields one `DISCONNECTED`.

        Args:
            interval_s: seconds between the None values that it yields as well.
        """
        due_s = time.monotonic() + interval_s
        while True:
            events = self._selector.select(max(0.0, due_s - time.monotonic()))
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + interval_s
                yield None
            for key, _ in events:
                peer = key.data
                if peer is None:
                    return
                packet = self._receive(peer)
                if len(packet) < _HEADER.size:
                    self._selector.unregister(self._sockets[peer])
                    yield Message(peer, DISCONNECTED, False, 0, 0, b"")
                    continue
                kind, absent, _, part, step = _HEADER.unpack_from(packet)
                yield Message(peer, kind, bool(absent), part, step, packet[_HEADER.size :])

    def _receive(self, peer: int) -> bytes:
        """Return the next packet of a rank; empty: it has ended."""
        # A peer that closes before it has read everything resets the connection. Linux says so
        # once, and before what the peer has sent last, which tells why it ends.
        for _ in range(2):
            with contextlib.suppress(OSError):
                return self._sockets[peer].recv(_MESSAGE_BYTES_MAX)
        return b""

    def stop(self) -> None:
        """End `messages`, from any thread."""
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"w")

    def disconnect(self, peer: int) -> None:
        """Shut down the connection to a rank; threads that wait for room there return."""
        with contextlib.suppress(OSError):
            self._sockets[peer].shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the sockets; the memory lives as long as this object."""
        self._pulse.stop()
        for one in (*self._sockets.values(), self._wake_sender, self._wake_receiver):
            one.close()
        self._selector.close()

    def _map(self, local_rank: int, descriptor: int, nbytes: int) -> None:
        memory = mmap.mmap(descriptor, nbytes)
        self._maps.append(memory)
        self._addresses[local_rank] = ctypes.addressof(ctypes.c_char.from_buffer(memory))


def connect(
    layout: NodeLayout,
    scope: RendezvousScope,
    nbytes: int,
    timeout_s: float,
    core: CoreModule,
    interval_s: float,
) -> LocalLink:
    """Connect the ranks of this node with each other.

    Args:
        layout: of the ranks on nodes.
        scope: carries the paths of the sockets.
        nbytes: of every rank's shared memory.
        timeout_s: longest wait for a rank, in seconds.
        core: increments the heartbeat counter.
        interval_s: seconds between heartbeats.

    Raises:
        RendezvousError: a rank did not come.
    """
    folder = tempfile.mkdtemp(prefix="gradlane-")
    if len(folder) > _PATH_BYTES_MAX:
        # The path of a socket has room for 107 bytes.
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="gradlane-", dir="/tmp")
    sockets: dict[int, socket.socket] = {}
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        path = str(Path(folder) / "rank")
        listener.bind(path)
        listener.listen(layout.local_size)
        listener.settimeout(timeout_s)
        scope.put(f"local/socket/{scope.rank_info.rank}", path)
        for peer in range(layout.local_rank):
            sockets[peer] = _connect_to(layout, scope, peer, timeout_s)
        while len(sockets) < layout.local_size - 1:
            peer_socket, _ = listener.accept()
            peer_socket.settimeout(timeout_s)
            sockets[int.from_bytes(peer_socket.recv(4), "little")] = peer_socket
        link = LocalLink(layout, nbytes, sockets, core, interval_s)
    except (OSError, RendezvousError) as error:
        for one in sockets.values():
            one.close()
        if isinstance(error, RendezvousError):
            raise
        local = set(range(layout.local_size)).difference(sockets, [layout.local_rank])
        missing = sorted(layout.rank_of(layout.node, one) for one in local)
        named = f" (without rank {', '.join(map(str, missing))})" if missing else ""
        raise scope.abort(
            f"rank {scope.rank_info.rank} could not connect to the other ranks of its "
            f"node{named} in {timeout_s:g} s: {error} (longer waits: {CONNECT})",
            missing,
        ) from error
    finally:
        listener.close()
        shutil.rmtree(folder, ignore_errors=True)
    for one in sockets.values():
        one.settimeout(None)
    return link


def _connect_to(
    layout: NodeLayout, scope: RendezvousScope, peer: int, timeout_s: float
) -> socket.socket:
    rank = layout.rank_of(layout.node, peer)
    path = scope.get(f"local/socket/{rank}", rank).decode()
    peer_socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer_socket.settimeout(timeout_s)
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            peer_socket.connect(path)
            break
        except (BlockingIOError, InterruptedError):
            # The peer's backlog is full.
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)
    peer_socket.send(layout.local_rank.to_bytes(4, "little"))
    return peer_socket
