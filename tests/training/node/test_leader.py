"""The leader of a node, over a channel that is a stub."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from gradlane.training.node.layout import NodeLayout
from gradlane.training.node.leader import NodeLeader


class LateSquares:
    """A channel whose squares are known late, and forgotten when a step begins."""

    def __init__(self) -> None:
        self.known = threading.Event()
        self.measured = -1

    def step_begin(self, step: int) -> None:
        self.measured = -1

    def wait_step(self, step: int) -> None:
        """Every mean is there."""

    def measure_squares(self, tensors: int, step: int) -> None:
        self.measured = step

    def step_end(self, step: int) -> None:
        """Nothing is left to be done."""

    def wait_norm(self, step: int) -> float:
        assert self.known.wait(60.0)
        assert self.measured == step
        return 1.5


class Sink:
    """Keeps what a leader hands on."""

    def __init__(self) -> None:
        self.norms: list[tuple[int, float]] = []
        self.failures: list[Any] = []

    def distribute_mean(self, *_: Any) -> None:
        raise AssertionError("there are no parts")

    def distribute_blocks(self, *_: Any) -> None:
        raise AssertionError("there are no parts")

    def distribute_norm(self, step: int, norm: float) -> None:
        self.norms.append((step, norm))

    def distribute_change(self, *_: Any) -> None:
        raise AssertionError("no node is lost")

    def take_change(self, *_: Any) -> None:
        raise AssertionError("no node is lost")

    def fail(self, failure: Any) -> None:
        self.failures.append(failure)


def test_a_step_begins_when_the_norm_of_the_one_before_is_known() -> None:
    """Also where the program read all means, and never asked for the norm."""
    channel, sink = LateSquares(), Sink()
    link: Any = SimpleNamespace(layout=NodeLayout(2, 1, 0, 0, 1))
    core: Any = SimpleNamespace(ChannelError=ConnectionError)
    stub: Any = channel
    leader = NodeLeader(core, stub, link, [], {}, sink, None, 0, goes_on=False)
    leader.begin_step(1)
    leader.measure_squares(1, 1)
    leader.end_step(1)
    begins = threading.Thread(target=leader.begin_step, args=(2,), daemon=True)
    begins.start()
    begins.join(0.2)
    assert begins.is_alive()
    channel.known.set()
    begins.join(60.0)
    assert not begins.is_alive()
    leader.stop()
    assert sink.norms == [(1, 1.5)] and not sink.failures
