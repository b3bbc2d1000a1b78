"""What a rank does that carries for its node: add up what the node's ranks gave, send it, pass on
the mean that comes back.

Two threads: one adds up and hands over, in the order in which contributions become whole; one
waits for means and lets the other ranks of the node have them. What collectives have added up
comes whole.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gradlane.training.core import Channel, CoreModule
from gradlane.training.node.failure import Failure, from_between_nodes, marked
from gradlane.training.node.layout import Layout
from gradlane.training.node.link import LocalLink
from gradlane.training.node.shares import Part
from gradlane.training.node.sums import Memory, copy, local_mean


class Side(Protocol):
    """This rank's end of the node, which hears what happens here."""

    def pass_on(self, part: Part, step: int, absent: bool) -> None:
        """The mean over nodes is in the carrier's memory, for all ranks of the node."""

    def fail(self, failure: Failure) -> None:
        """Nothing more is to be had."""


@dataclass(frozen=True)
class Contribution:
    """A rank of the node has spoken about a part.

    Attributes:
        part: the part.
        local_rank: who.
        step: in which step.
        memory: where its gradient is in this process, or None: there is none.
    """

    part: Part
    local_rank: int
    step: int
    memory: Memory | None


@dataclass(frozen=True)
class NodeMean:
    """What all ranks of the node have said about a part.

    Attributes:
        part: the part.
        step: in which step.
        pointer: where the mean over the node's ranks is, and that over all nodes is to come.
        absent: whether none of them has anything.
    """

    part: Part
    step: int
    pointer: int
    absent: bool


@dataclass
class _Gathered:
    heard: int = 0
    present: dict[int, Memory] = field(default_factory=dict)


class NodeLeader:
    """The parts that this rank carries, and its channel to the carriers of the other nodes."""

    def __init__(
        self,
        core: CoreModule,
        channel: Channel,
        link: LocalLink,
        parts: Sequence[Part],
        side: Side,
        source: int | None,
        first_node: int,
    ) -> None:
        """Start the threads.

        Args:
            core: where errors come from.
            channel: to the same local rank of every other node.
            link: to the other ranks of this node.
            parts: all parts.
            side: hears of means and failures.
            source: local rank whose values step 0 spreads, if it is one of this node.
            first_node: the node that is the channel's first, the others follow in their order.
        """
        self.channel = channel
        self._core = core
        self._link = link
        self._layout: Layout = link.layout
        self._own = self._layout.local_rank
        self.carried = [part for part in parts if part.carrier == self._own]
        self._index = {part.number: index for index, part in enumerate(self.carried)}
        self._side = side
        self._source = source
        self._first_node = first_node
        self._gathered = [_Gathered() for _ in self.carried]
        self._said: queue.SimpleQueue[Contribution | NodeMean | int | None] = queue.SimpleQueue()
        self._begun: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._summing = threading.Lock()
        self._reads = True
        self._given = 0
        self._has_ended = threading.Event()
        self._has_ended.set()
        self._threads = [
            threading.Thread(target=self._guarded, args=(run,), name=name, daemon=True)
            for run, name in ((self._add_up, "gradlane-node-sum"), (self._pass_on, "gradlane-node"))
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, step: int) -> None:
        """Begin a step; the one before must be complete on this rank."""
        if step > 0:
            # Every mean may be here a moment before the last step is ended and complete.
            self._has_ended.wait()
            self.channel.wait_step(step - 1)
        self._has_ended.clear()
        self.channel.step_begin(step)
        self._begun.put(step)

    def hear(self, said: Contribution | NodeMean) -> None:
        """Note what a rank of the node says, this one included, or all; returns at once."""
        self._said.put(said)

    def end(self, step: int) -> None:
        """Note that this rank has ended its step."""
        self._said.put(step)

    def reorder(self, priorities: Sequence[int]) -> None:
        """Announce another order of urgency of the tensors to all nodes."""
        self.channel.switch_priorities([priorities[part.tensor] for part in self.carried])

    def let_go(self) -> None:
        """Read no gradients from now on, after a failure; waits for the one that is being read."""
        with self._summing:
            self._reads = False

    def stop(self) -> None:
        """End the threads; the channel must have ended, or its last step be complete."""
        self._said.put(None)
        self._begun.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def abort(self, reason: str) -> None:
        """Give up and tell all nodes why."""
        with contextlib.suppress(self._core.ChannelError):
            self.channel.abort(marked(reason))

    def translated(self, error: Exception) -> Failure:
        """Return a failure of the channel between nodes in ranks of the whole world."""

        def rank_of_node(node: int) -> int:
            return self._layout.rank_of((self._first_node + node) % self._layout.nodes, self._own)

        return from_between_nodes(self._core, error, rank_of_node)

    # ---- the threads

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except self._core.ChannelError as error:
            self._side.fail(self.translated(error))
        except Exception as error:
            what = f"{type(error).__name__} while adding up for a node: {error}"
            self._side.fail(Failure(what, None, None))
        # Whoever begins a step hears of the failure from the channel.
        self._has_ended.set()

    def _add_up(self) -> None:
        ended = -1
        while (said := self._said.get()) is not None:
            if isinstance(said, int):
                ended = said
            elif isinstance(said, NodeMean):
                self._hand_over(said)
            else:
                self._gather(said)
            if ended >= 0 and self._given == self._due(ended):
                self.channel.step_end(ended)
                self._given, ended = 0, -1
                self._has_ended.set()

    def _due(self, step: int) -> int:
        return sum(step == 0 or not part.only_first for part in self.carried)

    def _gather(self, said: Contribution) -> None:
        index = self._index[said.part.number]
        gathered = self._gathered[index]
        gathered.heard += 1
        if said.memory is not None:
            gathered.present[said.local_rank] = said.memory
        if gathered.heard < self._layout.local_size:
            return
        self._gathered[index] = _Gathered()
        pointer = self._link.address(self._own, said.part.offset)
        with self._summing:
            if not self._reads:
                return
            if gathered.present:
                self._write(said.part, said.step, gathered.present, pointer)
        self._hand_over(NodeMean(said.part, said.step, pointer, not gathered.present))

    def _hand_over(self, mean: NodeMean) -> None:
        call = self.channel.tensor_absent if mean.absent else self.channel.gradient_ready
        call(self._index[mean.part.number], mean.step, mean.pointer, mean.part.nbytes)
        self._given += 1

    def _write(self, part: Part, step: int, present: dict[int, Memory], pointer: int) -> None:
        if step == 0:
            # Values are spread, not averaged; on all nodes but one nobody looks at these.
            if self._source is not None and self._source in present:
                copy(present[self._source][0], pointer, part.nbytes)
            return
        in_order = [memory for _, memory in sorted(present.items())]
        local_mean(part.dtype, in_order, self._layout.local_size, (pointer, part.nbytes))

    def _pass_on(self) -> None:
        while (step := self._begun.get()) is not None:
            left = self._due(step)
            while left:
                for index, absent in self.channel.next_ready(step):
                    self._side.pass_on(self.carried[index], step, absent)
                    left -= 1
