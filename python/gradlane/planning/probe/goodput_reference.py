"""The goodput reference: plain TCP streams that saturate a port in both directions at once.

Each node sends to the next one and receives from the previous one, as a ring, so every port carries
one stream each way. Payload bytes that arrive in the middle of the streams' time count. The result
is the median over tenths of a second: a pause of the whole virtual machine says nothing about the
ports.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

_CHUNK_BYTES = 1 << 20
_LATE_S = 5.0
"""Longest that a node may begin after another one."""
_CONNECT_TIMEOUT_S = 20.0
_PART_S = 0.1


@dataclass(frozen=True)
class StreamResult:
    """The receiving rate of one node.

    Attributes:
        goodput_bps: payload bits a second, median over the parts of the window.
        mean_bps: payload bits a second, mean over the window.
        congestion_control: the algorithm that the sending socket used.
    """

    goodput_bps: float
    mean_bps: float
    congestion_control: str


def _connect(address: str, port: int) -> socket.socket:
    deadline_s = time.monotonic() + _CONNECT_TIMEOUT_S
    while True:
        try:
            return socket.create_connection((address, port), timeout=2.0)
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


def send_until(connection: socket.socket, end_s: float) -> None:
    """Send at full rate until a time, or until the receiver closes."""
    chunk = memoryview(bytes(_CHUNK_BYTES))
    # A receiver that is done closes first: that ends the stream as well as the clock does.
    with contextlib.suppress(OSError):
        while (left_s := end_s - time.monotonic()) > 0.0:
            connection.settimeout(left_s)
            connection.send(chunk)


def run_stream(
    addresses: Sequence[str],
    node: int,
    *,
    port: int,
    start_s: float,
    ramp_s: float,
    window_s: float,
) -> StreamResult:
    """Send to the next node and receive from the previous one; all nodes call this together.

    Args:
        addresses: every node's address.
        node: index of this node.
        port: TCP port to listen on, free on every node.
        start_s: `time.monotonic()` at which all nodes begin to send.
        ramp_s: seconds before the window, in which the streams find their rate.
        window_s: seconds in which arrivals count.

    Raises:
        OSError: a neighbour cannot be reached.
    """
    listener = socket.create_server((addresses[node], port))
    listener.settimeout(_CONNECT_TIMEOUT_S)
    outgoing = _connect(addresses[(node + 1) % len(addresses)], port)
    incoming, _ = listener.accept()
    listener.close()
    congestion_control = outgoing.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    time.sleep(max(0.0, start_s - time.monotonic()))
    # It goes on until the receiver closes, so that no receiver's window sees its end.
    end_s = time.monotonic() + ramp_s + window_s + 2 * _LATE_S
    sender = threading.Thread(target=send_until, args=(outgoing, end_s))
    sender.start()
    incoming.settimeout(_LATE_S)
    try:
        # On a busy machine a node may begin later than the one that it sends to.
        incoming.recv(1)
        open_s = max(start_s, time.monotonic()) + ramp_s
        close_s = open_s + window_s
        incoming.settimeout(2.0)
        arrivals = receive_until(incoming, close_s)
    finally:
        # Unread bytes make this a reset, which ends the other node's sender at once.
        incoming.close()
        sender.join()
        outgoing.close()
    rates_bps = part_rates(arrivals, open_s)
    if not rates_bps or max(rates_bps) == 0:
        raise OSError(f"node {node} received no stream in {ramp_s + window_s:.1f} s")
    name = congestion_control.rstrip(b"\0").decode()
    return StreamResult(statistics.median(rates_bps), statistics.fmean(rates_bps), name)


def receive_until(connection: socket.socket, end_s: float) -> list[tuple[float, int]]:
    """Read until a time or the end of the stream; return (time, bytes so far) of each read."""
    scratch = bytearray(_CHUNK_BYTES)
    arrivals: list[tuple[float, int]] = []
    received_bytes, now_s = 0, 0.0
    while now_s < end_s:
        count = connection.recv_into(scratch)
        if count == 0:
            break
        now_s = time.monotonic()
        received_bytes += count
        arrivals.append((now_s, received_bytes))
    return arrivals


def part_rates(
    arrivals: Sequence[tuple[float, int]],
    open_s: float,
    part_s: float = _PART_S,
) -> list[float]:
    """Return bits a second of each part of the window, between the reads that bound it.

    The last read before the window bounds its first part, and the one that ends it its last: where
    a busy machine lets nobody read in between, both bound the only one.
    """
    rates_bps: list[float] = []
    start: tuple[float, int] | None = None
    for time_s, total_bytes in arrivals:
        if start is None or time_s < open_s:
            start = (time_s, total_bytes)
        elif time_s - start[0] >= part_s:
            rates_bps.append(8 * (total_bytes - start[1]) / (time_s - start[0]))
            start = (time_s, total_bytes)
    return rates_bps
