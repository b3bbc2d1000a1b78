"""A node whose ranks are threads, with collectives that check their order."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from gradlane.training.node.collective_queue import CollectiveQueue
from gradlane.training.node.failure import Failure
from gradlane.training.node.group import NodeGroup, Work
from gradlane.training.node.layout import NodeLayout
from gradlane.training.node.link import LocalLink
from gradlane.training.node.parts import TensorPart, cut_into_parts


class ThreadMessenger(LocalLink):
    """Sends messages to the queues of the other ranks."""

    def __init__(self, layout: NodeLayout, queues: Sequence[CollectiveQueue]) -> None:
        self.layout = layout
        self.peers = [one for one in range(layout.local_size) if one != layout.local_rank]
        self._queues = queues

    def send(self, peer: int, *message: Any, **named: Any) -> None:
        self._queues[peer].on_message(*message, **named)


class Rounds:
    """All collectives of a node; each is done when all ranks have issued the same."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.rounds: list[dict[int, tuple[str, int, Tensor]]] = []
        self.done = 0
        self.broken = ""
        self._lock = threading.Lock()

    def issue(self, rank: int, number: int, call: tuple[str, int, Tensor]) -> None:
        with self._lock:
            if number == len(self.rounds):
                self.rounds.append({})
            calls = self.rounds[number]
            calls[rank] = call
            if len({(kind, leader, one.numel()) for kind, leader, one in calls.values()}) > 1:
                self.broken = f"collective {number} is {calls}"
            if len(calls) == self.ranks:
                self._run(calls)
                # Their memory is released, as a collective's is.
                calls.clear()
                self.done += 1

    def _run(self, calls: dict[int, tuple[str, int, Tensor]]) -> None:
        kind, leader, _ = calls[0]
        own = calls[leader][2]
        for rank, (_, _, values) in calls.items():
            if rank != leader:
                (own.add_ if kind == "sum" else values.copy_)(values if kind == "sum" else own)


class ThreadGroup(NodeGroup):
    """One rank's end of the rounds."""

    def __init__(self, rounds: Rounds, rank: int) -> None:
        self._rounds = rounds
        self._rank = rank
        self._issued = 0
        self.has_ended = False

    def reduce(self, values: Tensor, root: int) -> Work:
        return self._issue("sum", values, root)

    def broadcast(self, values: Tensor, root: int) -> Work:
        return self._issue("spread", values, root)

    def abort(self) -> None:
        self.has_ended = True

    def _issue(self, kind: str, values: Tensor, root: int) -> Work:
        number, self._issued = self._issued, self._issued + 1
        self._rounds.issue(self._rank, number, (kind, root, values))
        return RoundWork(self._rounds, number)


class RoundWork:
    """A collective that was issued."""

    def __init__(self, rounds: Rounds, number: int) -> None:
        self._rounds = rounds
        self._number = number

    def is_completed(self) -> bool:
        return bool(self._rounds.broken) or self._number < self._rounds.done

    def wait(self) -> bool:
        if self._rounds.broken:
            raise RuntimeError(self._rounds.broken)
        return True


class EchoChannel:
    """A channel that gets each node's mean back as it is, at once, and waits for tensors."""

    def __init__(self, queue: CollectiveQueue, parts: Sequence[TensorPart]) -> None:
        self.queue = queue
        self.absent: dict[int, bool] = {}
        self.failure: Failure | None = None
        self._parts = parts
        self._left: Counter[int] = Counter()
        self._changed = threading.Condition()
        queue.set_sink(self)

    def begin(self) -> None:
        """Wait from now on for all tensors of a step."""
        self._left = Counter(part.tensor for part in self._parts)

    def on_node_mean(self, part: TensorPart, step: int, pointer: int, *, absent: bool) -> None:
        self.queue.on_result(part, step, absent=absent)

    def on_landed(self, part: TensorPart, step: int, *, absent: bool) -> None:
        with self._changed:
            self._left[part.tensor] -= 1
            self.absent[part.tensor] = absent
            self._changed.notify_all()

    def fail(self, failure: Failure) -> None:
        with self._changed:
            self.failure = failure
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait for all tensors of the step."""
        with self._changed:
            assert self._changed.wait_for(self._is_over, 30), f"left are {self._left}"
        assert self.failure is None, self.failure

    def _is_over(self) -> bool:
        return self.failure is not None or not self._left.total()


def rows_of(tensors: Sequence[Tensor], names: dict[Any, str]) -> list[dict[str, Any]]:
    """Return the plan's rows of some tensors."""
    return [
        {
            "name": f"t{number}",
            "numel": tensor.numel(),
            "dtype": names[tensor.dtype],
            "role": "parameter",
        }
        for number, tensor in enumerate(tensors)
    ]


class Node:
    """The collective queues of a node's ranks."""

    def __init__(
        self,
        ranks: int,
        rows: Sequence[dict[str, Any]],
        gradients: Sequence[Tensor],
        *,
        leaders: int = 1,
        group: Callable[[Rounds, int], Any] = ThreadGroup,
    ) -> None:
        self.parts = cut_into_parts(rows, leaders)
        self.rounds = Rounds(ranks)
        self.groups = [group(self.rounds, rank) for rank in range(ranks)]
        self.queues: list[CollectiveQueue] = []
        for rank in range(ranks):
            messenger = ThreadMessenger(NodeLayout(1, ranks, 0, rank, leaders), self.queues)
            self.queues.append(
                CollectiveQueue(messenger, self.parts, gradients, self._opener(rank))
            )
        for queue in self.queues:
            queue.wait_open(10)
        self.channels = [EchoChannel(queue, self.parts) for queue in self.queues]

    def _opener(self, rank: int) -> Callable[[], Any]:
        return lambda: self.groups[rank]

    def stop(self) -> None:
        """Stop all queues."""
        for queue in self.queues:
            queue.stop()
