"""A channel to all ranks that reaches the ranks of its own node through shared memory.

It implements the core's `Channel` protocol, and not `RankChannel`. A gradient goes to the node
leaders of its parts. Once all ranks of the node have contributed, the leader submits the node's
mean to the channel between nodes, and the result lands on every rank of the node. All ranks copy
the same bytes and so have the same bits. Blocks are collected by the leader, sent as one, and
copied by every rank. Gradients that collectives add up reach the leader through `CollectiveQueue`
instead; step 0 and tensors that are not gradients never do.

A rank that ends without a goodbye fails the channel at once, on its node and, through the leaders,
on all others. A rank whose process stands still fails it after the silence timeout. Where training
goes on without lost ranks, those of its node are lost with it, and the other nodes go on.
"""

from __future__ import annotations

import array
import json
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from torch import Tensor

from gradlane.errors import RefusedError
from gradlane.formats.longer_waits import CLOSE, PROGRESS, SILENCE
from gradlane.training.core import CoreChannel, CoreModule, CoreRow, MembershipRow, SquareSum
from gradlane.training.node.blocks import ABSENT, GatheredBlocks
from gradlane.training.node.collective_queue import CollectiveQueue
from gradlane.training.node.devices import ON_HOST, SumBackend
from gradlane.training.node.failure import Failure, KeepaliveMonitor
from gradlane.training.node.landed_parts import LandedParts
from gradlane.training.node.leader import Contribution, NodeLeader, NodeMean
from gradlane.training.node.link import (
    BYE,
    COLLECTIVE_KINDS,
    CONTRIBUTION,
    DISCONNECTED,
    FAILED,
    MEMBERS,
    NORM,
    ORDER,
    RESIDUAL,
    RESULT,
    LocalLink,
    Message,
)
from gradlane.training.node.parts import TensorPart, node_block_most_bytes
from gradlane.training.node.reports import NodeReports
from gradlane.training.node.sums import Memory, copy
from gradlane.training.node.wait_stats import WaitStats
from gradlane.training.rendezvous.deadline import SuspendAwareDeadline

_POLL_S = 1.0
_NORM = struct.Struct("<qd")
"""A step, and the norm of its gradients."""


class NodeChannel:
    """Connections to the ranks of this node and, on a leader, to the other nodes."""

    def __init__(
        self,
        core: CoreModule,
        link: LocalLink,
        rows: Sequence[Mapping[str, Any]],
        parts: Sequence[TensorPart],
        rooms: Mapping[int, int],
        inter_node: CoreChannel | None,
        *,
        source_rank: int,
        progress_timeout_s: float,
        silence_timeout_s: float,
        goes_on: bool,
        collectives: CollectiveQueue | None = None,
        sum_backend: SumBackend = ON_HOST,
    ) -> None:
        """Start listening to the ranks of this node.

        Args:
            core: defines the errors.
            link: to the ranks of this node.
            rows: the plan's tensors.
            parts: all parts, with their leaders.
            rooms: offset of each part's room for blocks (`room_offsets`).
            inter_node: the channel to the other nodes; None unless this rank is a leader.
            source_rank: the rank whose values step 0 broadcasts.
            progress_timeout_s: longest wait for ranks that are alive but do not take part.
            silence_timeout_s: longest time that a process of this node may stand still.
            goes_on: whether training goes on when nodes are lost.
            collectives: adds gradients up on their device; None: in shared memory.
            sum_backend: for reports.
        """
        self._core = core
        self._link = link
        self._collectives = collectives
        if collectives is not None:
            collectives.set_sink(self)
        self._layout = link.layout
        self._local_rank = link.layout.local_rank
        self._parts = parts
        self._parts_of_tensor: list[list[TensorPart]] = [[] for _ in rows]
        for part in parts:
            self._parts_of_tensor[part.tensor].append(part)
        self._names = [str(row["name"]) for row in rows]
        # The channel between nodes renews its own with each word of an agreement, of which this one
        # hears the end: two nodes may fall silent one after the other until then.
        self._timeout_s = progress_timeout_s + (2 * silence_timeout_s if goes_on else 0.0)
        self._keepalive = KeepaliveMonitor(silence_timeout_s, link.peers, link.pulse)
        self._is_source = source_rank == self._layout.rank_of(self._layout.node, self._local_rank)
        self._changed = threading.Condition()
        self._copy_lock = threading.Lock()
        self._failure: Failure | None = None
        self._goes_on = goes_on
        self._changes: list[MembershipRow] = []
        self._changes_heard = 0
        self._has_opened = False
        self._closing = False
        self._has_parted = False
        self._departed: set[int] = set()
        self._pointers = [0] * len(rows)
        self._landed = LandedParts(rows, parts, self._changed)
        self._rooms = rooms
        self._gathered: dict[tuple[int, int], GatheredBlocks] = {}
        self._waits = WaitStats(self._names)
        self._norm = (-1, 0.0)
        self._residual_messages: Counter[int] = Counter()
        self._collective_parts: set[int] = set()
        node, source = divmod(source_rank, self._layout.local_size)
        self._leader = (
            None
            if inter_node is None
            else NodeLeader(
                core,
                inter_node,
                link,
                parts,
                rooms,
                self,
                source if node == self._layout.node else None,
                node,
                goes_on=goes_on,
            )
        )
        self._reports = NodeReports(
            self._leader, collectives, link.layout, sum_backend, self._waits
        )
        self._listener_thread = threading.Thread(
            target=self._listen, name="gradlane-node-listen", daemon=True
        )
        self._listener_thread.start()

    # ---- gradients

    def step_begin(self, step: int) -> None:
        """Begin a step; the one before must be complete."""
        self._check()
        self._landed.begin_step()
        if self._leader is not None:
            self._call_leader(lambda leader: leader.begin_step(step))

    def gradient_ready(self, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        """Submit a gradient; the channel borrows the memory until the tensor is ready."""
        self._submit(tensor, step, pointer, absent=False)

    def tensor_absent(self, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        """Report that this rank has no gradient; the other ranks' result lands in the memory."""
        self._submit(tensor, step, pointer, absent=True)

    def step_end(self, step: int) -> None:
        """Record that `optimizer.step()` was called."""
        self._check()
        if self._leader is not None:
            self._leader.end_step(step)

    def _submit(self, tensor: int, step: int, pointer: int, *, absent: bool) -> None:
        self._check()
        self._pointers[tensor] = pointer
        # In step 0 only the source's values count.
        copies = not absent and (step > 0 or self._is_source)
        for part in self._parts_of_tensor[tensor]:
            start = pointer + part.first_byte
            if part.leader == self._local_rank:
                assert self._leader is not None
                memory = None if absent else (start, part.nbytes)
                self._leader.submit(Contribution(part, self._local_rank, step, memory))
                continue
            if copies:
                copy(start, self._link.address(self._local_rank, part.offset), part.nbytes)
                self._reports.local_bytes += part.nbytes
            self._link.send(part.leader, CONTRIBUTION, part.number, step, absent=absent)

    def block_ready(self, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        """Submit this rank's block of a tensor; borrowed until that is ready."""
        self._submit_block(tensor, step, (pointer, nbytes))

    def block_absent(self, tensor: int, step: int) -> None:
        """Report that this rank has no block of a tensor in this step."""
        self._submit_block(tensor, step, None)

    def _submit_block(self, tensor: int, step: int, memory: Memory | None) -> None:
        self._check()
        (part,) = self._parts_of_tensor[tensor]
        nbytes = 0 if memory is None else memory[1]
        if not part.has_blocks or nbytes > part.nbytes:
            raise RefusedError(
                f"a block of {nbytes} bytes for tensor {self._names[tensor]!r}, whose blocks are "
                f"at most {part.nbytes if part.has_blocks else 0} bytes"
            )
        if part.leader == self._local_rank:
            assert self._leader is not None
            self._leader.submit(Contribution(part, self._local_rank, step, memory))
            return
        if memory is not None:
            copy(memory[0], self._link.address(self._local_rank, part.offset), nbytes)
            self._reports.local_bytes += nbytes
        self._link.send(
            part.leader,
            CONTRIBUTION,
            part.number,
            step,
            absent=memory is None,
            text=_pack_sizes([nbytes]),
        )

    def distribute_blocks(self, part: TensorPart, step: int, sizes: Sequence[int]) -> None:
        """Send the blocks of all nodes, which are in their room, to all ranks of this node."""
        text = _pack_sizes(sizes)
        for peer in self._link.peers:
            self._link.send(peer, RESULT, part.number, step, text=text)
        self._keep_blocks(part, step, sizes)

    def _keep_blocks(self, part: TensorPart, step: int, sizes: Sequence[int]) -> None:
        """Copy the blocks of all nodes from their leader's room, which the next step overwrites."""
        most_bytes = node_block_most_bytes(part.nbytes, self._layout.local_size)
        room = self._link.address(part.leader, self._rooms[part.number])
        nodes = [
            None if size == ABSENT else (room + node * most_bytes, size)
            for node, size in enumerate(sizes)
        ]
        blocks = GatheredBlocks(nodes, self._layout)
        self._reports.local_bytes += blocks.nbytes
        with self._changed:
            self._gathered[part.tensor, step] = blocks
        self.on_landed(part, step, absent=not blocks.nbytes)

    def take_blocks(self, tensor: int, step: int) -> GatheredBlocks | None:
        """Return all ranks' blocks of a tensor that is ready in a step, once."""
        self._check()
        with self._changed:
            return self._gathered.pop((tensor, step), None)

    @property
    def collective_tensors(self) -> int:
        """Number of leading tensors whose gradients `submit_on_device` takes."""
        return self._collectives.tensors if self._collectives is not None else 0

    def submit_on_device(self, tensor: int, step: int, gradient: Tensor, *, absent: bool) -> None:
        """Submit a gradient on its device, or memory for the result of other ranks.

        Args:
            tensor: below `collective_tensors`.
            step: after step 0.
            gradient: borrowed until the tensor is ready; dense, laid out as on all ranks.
            absent: whether this rank has no gradient.
        """
        self._check()
        assert self._collectives is not None
        self._collectives.submit(tensor, step, gradient, absent=absent)

    def on_node_mean(self, part: TensorPart, step: int, pointer: int, *, absent: bool) -> None:
        """Submit a mean that collectives have computed to the channel between nodes."""
        assert self._leader is not None
        with self._changed:
            self._collective_parts.add(part.number)
        self._leader.submit(NodeMean(part, step, pointer, absent))

    def distribute_mean(self, part: TensorPart, step: int, absent: bool) -> None:
        """Send the mean of an own part to all ranks of this node."""
        with self._changed:
            by_collective = part.number in self._collective_parts
            self._collective_parts.discard(part.number)
        if self._collectives is not None and by_collective:
            self._collectives.on_result(part, step, absent=absent)
            return
        for peer in self._link.peers:
            self._link.send(peer, RESULT, part.number, step, absent=absent)
        self._copy_mean(part, step, absent)

    def _copy_mean(self, part: TensorPart, step: int, absent: bool) -> None:
        """Copy the mean of a part from its leader's memory into the tensor."""
        with self._copy_lock:
            if self._failure is not None:
                return
            if not absent and not (step == 0 and self._is_source):
                source = self._link.address(part.leader, part.offset)
                copy(source, self._pointers[part.tensor] + part.first_byte, part.nbytes)
                self._reports.local_bytes += part.nbytes
        self.on_landed(part, step, absent=absent)

    def on_landed(self, part: TensorPart, step: int, *, absent: bool) -> None:
        """Record that the mean of a part is in its tensor."""
        self._landed.record(part, step, absent=absent)

    # ---- results

    def wait(self, tensors: list[int], step: int) -> None:
        """Wait until all given tensors are ready."""
        for tensor in tensors:
            self._wait_for([tensor], step, whole_step=False)

    def wait_step(self, step: int) -> None:
        """Wait until the whole step is complete."""
        self._wait_for(self._landed.tensors_in_step(step), step, whole_step=True)

    def has_measurable_squares(self, tensors: int) -> bool:
        """Return whether the nodes can add up squares: where one leader has tensors whole, all of
        them are added up, and no node may be lost."""
        return self._layout.leaders == 1 and not self._goes_on and not self._rooms

    def measure_squares(self, tensors: int, step: int) -> None:
        """Have the nodes add up the squares of the first tensors in the step that has begun."""
        self._call_leader(lambda leader: leader.measure_squares(tensors, step))

    def distribute_norm(self, step: int, norm: float) -> None:
        """Send the norm of a step's gradients to all ranks of this node."""
        for peer in self._link.peers:
            self._link.send_text(peer, NORM, _NORM.pack(step, norm))
        self._take_norm(step, norm)

    def _take_norm(self, step: int, norm: float) -> None:
        with self._changed:
            self._norm = (step, norm)
            self._changed.notify_all()

    def wait_norm(self, step: int, blocks: SquareSum | None = None) -> float:
        """Wait for the norm of a step's gradients; means may be still to come."""
        assert blocks is None, "squares are not measured beside tensors of blocks"
        self._wait_until(lambda: self._norm[0] == step, f"the norm of all gradients in step {step}")
        return self._norm[1]

    def needed(self, tensor: int, step: int) -> None:
        """Do nothing: results are not requested here."""

    def is_ready(self, tensor: int, step: int) -> bool:
        """Return whether a tensor is ready, without waiting."""
        self._check()
        return self._landed.is_ready(tensor, step)

    def take_ready(self, step: int) -> list[tuple[int, bool]]:
        """Return (tensor, absent) of each tensor that became ready since the last call."""
        self._check()
        return self._landed.take_ready(step)

    def _wait_for(self, tensors: Sequence[int], step: int, *, whole_step: bool) -> None:
        self._check()
        landed_parts = self._landed
        with self._changed:
            if landed_parts.first_missing(tensors, step) is None:
                return
            since_ns = time.monotonic_ns()
            deadline = SuspendAwareDeadline(self._timeout_s)
            progress = landed_parts.unclaimed_count, self._changes_heard
            while (
                tensor := landed_parts.first_missing(tensors, step)
            ) is not None and not self._failure:
                self._changed.wait(_POLL_S)
                if progress != (progress := (landed_parts.unclaimed_count, self._changes_heard)):
                    deadline.renew()
                if deadline.is_over(_POLL_S):
                    break
            last_ready = landed_parts.last_ready
        self._check()
        if tensor is not None:
            self._fail_without_progress(f"{self._names[tensor]!r} in step {step}")
        waited_ns = time.monotonic_ns() - since_ns
        self._waits.record(
            last_ready if whole_step else tensors[0], step, waited_ns, whole_step=whole_step
        )

    def _wait_until(self, is_done: Callable[[], bool], awaited: str) -> None:
        """Wait for what a message of this node brings; `awaited` names it in errors."""
        self._check()
        deadline = SuspendAwareDeadline(self._timeout_s)
        with self._changed:
            while not is_done() and not self._failure and not deadline.is_over(_POLL_S):
                self._changed.wait(_POLL_S)
            has_ended = is_done()
        self._check()
        if not has_ended:
            self._fail_without_progress(awaited)

    def _fail_without_progress(self, awaited: str) -> NoReturn:
        self.fail(
            Failure(
                f"no progress for {self._timeout_s:g} s: rank {self._rank} waits for {awaited}; a "
                "rank of its node, or another node, does not take part (if it evaluates, saves or "
                f"loads for longer than that: {PROGRESS}, on all ranks)",
                self._landed.last_complete,
                None,
                timed_out=True,
            )
        )
        self._check()
        raise AssertionError("a failed channel passed its check")

    # ---- order

    def all_connected(self) -> None:
        """Start the keepalive check: all ranks are connected now."""
        self._has_opened = True
        if self._leader is not None:
            self._leader.channel.all_connected()

    def switch_priorities(self, priorities: list[int]) -> None:
        """Announce new priorities, one number a tensor (rank 0)."""
        packed = array.array("i", priorities).tobytes()
        for peer in self._link.peers:
            if peer < self._layout.leaders:
                self._link.send_text(peer, ORDER, packed)
        if self._leader is not None:
            self._call_leader(lambda leader: leader.reorder(priorities))

    def send_raw(self, step: int) -> None:
        """Send the contributions to a step that has just begun without codecs between nodes."""
        self._call_leader(lambda leader: leader.channel.send_raw(step))

    # ---- members

    def next_changes(self, *, wait: bool = True) -> list[MembershipRow]:
        """Return changes of the members, which are those of nodes; see `Channel.next_changes`."""
        with self._changed:
            while wait and not (self._changes or self._failure or self._has_parted):
                self._changed.wait(_POLL_S)
            taken, self._changes = self._changes, []
        if wait and not taken:
            self._check()
            raise self._core.ChannelError("the channel is closed", self._landed.last_complete, None)
        return taken

    def answer_claim(self, generation: int, text: str | None) -> None:
        """Tell what the job's store holds for a generation (leader)."""
        self._call_leader(lambda leader: leader.channel.answer_claim(generation, text))

    def distribute_change(self, change: MembershipRow) -> None:
        """Tell all ranks of this node a change of the members."""
        text = json.dumps(change).encode()
        for peer in self._link.peers:
            self._link.send_text(peer, MEMBERS, text)
        self.take_change(change)

    def take_change(self, change: MembershipRow) -> None:
        """Have this rank's `next_changes` return a change, or a question to the job's store."""
        with self._changed:
            self._changes.append(change)
            self._changes_heard += 1
            self._changed.notify_all()

    # ---- residuals of the node's means, which its leader encodes

    @property
    def ranks_each(self) -> int:
        """Number of consecutive ranks that talk to the network as one: those of a node."""
        return self._layout.local_size

    def copy_worker_residual(self, tensor: int, pointer: int, count: int) -> None:
        """Copy the residual of this node's mean to `count` f32 values; all its ranks call it.

        Between steps a rank's shared memory is free: its leader puts one piece after the other
        there, each when the rank asks for it.
        """
        self._check()
        (part,) = self._parts_of_tensor[tensor]
        is_leader = part.leader == self._local_rank
        if is_leader:
            self._call_leader(lambda one: one.channel.copy_worker_residual(tensor, pointer, count))
        for first in range(0, 4 * count, part.nbytes):
            nbytes = min(part.nbytes, 4 * count - first)
            if not is_leader:
                self._link.send(part.leader, RESIDUAL)
                self._await_residual_message(part.leader, tensor)
                source = self._link.address(self._local_rank, part.offset)
                copy(source, pointer + first, nbytes)
                continue
            for peer in self._link.peers:
                self._await_residual_message(peer, tensor)
                copy(pointer + first, self._link.address(peer, part.offset), nbytes)
                self._link.send(peer, RESIDUAL)

    def _await_residual_message(self, sender: int, tensor: int) -> None:
        """Wait for the next message about residuals of a rank of this node."""
        rank, name = self._layout.rank_of(self._layout.node, sender), self._names[tensor]
        messages = self._residual_messages
        self._wait_until(lambda: messages[sender] > 0, f"rank {rank} and the residual of {name!r}")
        with self._changed:
            messages[sender] -= 1

    def residual_squares(
        self, first: int, elements_max: int
    ) -> tuple[list[tuple[int, int, float]], int]:
        """Return the squares of residuals on the leader, and nothing on the other ranks."""
        if self._leader is None:
            return [], 0
        return self._leader.channel.residual_squares(first, elements_max)

    def load_state(self, tensor: int, name: str, pointer: int, count: int) -> None:
        """Load a residual: the leader the node's, and owners among leaders those of results."""
        self._call_leader(lambda leader: leader.channel.load_state(tensor, name, pointer, count))

    def read_state(self, name: str, part: int) -> None:
        """Have the step that has just begun broadcast the owners' residuals between nodes."""
        self._call_leader(lambda leader: leader.channel.read_state(name, part))

    # ---- reports

    def metrics_json(self) -> str:
        """Return counters as a JSON object: the network's on a leader, and waits."""
        return self._reports.metrics_json()

    def waited_ns(self) -> int:
        """Return the time that threads of the program have waited so far, in nanoseconds."""
        return self._waits.waited_ns

    def take_trace(self) -> list[tuple[int, str, int, int, int, int, int, int]]:
        """Return and clear the trace of frames between nodes."""
        return self._reports.take_trace()

    def take_timeline(self) -> tuple[list[CoreRow], int]:
        """Return and clear the trace between nodes, and the number of rows that were dropped."""
        return self._reports.take_timeline()

    # ---- the end

    def finish(self, timeout_s: float) -> None:
        """Close in order, with a goodbye to every rank."""
        deadline_s = time.monotonic() + timeout_s
        if self._leader is not None:
            # Every mean may be here a moment before the last step is ended and its norm is known.
            self._leader.wait_for_step(timeout_s)
        self._check()
        with self._changed:
            self._closing = True
        for peer in self._link.peers:
            self._link.send(peer, BYE)
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or len(self._departed) == len(self._link.peers),
                timeout_s,
            )
            remaining = [peer for peer in self._link.peers if peer not in self._departed]
        self._check()
        if remaining:
            ranks = ", ".join(
                str(self._layout.rank_of(self._layout.node, one)) for one in remaining
            )
            text = (
                f"ranks {ranks} of this node did not close within {timeout_s:g} s (longer waits: "
                f"{CLOSE})"
            )
            self.abort(text)
            raise self._core.ChannelTimeout(text, self._landed.last_complete, None)
        if self._leader is not None:
            try:
                self._leader.channel.finish(max(0.1, deadline_s - time.monotonic()))
            except self._core.ChannelError as error:
                failure = self._leader.to_failure(error)
                raise failure.to_error(self._core) from error
            finally:
                self._leader.stop()
        self._close_link()

    def abort(self, reason: str) -> None:
        """Abort and tell every rank the reason."""
        text = f"rank {self._rank} gave up: {reason}"
        self.fail(Failure(text, self._landed.last_complete, self._rank), reason_for_nodes=reason)
        if self._leader is not None:
            self._leader.stop()
        self._close_link()

    def forget_in_child(self) -> None:
        """Close descriptors in a forked child."""
        if self._leader is not None:
            self._leader.channel.forget_in_child()
        if self._collectives is not None:
            self._collectives.forget_in_child()
        self._link.close()

    def fail(self, failure: Failure, reason_for_nodes: str | None = None) -> None:
        """Store the first failure, wake all waiting threads and tell all other ranks.

        Args:
            failure: the failure.
            reason_for_nodes: text for the other nodes in place of its message.
        """
        with self._changed:
            if self._failure is not None:
                return
            self._failure = failure
            self._changed.notify_all()
        # Afterwards no thread touches the program's memory; the queue keeps its own buffers alive.
        with self._copy_lock:
            pass
        if self._collectives is not None:
            self._collectives.cancel()
        for peer in self._link.peers:
            self._link.send_text(peer, FAILED, failure.to_bytes(), waits=False)
        node, local_rank = divmod(failure.rank or 0, self._layout.local_size)
        if (
            failure.rank is not None
            and node == self._layout.node
            and local_rank != self._local_rank
        ):
            # A stopped rank reads nothing, and threads may wait for room in its socket.
            self._link.disconnect(local_rank)
        if self._leader is not None:
            self._leader.stop_reading()
            self._leader.abort(reason_for_nodes or failure.text_for_other_nodes())

    def _check(self) -> None:
        failure = self._failure
        if failure is None:
            return
        node, local_rank = divmod(failure.rank or 0, self._layout.local_size)
        is_local = failure.rank is not None and node == self._layout.node
        if self._goes_on and self._has_opened and is_local and local_rank != self._local_rank:
            # Not in the failure itself, which leaders tell the other nodes.
            end = "; all ranks of this node end, and the other nodes go on if enough are left"
            failure = replace(failure, message=failure.message + end)
        raise failure.to_error(self._core)

    def _call_leader(self, call: Any) -> None:
        """Call the leader, if there is one; its failure fails this channel."""
        self._check()
        if self._leader is None:
            return
        try:
            call(self._leader)
        except self._core.ChannelError as error:
            self.fail(self._leader.to_failure(error))
            self._check()

    @property
    def _rank(self) -> int:
        return self._layout.rank_of(self._layout.node, self._local_rank)

    def _close_link(self) -> None:
        if self._collectives is not None:
            self._collectives.stop()
        with self._changed:
            self._has_parted = True
            self._changed.notify_all()
        self._link.stop()
        if self._listener_thread is not threading.current_thread():
            self._listener_thread.join()
        self._link.close()

    def _listen(self) -> None:
        """Handle messages of the other ranks of this node until the link stops."""
        for message in self._link.messages(self._keepalive.interval_s):
            try:
                if message is None:
                    self._check_liveness()
                else:
                    self._handle_message(message)
            except self._core.ChannelError as error:
                assert self._leader is not None
                self.fail(self._leader.to_failure(error))

    def _check_liveness(self) -> None:
        """Detect silent ranks on this node and on others, also between two steps."""
        if self._leader is not None and self._leader.own_parts and not self._closing:
            self._leader.channel.is_ready(0, 0)
        silent = self._keepalive.first_silent(self._departed)
        if silent is not None:
            rank = self._layout.rank_of(self._layout.node, silent)
            text = (
                f"rank {rank} was lost: silent for {self._keepalive.timeout_s:g} s, so its process "
                f"stands still (longer pauses of it: {SILENCE})"
            )
            self.fail(Failure(text, self._landed.last_complete, rank))

    def _handle_message(self, message: Message) -> None:
        if message.kind == CONTRIBUTION and self._leader is not None:
            part = self._parts[message.part]
            start = self._link.address(message.sender, part.offset)
            nbytes = _unpack_sizes(message.text)[0] if part.has_blocks else part.nbytes
            memory = None if message.absent else (start, nbytes)
            self._leader.submit(Contribution(part, message.sender, message.step, memory))
        elif message.kind == RESULT and self._parts[message.part].has_blocks:
            part = self._parts[message.part]
            self._keep_blocks(part, message.step, _unpack_sizes(message.text))
        elif message.kind == RESULT:
            self._copy_mean(self._parts[message.part], message.step, message.absent)
        elif message.kind in COLLECTIVE_KINDS and self._collectives is not None:
            self._collectives.on_message(
                message.kind, message.part, message.step, absent=message.absent
            )
        elif message.kind == ORDER and self._leader is not None:
            self._leader.reorder(array.array("i", message.text).tolist())
        elif message.kind == RESIDUAL:
            with self._changed:
                self._residual_messages[message.sender] += 1
                self._changed.notify_all()
        elif message.kind == NORM:
            self._take_norm(*_NORM.unpack(message.text))
        elif message.kind == MEMBERS:
            kind, generation, ranks, step, text = json.loads(message.text)
            self.take_change((kind, generation, ranks, step, text))
        elif message.kind == FAILED:
            self.fail(Failure.from_bytes(message.text))
        elif message.kind == BYE:
            with self._changed:
                self._departed.add(message.sender)
                self._changed.notify_all()
        elif message.kind == DISCONNECTED and message.sender not in self._departed:
            rank = self._layout.rank_of(self._layout.node, message.sender)
            text = f"rank {rank} was lost: its process ended without a goodbye"
            self.fail(Failure(text, self._landed.last_complete, rank))


def _pack_sizes(sizes: Sequence[int]) -> bytes:
    return array.array("q", sizes).tobytes()


def _unpack_sizes(text: bytes) -> list[int]:
    return array.array("q", text).tolist()
