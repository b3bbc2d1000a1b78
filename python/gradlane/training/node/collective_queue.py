"""Collective sums of a node's ranks on the gradients' device, in one order on all ranks.

Collectives must be issued in the same order on all ranks, but gradients become ready in a different
order on each. So the first rank of the node is the coordinator, as in Horovod (Sergeev and Del
Balso, arXiv:1802.05799): each rank reports to it that a tensor is ready, with a gradient or
without. When all ranks have reported a tensor, the coordinator tells all of them to add it up. No
rank waits inside a collective for a gradient that is not there, and a tensor that one rank leaves
out delays no other tensor.

A tensor needs two collectives a part. The first gives each leader the sum of its part; the leader
divides it, copies it to the host and submits it to the channel between nodes. The second broadcasts
the mean over all nodes from the leader, so that all ranks get the same bits. One thread of each
rank issues the collectives, and only that thread uses the group.

The thread orders its work behind the stream that computed a gradient. The copy to the host follows
the sum, and a tensor is ready once the device has finished. The queue keeps every buffer of a
collective alive until then.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gradlane.errors import RendezvousError
from gradlane.formats.longer_waits import CONNECT
from gradlane.training.node.device_order import CollectiveCancelledError, order_on
from gradlane.training.node.failure import Failure
from gradlane.training.node.group import NodeGroup
from gradlane.training.node.link import BROADCAST, MEAN, READY, SUM, LocalLink
from gradlane.training.node.parts import TensorPart
from gradlane.training.node.pending_gradient import SUM_DTYPES, PendingGradient, flat_values

_COORDINATOR = 0
"""Local rank that decides the order of collectives."""
_POLL_MIN_S = 50e-6
_POLL_MAX_S = 1e-3
LOSS_REPORT_S = 2.0
"""Longest time until the sockets of a node report a rank that has died."""
_STOP_S = 5.0
_abandoned_groups: list[object] = []
"""Groups of the parent, in a forked child: ending them would wait for threads that do not exist."""


class CollectiveSink(Protocol):
    """Receives the results of a node's collectives."""

    def on_node_mean(self, part: TensorPart, step: int, pointer: int, *, absent: bool) -> None:
        """Take the node's mean of an own part, which is in the host's memory."""

    def on_landed(self, part: TensorPart, step: int, *, absent: bool) -> None:
        """Record that the mean of a part over all nodes is in its tensor."""

    def fail(self, failure: Failure) -> None:
        """Take the failure of a collective; no results follow."""


@dataclass(frozen=True)
class _Message:
    """A rank's report of a tensor or part, or the coordinator's turn; kinds are those of `link`."""

    kind: int
    number: int
    step: int
    absent: bool


@dataclass
class _InFlight:
    """Work that the device has not finished, the buffers that it uses, and the callback for its
    end."""

    is_done: Callable[[], bool]
    buffers: list[Tensor]
    on_done: Callable[[], None]


class CollectiveQueue:
    """The collectives of one channel on one rank."""

    def __init__(
        self,
        link: LocalLink,
        parts: Sequence[TensorPart],
        gradients: Sequence[Tensor],
        open_group: Callable[[], NodeGroup],
    ) -> None:
        """Start the thread, which opens the group; see `wait_open`.

        Args:
            link: to the other ranks of the node, which pass the same arguments.
            parts: all parts of the channel's tensors.
            gradients: tensors like the gradients of the first tensors, all on one device; the
                lane is for these.
            open_group: connects the ranks of the node.
        """
        self._link = link
        self._layout = link.layout
        self._local_rank = link.layout.local_rank
        self._parts = parts
        self._parts_of_tensor: list[list[TensorPart]] = [[] for _ in gradients]
        for part in parts:
            if part.tensor < len(gradients):
                self._parts_of_tensor[part.tensor].append(part)
        self._device = gradients[0].device
        self._cancelled = threading.Event()
        self._order = order_on(self._device, self._cancelled.is_set)
        self._open_group = open_group
        self._group: NodeGroup | None = None
        self._opened = threading.Event()
        self._refusal: Exception | None = None
        self._sink: CollectiveSink | None = None
        self._inbox: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._ready_ranks = [0] * len(gradients)
        self._present = [False] * len(gradients)
        self._pending: dict[int, PendingGradient] = {}
        self._host_buffers: dict[int, Tensor] = {}
        self._divisors: dict[torch.dtype, Tensor] = {}
        self._in_flight: deque[_InFlight] = deque()
        self.nbytes = 0
        """Bytes of gradients given to sums and of means taken so far."""
        self._thread = threading.Thread(target=self._run, name="gradlane-collective", daemon=True)
        self._thread.start()

    # ---- any thread

    def wait_open(self, timeout_s: float) -> None:
        """Wait until the group of the node's ranks is connected.

        Raises:
            RendezvousError: it cannot be.
        """
        rank = self._layout.rank_of(self._layout.node, self._local_rank)
        if not self._opened.wait(timeout_s):
            self.cancel()
            raise RendezvousError(
                f"rank {rank} waited {timeout_s:g} s for the ranks of its node to open a group for "
                f'collectives (longer waits: {CONNECT}); or use local_sums="host"'
            )
        if self._refusal is not None:
            raise RendezvousError(
                f"rank {rank} could not open a group for collectives with the ranks of its node: "
                f'{self._refusal}; or use local_sums="host"'
            ) from self._refusal

    def set_sink(self, sink: CollectiveSink) -> None:
        """Set the receiver of results, before the first gradient is submitted."""
        self._sink = sink

    @property
    def tensors(self) -> int:
        """Number of leading tensors whose gradients the queue takes."""
        return len(self._parts_of_tensor)

    def submit(self, tensor: int, step: int, gradient: Tensor, *, absent: bool) -> None:
        """Borrow a gradient, or memory for the others' mean, until the mean is there.

        Args:
            tensor: its number.
            step: of the channel.
            gradient: dense, laid out as on all ranks.
            absent: whether this rank has no gradient.
        """
        mark = self._order.mark()
        parts_left = len(self._parts_of_tensor[tensor])
        self._pending[tensor] = PendingGradient(flat_values(gradient), absent, mark, parts_left)
        self._send_to_coordinator(_Message(READY, tensor, step, absent))

    def on_result(self, part: TensorPart, step: int, *, absent: bool) -> None:
        """Record that the mean of an own part is back from the other nodes."""
        self._send_to_coordinator(_Message(MEAN, part.number, step, absent))

    def on_message(self, kind: int, number: int, step: int, *, absent: bool) -> None:
        """Queue a message of another rank of the node; returns at once."""
        self._inbox.put(_Message(kind, number, step, absent))

    def cancel(self) -> None:
        """Issue no more collectives after a failure, and abort those in flight; returns at once."""
        self._cancelled.set()
        self._inbox.put(None)

    def stop(self) -> None:
        """End the thread and the group; all steps must be complete, or the session have failed."""
        self._inbox.put(None)
        if self._thread is not threading.current_thread():
            # A thread that is stuck in a driver is abandoned: it calls back no more.
            self._thread.join(_STOP_S)

    def forget_in_child(self) -> None:
        """Abandon the group in a forked child."""
        _abandoned_groups.append(self._group)

    # ---- the thread

    def _run(self) -> None:
        try:
            with torch.no_grad():
                self._open()
                self._opened.set()
                self._process_messages()
        except CollectiveCancelledError:
            pass
        except Exception as error:
            self._report_error(error)
        finally:
            self._opened.set()
            group, self._group = self._group, None
            if group is not None:
                with contextlib.suppress(RuntimeError):
                    group.abort()

    def _open(self) -> None:
        """Open the group and run one collective, so that a rank that cannot take part is noticed
        here."""
        self._group = group = self._open_group()
        values = torch.zeros(1, dtype=torch.float32, device=self._device)
        with self._order.after(self._order.mark()):
            self._order.wait_for(group.reduce(values, _COORDINATOR))
            self._in_flight.append(_InFlight(self._order.completion(), [values], _no_op))
        while self._in_flight:
            self._poll_device()
            if self._cancelled.wait(_POLL_MAX_S):
                raise CollectiveCancelledError

    def _report_error(self, error: Exception) -> None:
        if not self._opened.is_set():
            self._refusal = error
            return
        # The sockets name a rank that has died within this time.
        if not self._cancelled.wait(LOSS_REPORT_S):
            what = f"{type(error).__name__} in a collective of node {self._layout.node}: {error}"
            assert self._sink is not None
            self._sink.fail(Failure(what, None, None))

    def _process_messages(self) -> None:
        while (message := self._next()) is not None:
            if message.kind == READY:
                self._count_ready(message)
            elif message.kind == MEAN:
                self._broadcast_turn(
                    _Message(BROADCAST, message.number, message.step, message.absent)
                )
            else:
                self._execute(message)

    def _next(self) -> _Message | None:
        """Return the next message; poll the device meanwhile."""
        poll_s = _POLL_MIN_S
        while True:
            self._poll_device()
            try:
                return self._inbox.get(timeout=poll_s) if self._in_flight else self._inbox.get()
            except queue.Empty:
                poll_s = min(2 * poll_s, _POLL_MAX_S)

    def _poll_device(self) -> None:
        while self._in_flight and self._in_flight[0].is_done():
            if self._cancelled.is_set():
                # An aborted collective looks done, too.
                raise CollectiveCancelledError
            first = self._in_flight.popleft()
            first.buffers.clear()
            first.on_done()

    def _send_to_coordinator(self, message: _Message) -> None:
        if self._local_rank == _COORDINATOR:
            self._inbox.put(message)
        else:
            self._link.send(
                _COORDINATOR, message.kind, message.number, message.step, absent=message.absent
            )

    def _count_ready(self, message: _Message) -> None:
        """Count a rank's report of a tensor (coordinator)."""
        tensor = message.number
        self._ready_ranks[tensor] += 1
        self._present[tensor] |= not message.absent
        if self._ready_ranks[tensor] == self._layout.local_size:
            absent = not self._present[tensor]
            self._ready_ranks[tensor], self._present[tensor] = 0, False
            self._broadcast_turn(_Message(SUM, tensor, message.step, absent))

    def _broadcast_turn(self, turn: _Message) -> None:
        """Send a turn to all ranks in one order, and execute it (coordinator)."""
        for peer in self._link.peers:
            self._link.send(peer, turn.kind, turn.number, turn.step, absent=turn.absent)
        self._execute(turn)

    def _execute(self, turn: _Message) -> None:
        if self._cancelled.is_set():
            raise CollectiveCancelledError
        if turn.kind == BROADCAST:
            self._issue_broadcast(self._parts[turn.number], turn)
            return
        for part in self._parts_of_tensor[turn.number]:
            if not turn.absent:
                self._issue_sum(part, turn.step)
            elif part.leader == self._local_rank:
                self._submit_mean(part, turn.step, absent=True)

    def _issue_sum(self, part: TensorPart, step: int) -> None:
        """Issue the sum of a part; on its leader also the copy of the mean to the host."""
        pending = self._pending[part.tensor]
        assert self._group is not None
        with self._order.after(pending.mark):
            share = pending.values_of(part)
            if pending.absent:
                # Adding -0.0 keeps all bits, the sign of a zero included.
                share.fill_(-0.0)
            terms = share.to(SUM_DTYPES[share.dtype])
            self._order.wait_for(self._group.reduce(terms, part.leader))
            on_done: Callable[[], None] = _no_op
            if part.leader == self._local_rank:
                mean = terms.div_(self._divisor(terms.dtype)).to(share.dtype)
                self._host_buffer(part, share.dtype).copy_(mean, non_blocking=True)
                on_done = functools.partial(self._submit_mean, part, step, absent=False)
            self._in_flight.append(_InFlight(self._order.completion(), [share, terms], on_done))
        self.nbytes += part.nbytes

    def _issue_broadcast(self, part: TensorPart, turn: _Message) -> None:
        """Issue the broadcast of a part's mean over all nodes."""
        on_done = functools.partial(self._finish_part, part, turn.step, absent=turn.absent)
        if turn.absent:
            on_done()
            return
        pending = self._pending[part.tensor]
        assert self._group is not None
        with self._order.after(pending.mark):
            share = pending.values_of(part)
            if part.leader == self._local_rank:
                share.copy_(self._host_buffer(part, share.dtype), non_blocking=True)
            # As bytes: backends differ in the dtypes that they support.
            work = self._group.broadcast(share.view(torch.uint8), part.leader)
            self._order.wait_for(work)
            self._in_flight.append(_InFlight(self._order.completion(), [share], on_done))
        self.nbytes += part.nbytes

    def _submit_mean(self, part: TensorPart, step: int, *, absent: bool) -> None:
        assert self._sink is not None
        buffer = self._host_buffer(part, self._pending[part.tensor].values.dtype)
        self._sink.on_node_mean(part, step, buffer.data_ptr(), absent=absent)

    def _finish_part(self, part: TensorPart, step: int, *, absent: bool) -> None:
        pending = self._pending[part.tensor]
        pending.parts_left -= 1
        if not pending.parts_left:
            del self._pending[part.tensor]
        # The receiver may check that no other reference to the memory is left.
        del pending
        assert self._sink is not None
        self._sink.on_landed(part, step, absent=absent)

    def _divisor(self, dtype: torch.dtype) -> Tensor:
        """Return what sums are divided by; CUDA divides by a plain number by multiplying, which
        rounds otherwise."""
        ranks = self._divisors.get(dtype)
        if ranks is None:
            ranks = torch.full((), self._layout.local_size, dtype=dtype, device=self._device)
            self._divisors[dtype] = ranks
        return ranks

    def _host_buffer(self, part: TensorPart, dtype: torch.dtype) -> Tensor:
        """Return the host's buffer of an own part; the same in all steps."""
        buffer = self._host_buffers.get(part.number)
        if buffer is None:
            count = part.nbytes // dtype.itemsize
            buffer = torch.empty(
                count, dtype=dtype, pin_memory=self._order.needs_pinned_memory, device="cpu"
            )
            self._host_buffers[part.number] = buffer
        return buffer


def _no_op() -> None:
    pass
