"""The leader of parts: it adds up the node's contributions, submits the sum, and distributes the
mean. Blocks it collects, submits as one block, and distributes those of all nodes.

Of its threads, one adds up and submits parts in the order in which their contributions are
complete. The others wait, for means, for the norm of all gradients and, where training goes on
without lost nodes, for new members, and pass them to the ranks of the node. Means of collectives
arrive already added up.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from ctypes import memset
from dataclasses import dataclass, field
from typing import Protocol

from gradlane.training.core import CoreChannel, CoreModule, MembershipRow
from gradlane.training.node.blocks import ABSENT, block_sizes, join_blocks
from gradlane.training.node.failure import (
    Failure,
    failure_in_world_ranks,
    in_world_ranks,
    mark_world_ranks,
)
from gradlane.training.node.layout import NodeLayout
from gradlane.training.node.link import LocalLink
from gradlane.training.node.parts import TensorPart, node_block_most_bytes
from gradlane.training.node.sums import Memory, copy, local_mean


class MeanSink(Protocol):
    """Receives means and failures of a node leader."""

    def distribute_mean(self, part: TensorPart, step: int, absent: bool) -> None:
        """Take the mean over nodes, which is in the leader's memory, for all ranks of the node."""

    def distribute_blocks(self, part: TensorPart, step: int, sizes: Sequence[int]) -> None:
        """Take the blocks of all nodes, which are in the leader's memory, for all ranks of the
        node: the bytes of each, or `ABSENT`."""

    def distribute_norm(self, step: int, norm: float) -> None:
        """Take the norm of all gradients of a step, for all ranks of the node."""

    def distribute_change(self, change: MembershipRow) -> None:
        """Take a change of the members, by ranks of the world, for all ranks of the node."""

    def take_change(self, change: MembershipRow) -> None:
        """Take the question what the job's store holds, for this rank."""

    def fail(self, failure: Failure) -> None:
        """Take a failure; no means follow."""


@dataclass(frozen=True)
class Contribution:
    """One rank's contribution to a part.

    Attributes:
        part: the part.
        local_rank: the contributing rank.
        step: number of the step.
        memory: its gradient or block in this process; None: it has none.
    """

    part: TensorPart
    local_rank: int
    step: int
    memory: Memory | None


@dataclass(frozen=True)
class NodeMean:
    """The mean of a part over the ranks of the node.

    Attributes:
        part: the part.
        step: number of the step.
        pointer: address of the mean over the node, which the mean over all nodes replaces.
        absent: True if no rank of the node has a gradient.
    """

    part: TensorPart
    step: int
    pointer: int
    absent: bool


@dataclass
class _PartProgress:
    count: int = 0
    present: dict[int, Memory] = field(default_factory=dict)


class NodeLeader:
    """The parts of this leader, and its channel to the leaders of the other nodes."""

    def __init__(
        self,
        core: CoreModule,
        channel: CoreChannel,
        link: LocalLink,
        parts: Sequence[TensorPart],
        rooms: Mapping[int, int],
        sink: MeanSink,
        source: int | None,
        first_node: int,
        *,
        goes_on: bool,
    ) -> None:
        """Start the threads.

        Args:
            core: defines the errors.
            channel: to the same local rank of every other node.
            link: to the other ranks of this node.
            parts: all parts.
            rooms: offset of each part's room for blocks (`room_offsets`).
            sink: receives means and failures.
            source: local rank whose values step 0 broadcasts; None if it is on another node.
            first_node: the first node of the channel; the others follow in their order.
            goes_on: whether training goes on when nodes are lost.
        """
        self.channel = channel
        self._core = core
        self._link = link
        self._layout: NodeLayout = link.layout
        self._local_rank = self._layout.local_rank
        self.own_parts = [part for part in parts if part.leader == self._local_rank]
        self._index = {part.number: index for index, part in enumerate(self.own_parts)}
        self._rooms = rooms
        self._sink = sink
        self._source = source
        self._first_node = first_node
        self._goes_on = goes_on
        self._progress = [_PartProgress() for _ in self.own_parts]
        self._inbox: queue.SimpleQueue[Contribution | NodeMean | int | None] = queue.SimpleQueue()
        self._begun_steps: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._measured_steps: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._sum_lock = threading.Lock()
        self._may_read = True
        self._submitted = 0
        self._step_ended = threading.Event()
        self._step_ended.set()
        self._norm_is_known = threading.Event()
        self._norm_is_known.set()
        self._threads = [
            threading.Thread(target=self._run_guarded, args=(run,), name=name, daemon=True)
            for run, name in (
                (self._sum_loop, "gradlane-node-sum"),
                (self._result_loop, "gradlane-node"),
                (self._norm_loop, "gradlane-node-norm"),
            )
        ]
        for thread in self._threads:
            thread.start()
        if goes_on:
            # It ends with the channel.
            name = "gradlane-node-members"
            threading.Thread(target=self._members_loop, name=name, daemon=True).start()

    def begin_step(self, step: int) -> None:
        """Begin a step; the one before must be complete on this rank."""
        if step > 0:
            # Every mean may be here a moment before the last step is ended and complete.
            self._step_ended.wait()
            self.channel.wait_step(step - 1)
            # A program need not ask for the norm, and the channel knows the squares of one step.
            self._norm_is_known.wait()
        self._step_ended.clear()
        self.channel.step_begin(step)
        self._begun_steps.put(step)

    def measure_squares(self, tensors: int, step: int) -> None:
        """Have the nodes add up squares in the step that has just begun.

        Args:
            tensors: number of leading tensors, which are as many leading parts of a single leader.
            step: number of the step.
        """
        self._norm_is_known.clear()
        self.channel.measure_squares(tensors, step)
        self._measured_steps.put(step)

    def submit(self, item: Contribution | NodeMean) -> None:
        """Queue a contribution of a rank of the node, or a node's mean; returns at once."""
        self._inbox.put(item)

    def end_step(self, step: int) -> None:
        """Record that this rank has ended its step."""
        self._inbox.put(step)

    def reorder(self, priorities: Sequence[int]) -> None:
        """Announce new priorities of the tensors to all nodes."""
        self.channel.switch_priorities([priorities[part.tensor] for part in self.own_parts])

    def stop_reading(self) -> None:
        """Stop reading gradients after a failure; waits for the one that is being read."""
        with self._sum_lock:
            self._may_read = False

    def wait_for_step(self, timeout_s: float) -> None:
        """Wait until the threads are done with a step whose means have all arrived.

        Args:
            timeout_s: longest wait, in seconds; it is no error if they are not done then.
        """
        deadline_s = time.monotonic() + timeout_s
        for done in (self._step_ended, self._norm_is_known):
            done.wait(max(0.0, deadline_s - time.monotonic()))

    def stop(self) -> None:
        """End the threads; the channel must have ended, or its last step be complete."""
        self._inbox.put(None)
        self._begun_steps.put(None)
        self._measured_steps.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def abort(self, reason: str) -> None:
        """Abort and tell all nodes the reason."""
        with contextlib.suppress(self._core.ChannelError):
            self.channel.abort(mark_world_ranks(reason))

    def to_failure(self, error: Exception) -> Failure:
        """Convert an error of the channel between nodes into a failure with ranks of the world."""

        return failure_in_world_ranks(self._core, error, self._rank_of_node)

    def _rank_of_node(self, node: int) -> int:
        """Return the leader of a node, by its number in the channel."""
        return self._layout.rank_of(
            (self._first_node + node) % self._layout.nodes, self._local_rank
        )

    # ---- the threads

    def _run_guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except self._core.ChannelError as error:
            self._sink.fail(self.to_failure(error))
        except Exception as error:
            what = f"{type(error).__name__} while adding up for a node: {error}"
            self._sink.fail(Failure(what, None, None))
        # Who waited raises the failure from the channel.
        self._step_ended.set()
        self._norm_is_known.set()

    def _sum_loop(self) -> None:
        ended = -1
        while (item := self._inbox.get()) is not None:
            if isinstance(item, int):
                ended = item
            elif isinstance(item, NodeMean):
                self._submit_mean(item)
            else:
                self._collect(item)
            if ended >= 0 and self._submitted == self._parts_in_step(ended):
                self.channel.step_end(ended)
                self._submitted, ended = 0, -1
                self._step_ended.set()

    def _parts_in_step(self, step: int) -> int:
        return sum(part.takes_part(step) for part in self.own_parts)

    def _collect(self, item: Contribution) -> None:
        index = self._index[item.part.number]
        progress = self._progress[index]
        progress.count += 1
        if item.memory is not None:
            progress.present[item.local_rank] = item.memory
        if progress.count < self._layout.local_size:
            return
        self._progress[index] = _PartProgress()
        if item.part.has_blocks:
            self._submit_blocks(item.part, item.step, progress.present)
            return
        pointer = self._link.address(self._local_rank, item.part.offset)
        with self._sum_lock:
            if not self._may_read:
                return
            if progress.present:
                self._write_mean(item.part, item.step, progress.present, pointer)
        self._submit_mean(NodeMean(item.part, item.step, pointer, not progress.present))

    def _submit_mean(self, mean: NodeMean) -> None:
        if self._goes_on and mean.absent and mean.step > 0:
            # Where a node is lost, parts of the mean may be over nodes without a gradient.
            memset(mean.pointer, 0, mean.part.nbytes)
        call = self.channel.tensor_absent if mean.absent else self.channel.gradient_ready
        call(self._index[mean.part.number], mean.step, mean.pointer, mean.part.nbytes)
        self._submitted += 1

    def _submit_blocks(self, part: TensorPart, step: int, present: dict[int, Memory]) -> None:
        """Submit the blocks of the node's ranks as one."""
        index = self._index[part.number]
        self._submitted += 1
        if not present:
            self.channel.block_absent(index, step)
            return
        room = self._room(part, self._layout.node)
        with self._sum_lock:
            if not self._may_read:
                return
            nbytes = join_blocks(present, self._layout.local_size, room)
        self.channel.block_ready(index, step, room, nbytes)

    def _room(self, part: TensorPart, node: int) -> int:
        """Return the address of the room for a node's block of a part."""
        most_bytes = node_block_most_bytes(part.nbytes, self._layout.local_size)
        return self._link.address(self._local_rank, self._rooms[part.number] + node * most_bytes)

    def _gather(self, part: TensorPart, step: int) -> list[int]:
        """Put the blocks of all nodes into their room, and return the bytes of each node's."""
        sizes = [ABSENT] * self._layout.nodes
        blocks = self.channel.take_blocks(self._index[part.number], step)
        if blocks is None:
            return sizes
        for number, region in enumerate(blocks.regions()):
            node = (self._first_node + number) % self._layout.nodes
            if region is None:
                continue
            sizes[node] = region[1]
            if node != self._layout.node:
                block_sizes(region, self._layout.local_size)
                copy(region[0], self._room(part, node), region[1])
        blocks.release()
        return sizes

    def _write_mean(
        self, part: TensorPart, step: int, present: dict[int, Memory], pointer: int
    ) -> None:
        if step == 0:
            # Step 0 broadcasts the source's values; those of other nodes are not read.
            if self._source is not None and self._source in present:
                copy(present[self._source][0], pointer, part.nbytes)
            return
        in_order = [memory for _, memory in sorted(present.items())]
        local_mean(part.dtype, in_order, self._layout.local_size, (pointer, part.nbytes))

    def _result_loop(self) -> None:
        while (step := self._begun_steps.get()) is not None:
            left = self._parts_in_step(step)
            while left:
                for index, absent in self.channel.next_ready(step):
                    part = self.own_parts[index]
                    if part.has_blocks:
                        self._sink.distribute_blocks(part, step, self._gather(part, step))
                    else:
                        self._sink.distribute_mean(part, step, absent)
                    left -= 1

    def _members_loop(self) -> None:
        with contextlib.suppress(self._core.ChannelError):
            while True:
                for change in self.channel.next_changes(wait=True):
                    kind, generation, nodes, step, text = change
                    if kind == "claim":
                        self._sink.take_change(change)
                        continue
                    firsts = sorted(self._rank_of_node(node) - self._local_rank for node in nodes)
                    ranks = [
                        first + local
                        for first in firsts
                        for local in range(self._layout.local_size)
                    ]
                    reason = in_world_ranks(text, self._rank_of_node)
                    self._sink.distribute_change((kind, generation, ranks, step, reason))

    def _norm_loop(self) -> None:
        while (step := self._measured_steps.get()) is not None:
            self._sink.distribute_norm(step, self.channel.wait_norm(step))
            self._norm_is_known.set()
