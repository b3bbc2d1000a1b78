"""The rank program of `gradlane lab calibrate`: what the transport's threads cost, one by one.

It answers what the transport measurements answer, and beside that: the latencies of single
tensors on idle ports, and what a connection takes whose peer has gone.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from typing import Any

from gradlane.lab.cluster.rank_program import answer_requests
from gradlane.lab.transport.node import ExchangeNode, GradlaneExchange
from gradlane.lab.transport.trace import BROADCAST, PUSH, TraceRow

_CONNECT_TIMEOUT_S = 20.0
_FRAME_BYTES = 65_600
_FILL_WAIT_S = 0.3
_PAUSE_S = 0.005


class LatencyExchange(GradlaneExchange):
    """Ranks that exchange one tensor again and again on idle ports."""

    def run_latency(self, trials: int) -> dict[str, Any]:
        """Exchange the first tensor, the only one, with a pause before each time.

        Args:
            trials: how often.

        Returns:
            Seconds, one a trial: `command_s` (from before the call to the first frame in the
            kernel's hands), `wake_s` (from the last frame of the result to the end of the wait),
            and `turn_s` of the owner (from the last contribution to the first reply in the
            kernel's hands); none where this rank does not see the event.
        """
        found: dict[str, list[float]] = {"command_s": [], "wake_s": [], "turn_s": []}
        for _ in range(trials):
            self.meet()
            self.channel.take_trace()
            step = self.next_step()
            time.sleep(_PAUSE_S)
            before_ns = time.monotonic_ns()
            self.give(0, step)
            self.channel.step_end(step)
            self.channel.wait([0], step)
            after_ns = time.monotonic_ns()
            self.channel.wait_step(step)
            self.meet()
            trace = [row for row in self.channel.take_trace() if row[5] == 0]
            pushed = _times(trace, "tx", PUSH)
            received = _times(trace, "rx", BROADCAST)
            gathered = _times(trace, "rx", PUSH)
            replied = _times(trace, "tx", BROADCAST)
            if pushed and pushed[0] >= before_ns:
                found["command_s"].append((pushed[0] - before_ns) / 1e9)
            if received:
                found["wake_s"].append((after_ns - received[-1]) / 1e9)
            if gathered and replied:
                begin_ns = max(gathered[-1], before_ns)
                found["turn_s"].append((replied[0] - begin_ns) / 1e9)
        return found


def _times(trace: list[TraceRow], way: str, kind: int) -> list[int]:
    return [row[0] for row in trace if row[1] == way and row[2] == kind]


class Filler:
    """A connection whose peer stops answering, and what the kernel takes of it nevertheless."""

    def __init__(self) -> None:
        """Connect nothing yet."""
        self._connection: socket.socket | None = None
        self._kept: list[socket.socket] = []

    def connect(self, address: str, port: int, *, listens: bool, asked_bytes: int) -> None:
        """Connect two ranks; the one that does not listen asks for a send buffer."""
        if listens:
            with socket.create_server((address, port)) as listener:
                listener.settimeout(_CONNECT_TIMEOUT_S)
                self._kept.append(listener.accept()[0])
            return
        deadline_s = time.monotonic() + _CONNECT_TIMEOUT_S
        while True:
            try:
                connection = socket.create_connection((address, port), timeout=2.0)
                break
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, asked_bytes)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self._connection = connection

    def fill(self) -> dict[str, Any]:
        """Send until the kernel takes no more; returns `option_bytes` and `taken_bytes`."""
        if self._connection is None:
            return {}
        frame = memoryview(bytes(_FRAME_BYTES))
        taken, end_s = 0, time.monotonic() + _FILL_WAIT_S
        while time.monotonic() < end_s:
            with contextlib.suppress(BlockingIOError):
                taken += self._connection.send(frame)
        option = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        return {"option_bytes": option, "taken_bytes": taken}


def main() -> None:
    """Answer requests for the rank in argument one until the input ends."""
    rank = int(sys.argv[1])
    filler = Filler()
    node = ExchangeNode(lambda **named: LatencyExchange(rank, **named))

    def connect(**named: Any) -> None:
        if rank < 2:
            filler.connect(listens=rank == 0, **named)

    answer_requests(
        lambda _: {
            **node.kinds,
            "connect": connect,
            "fill": filler.fill,
            "latency": lambda **named: node.exchange.run_latency(**named),
        }
    )


if __name__ == "__main__":
    main()
