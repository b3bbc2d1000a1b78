"""A channel to all ranks of which those of a node are reached through shared memory.

It is what the core's channel is to everything above it. A gradient goes to the ranks of this node
that carry parts of it; when all of the node's ranks have spoken, the carrier gives the node's mean
to the channel between nodes, and what comes back lands with every rank of the node. All ranks copy
the same bytes, so all have the same bits. Where gradients are added up by collectives they take
another way to the carrier and back; values of step 0 and whatever is not a gradient do not.

A rank that ends without a goodbye fails the channel at once, on its node and through the carriers
on all others; one whose process stands still, after the silence timeout.
"""

from __future__ import annotations

import array
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gradlane.training.core import Channel, CoreModule
from gradlane.training.node.arrivals import LandedParts
from gradlane.training.node.collective_queue import CollectiveQueue
from gradlane.training.node.devices import ON_HOST, Sums
from gradlane.training.node.failure import Failure, Silence
from gradlane.training.node.leader import Contribution, NodeLeader, NodeMean
from gradlane.training.node.link import (
    BYE,
    ENDED,
    FAILED,
    GIVE,
    LANE_KINDS,
    ORDER,
    RESULT,
    LocalLink,
    Message,
)
from gradlane.training.node.rank_calls import RankCalls
from gradlane.training.node.reports import ChannelReports
from gradlane.training.node.shares import Part
from gradlane.training.node.sums import copy
from gradlane.training.node.waits import Waits
from gradlane.training.rendezvous.deadline import SuspendAwareDeadline

_LOOK_S = 1.0


class NodeChannel(RankCalls, ChannelReports):
    """Connections to all ranks: to those of this node, and, if this one carries, to other nodes."""

    def __init__(
        self,
        core: CoreModule,
        link: LocalLink,
        rows: Sequence[Mapping[str, Any]],
        parts: Sequence[Part],
        between: Channel | None,
        *,
        source_rank: int,
        progress_timeout_s: float,
        silence_timeout_s: float,
        lane: CollectiveQueue | None = None,
        sums: Sums = ON_HOST,
    ) -> None:
        """Start listening to the ranks of this node.

        Args:
            core: where errors come from.
            link: to the ranks of this node.
            rows: the plan's tensors.
            parts: what each rank of a node carries.
            between: the channel to the other nodes, if this rank carries.
            source_rank: the rank whose values step 0 spreads.
            progress_timeout_s: how long to wait for ranks that are alive but do not take part.
            silence_timeout_s: how long the process of a rank of this node may stand still.
            lane: adds gradients up where they are, or None.
            sums: where they are added up, for reports.
        """
        self._core = core
        self._link = link
        self._lane = lane
        self._sums = sums
        if lane is not None:
            lane.serve(self)
        self._layout = link.layout
        self._own = link.layout.local_rank
        self._parts = parts
        self._of_tensor: list[list[Part]] = [[] for _ in rows]
        for part in parts:
            self._of_tensor[part.tensor].append(part)
        self._names = [str(row["name"]) for row in rows]
        self._timeout_s = progress_timeout_s
        self._silence = Silence(silence_timeout_s, link.peers, link.pulse)
        self._is_source = source_rank == self._layout.rank_of(self._layout.node, self._own)
        self._changed = threading.Condition()
        self._copying = threading.Lock()
        self._failure: Failure | None = None
        self._closing = False
        self._left: set[int] = set()
        self._pointers = [0] * len(rows)
        self._arrivals = LandedParts(rows, parts, self._changed)
        self._waits = Waits(self._names)
        self._local_bytes = 0
        node, source = divmod(source_rank, self._layout.local_size)
        self._carriage = (
            None
            if between is None
            else NodeLeader(
                core,
                between,
                link,
                parts,
                self,
                source if node == self._layout.node else None,
                node,
            )
        )
        self._listening = threading.Thread(
            target=self._listen, name="gradlane-node-listen", daemon=True
        )
        self._listening.start()

    # ---- gradients

    def step_begin(self, step: int) -> None:
        """Begin a step; the one before must be complete."""
        self._check()
        self._arrivals.begin()
        if self._carriage is not None:
            self._calling(lambda carriage: carriage.begin(step))

    def gradient_ready(self, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        """Hand over a gradient; the memory is the channel's until the tensor is ready."""
        self._give(tensor, step, pointer, absent=False)

    def tensor_absent(self, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        """Say that there is no gradient here; a result of other ranks lands in the memory."""
        self._give(tensor, step, pointer, absent=True)

    def step_end(self, step: int) -> None:
        """Say that `optimizer.step()` was called."""
        self._check()
        if self._carriage is not None:
            self._carriage.end(step)

    def _give(self, tensor: int, step: int, pointer: int, *, absent: bool) -> None:
        self._check()
        self._pointers[tensor] = pointer
        # In step 0 only one rank's values count.
        copies = not absent and (step > 0 or self._is_source)
        for part in self._of_tensor[tensor]:
            start = pointer + part.first_byte
            if part.carrier == self._own:
                assert self._carriage is not None
                memory = None if absent else (start, part.nbytes)
                self._carriage.hear(Contribution(part, self._own, step, memory))
                continue
            if copies:
                copy(start, self._link.address(self._own, part.offset), part.nbytes)
                self._local_bytes += part.nbytes
            self._link.send(part.carrier, GIVE, part.number, step, flag=absent)

    @property
    def lane_tensors(self) -> int:
        """How many tensors, the first ones, have gradients that `give_on_device` takes."""
        return self._lane.tensors if self._lane is not None else 0

    def give_on_device(self, tensor: int, step: int, gradient: Tensor, *, absent: bool) -> None:
        """Hand over a gradient where it is, or memory that a result of others lands in.

        Args:
            tensor: one that goes this way.
            step: after step 0.
            gradient: the channel's until the tensor is ready; dense, laid out as on all ranks.
            absent: whether there is no gradient here.
        """
        self._check()
        assert self._lane is not None
        self._lane.give(tensor, step, gradient, absent=absent)

    def add_up(self, part: Part, step: int, pointer: int, *, absent: bool) -> None:
        """Give the nodes what collectives have added up."""
        assert self._carriage is not None
        self._carriage.hear(NodeMean(part, step, pointer, absent))

    def pass_on(self, part: Part, step: int, absent: bool) -> None:
        """Let all ranks of this node have the mean of a part that this one carries."""
        if self._lane is not None and step > 0 and part.tensor < self._lane.tensors:
            self._lane.have(part, step, absent=absent)
            return
        for peer in self._link.peers:
            self._link.send(peer, RESULT, part.number, step, flag=absent)
        self._deliver(part, step, absent)

    def _deliver(self, part: Part, step: int, absent: bool) -> None:
        """Take the mean of a part from its carrier's memory."""
        with self._copying:
            if self._failure is not None:
                return
            if not absent and not (step == 0 and self._is_source):
                source = self._link.address(part.carrier, part.offset)
                copy(source, self._pointers[part.tensor] + part.first_byte, part.nbytes)
                self._local_bytes += part.nbytes
        self.landed(part, step, absent=absent)

    def landed(self, part: Part, step: int, *, absent: bool) -> None:
        """Note that the mean of a part is in its tensor."""
        self._arrivals.note(part, step, absent=absent)

    # ---- results

    def wait(self, tensors: list[int], step: int) -> None:
        """Wait until all of these are ready."""
        for tensor in tensors:
            self._wait_for([tensor], step, whole_step=False)

    def wait_step(self, step: int) -> None:
        """Wait until the whole step is complete."""
        self._wait_for(self._arrivals.of_step(step), step, whole_step=True)

    def needed(self, tensor: int, step: int) -> None:
        """Say that a consumer is about to wait; nothing has to be asked for here."""

    def is_ready(self, tensor: int, step: int) -> bool:
        """Whether a tensor is ready; does not wait."""
        self._check()
        return self._arrivals.is_ready(tensor, step)

    def take_ready(self, step: int) -> list[tuple[int, bool]]:
        """Return (tensor, absent) for what became ready since the last call."""
        self._check()
        return self._arrivals.take(step)

    def next_ready(self, step: int) -> list[tuple[int, bool]]:
        """Wait for something that `take_ready` has not returned, and return it likewise."""
        while not (taken := self.take_ready(step)):
            with self._changed:
                self._changed.wait_for(lambda: self._arrivals.news or self._failure, _LOOK_S)
        return taken

    def _wait_for(self, tensors: Sequence[int], step: int, *, whole_step: bool) -> None:
        self._check()
        arrivals = self._arrivals
        with self._changed:
            if arrivals.missing(tensors, step) is None:
                return
            since_ns = time.monotonic_ns()
            news, patience = arrivals.news, SuspendAwareDeadline(self._timeout_s)
            while (tensor := arrivals.missing(tensors, step)) is not None and not self._failure:
                self._changed.wait(_LOOK_S)
                if news != (news := arrivals.news):
                    patience.renew()
                if patience.is_over(_LOOK_S):
                    break
            newest = arrivals.newest
        self._check()
        if tensor is not None:
            self.fail(
                Failure(
                    f"no progress for {self._timeout_s:g} s: rank {self._rank} waits for "
                    f"{self._names[tensor]!r} in step {step}; a rank of its node, or another "
                    "node, does not take part (if it evaluates, saves or loads for longer than "
                    "that: progress_timeout_s, on all ranks)",
                    self._arrivals.last_complete,
                    None,
                    timed_out=True,
                )
            )
            self._check()
        waited_ns = time.monotonic_ns() - since_ns
        self._waits.note(
            newest if whole_step else tensors[0], step, waited_ns, whole_step=whole_step
        )

    # ---- order

    def all_connected(self) -> None:
        """Say that all ranks have connected to all: one that says nothing is silent from now on."""
        if self._carriage is not None:
            self._carriage.channel.all_connected()

    def switch_priorities(self, priorities: list[int]) -> None:
        """Announce another order of urgency, one number a tensor (rank 0)."""
        packed = array.array("i", priorities).tobytes()
        for peer in self._link.peers:
            if peer < self._layout.carriers:
                self._link.tell(peer, ORDER, packed)
        if self._carriage is not None:
            self._calling(lambda carriage: carriage.reorder(priorities))

    def send_raw(self, step: int) -> None:
        """Let contributions to a step that has just begun travel between nodes without codecs."""
        self._calling(lambda carriage: carriage.channel.send_raw(step))

    # ---- the end

    def finish(self, timeout_s: float) -> None:
        """Close in order, with a goodbye to every rank."""
        deadline_s = time.monotonic() + timeout_s
        self._check()
        with self._changed:
            self._closing = True
        for peer in self._link.peers:
            self._link.send(peer, BYE)
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or len(self._left) == len(self._link.peers),
                timeout_s,
            )
            stayed = [peer for peer in self._link.peers if peer not in self._left]
        self._check()
        if stayed:
            ranks = ", ".join(str(self._layout.rank_of(self._layout.node, one)) for one in stayed)
            text = f"ranks {ranks} of this node did not close within {timeout_s:g} s"
            self.abort(text)
            raise self._core.ChannelTimeout(text, self._arrivals.last_complete, None)
        if self._carriage is not None:
            try:
                self._carriage.channel.finish(max(0.1, deadline_s - time.monotonic()))
            except self._core.ChannelError as error:
                failure = self._carriage.translated(error)
                raise failure.error(self._core) from error
            finally:
                self._carriage.stop()
        self._hang_up()

    def abort(self, reason: str) -> None:
        """Give up and tell every rank why."""
        text = f"rank {self._rank} gave up: {reason}"
        self.fail(Failure(text, self._arrivals.last_complete, self._rank), told=reason)
        if self._carriage is not None:
            self._carriage.stop()
        self._hang_up()

    def forget_in_child(self) -> None:
        """Close descriptors in a forked child."""
        if self._carriage is not None:
            self._carriage.channel.forget_in_child()
        if self._lane is not None:
            self._lane.forget_in_child()
        self._link.close()

    def fail(self, failure: Failure, told: str | None = None) -> None:
        """Keep the first failure, wake who waits, and tell all other ranks.

        Args:
            failure: what happened.
            told: what the other nodes are told in place of its message.
        """
        with self._changed:
            if self._failure is not None:
                return
            self._failure = failure
            self._changed.notify_all()
        # From here on nobody touches memory of the program; a lane keeps what it uses.
        with self._copying:
            pass
        if self._lane is not None:
            self._lane.let_go()
        for peer in self._link.peers:
            self._link.tell(peer, FAILED, failure.to_bytes(), waits=False)
        node, local_rank = divmod(failure.rank or 0, self._layout.local_size)
        if failure.rank is not None and node == self._layout.node and local_rank != self._own:
            # A rank that stands still reads nothing, and threads may wait for room in its socket.
            self._link.hang_up(local_rank)
        if self._carriage is not None:
            self._carriage.let_go()
            self._carriage.abort(told or failure.words())

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure.error(self._core)

    def _calling(self, call: Any) -> None:
        """Call the carriage, if there is one; its failure is one of this channel."""
        self._check()
        if self._carriage is None:
            return
        try:
            call(self._carriage)
        except self._core.ChannelError as error:
            self.fail(self._carriage.translated(error))
            self._check()

    @property
    def _rank(self) -> int:
        return self._layout.rank_of(self._layout.node, self._own)

    def _hang_up(self) -> None:
        if self._lane is not None:
            self._lane.stop()
        self._link.stop()
        if self._listening is not threading.current_thread():
            self._listening.join()
        self._link.close()

    def _listen(self) -> None:
        """Hear the other ranks of this node until the end."""
        for message in self._link.messages(self._silence.interval_s):
            try:
                if message is None:
                    self._look_for_silence()
                else:
                    self._hear(message)
            except self._core.ChannelError as error:
                assert self._carriage is not None
                self.fail(self._carriage.translated(error))

    def _look_for_silence(self) -> None:
        """Notice ranks that say nothing, here or on other nodes, also between two steps."""
        if self._carriage is not None and self._carriage.carried and not self._closing:
            self._carriage.channel.is_ready(0, 0)
        silent = self._silence.silent(self._left)
        if silent is not None:
            rank = self._layout.rank_of(self._layout.node, silent)
            text = (
                f"rank {rank} was lost: silent for {self._silence.timeout_s:g} s, so its process "
                "on this node stands still (longer pauses of it: silence_timeout_s)"
            )
            self.fail(Failure(text, self._arrivals.last_complete, rank))

    def _hear(self, message: Message) -> None:
        if message.kind == GIVE and self._carriage is not None:
            part = self._parts[message.part]
            start = self._link.address(message.sender, part.offset)
            memory = None if message.flag else (start, part.nbytes)
            self._carriage.hear(Contribution(part, message.sender, message.step, memory))
        elif message.kind == RESULT:
            self._deliver(self._parts[message.part], message.step, message.flag)
        elif message.kind in LANE_KINDS and self._lane is not None:
            self._lane.hear(message.kind, message.part, message.step, absent=message.flag)
        elif message.kind == ORDER and self._carriage is not None:
            self._carriage.reorder(array.array("i", message.text).tolist())
        elif message.kind == FAILED:
            self.fail(Failure.from_bytes(message.text))
        elif message.kind == BYE:
            with self._changed:
                self._left.add(message.sender)
                self._changed.notify_all()
        elif message.kind == ENDED and message.sender not in self._left:
            rank = self._layout.rank_of(self._layout.node, message.sender)
            text = f"rank {rank} was lost: its process on this node ended without a goodbye"
            self.fail(Failure(text, self._arrivals.last_complete, rank))
