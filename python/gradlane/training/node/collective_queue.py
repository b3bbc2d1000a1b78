"""Sums of a node's ranks where their gradients are: collectives, in one order on all ranks.

Collectives must be issued in the same order everywhere, and gradients become ready in another one
on each rank. So the first rank of the node says whose turn it is, as Horovod's coordinator does
(Sergeev and Del Balso, arXiv:1802.05799): each rank tells it what it has, or that it has nothing;
when all have spoken of a tensor it tells all to add that one up. Nobody ever waits inside a
collective for a gradient that is not there, and a tensor that a rank leaves out holds up no other.

A tensor goes through two turns. In the first each carrier gets the sum of its parts, divides it,
copies it to the host and gives it to the channel between nodes. In the second, when the mean over
all nodes is back, all ranks get it from its carrier, the same bits. One thread of each rank issues
them, and is the only one that touches the group.

Order and memory: the thread reads a gradient behind what computed it, a copy to the host comes
behind its sum, and a tensor is ready once the device has done all that. Whatever a collective uses
is kept here until then.
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
from gradlane.training.node.device_order import GivenUpError, order_on
from gradlane.training.node.failure import Failure
from gradlane.training.node.group import Group
from gradlane.training.node.layout import Layout
from gradlane.training.node.link import ADD, MEAN, READY, TAKE
from gradlane.training.node.pending_gradient import TERMS, PendingGradient, numbers_of
from gradlane.training.node.shares import Part

_FIRST = 0
"""The local rank that says whose turn it is."""
_LOOK_MIN_S = 50e-6
_LOOK_MAX_S = 1e-3
_NAMED_WITHIN_S = 2.0
"""How soon the sockets of a node name a rank that has died, at the latest."""
_STOP_S = 5.0
_left_behind: list[object] = []
"""Groups of a parent, in a forked child: to end them would wait for threads that are not there."""


class Link(Protocol):
    """What says something to the other ranks of the node."""

    @property
    def layout(self) -> Layout:
        """Where this rank is."""

    @property
    def peers(self) -> Sequence[int]:
        """The others, by local rank."""

    def send(
        self, peer: int, kind: int, part: int = 0, step: int = 0, *, flag: bool = False
    ) -> None:
        """Say something to a rank; one that is gone hears nothing."""


class CollectiveSink(Protocol):
    """This rank's end of the node, which hears what has come of collectives."""

    def add_up(self, part: Part, step: int, pointer: int, *, absent: bool) -> None:
        """The node's mean of a part that this rank carries is in the host's memory."""

    def landed(self, part: Part, step: int, *, absent: bool) -> None:
        """The mean of a part over all nodes is in its tensor."""

    def fail(self, failure: Failure) -> None:
        """Nothing more is to be had."""


@dataclass(frozen=True)
class _Said:
    """What a rank says about a tensor or a part, or whose turn it is; kinds are the link's."""

    kind: int
    number: int
    step: int
    absent: bool


@dataclass
class _UnderWay:
    """Something that the device has yet to do, the tensors that it uses, and what follows."""

    is_done: Callable[[], bool]
    uses: list[Tensor]
    then: Callable[[], None]


class CollectiveQueue:
    """The collectives of one channel on one rank."""

    def __init__(
        self,
        link: Link,
        parts: Sequence[Part],
        gradients: Sequence[Tensor],
        open_group: Callable[[], Group],
    ) -> None:
        """Start the thread, which opens the group; see `wait_open`.

        Args:
            link: to the other ranks of the node, which say the same of all that follows.
            parts: all parts of the channel's tensors.
            gradients: tensors like the gradients of the first tensors, all on one device; the
                lane is for these.
            open_group: connects the ranks of the node.
        """
        self._link = link
        self._layout = link.layout
        self._own = link.layout.local_rank
        self._parts = parts
        self._of_tensor: list[list[Part]] = [[] for _ in gradients]
        for part in parts:
            if part.tensor < len(gradients):
                self._of_tensor[part.tensor].append(part)
        self._device = gradients[0].device
        self._lost = threading.Event()
        self._order = order_on(self._device, self._lost.is_set)
        self._open_group = open_group
        self._group: Group | None = None
        self._opened = threading.Event()
        self._refusal: Exception | None = None
        self._side: CollectiveSink | None = None
        self._said: queue.SimpleQueue[_Said | None] = queue.SimpleQueue()
        self._heard = [0] * len(gradients)
        self._present = [False] * len(gradients)
        self._held: dict[int, PendingGradient] = {}
        self._landings: dict[int, Tensor] = {}
        self._divisors: dict[torch.dtype, Tensor] = {}
        self._under_way: deque[_UnderWay] = deque()
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
        rank = self._layout.rank_of(self._layout.node, self._own)
        if not self._opened.wait(timeout_s):
            self.let_go()
            raise RendezvousError(
                f"rank {rank} waited {timeout_s:g} s for the ranks of its node to open a group for "
                'collectives (connect_timeout_s); or use local_sums="host"'
            )
        if self._refusal is not None:
            raise RendezvousError(
                f"rank {rank} could not open a group for collectives with the ranks of its node: "
                f'{self._refusal}; or use local_sums="host"'
            ) from self._refusal

    def serve(self, side: CollectiveSink) -> None:
        """Tell somebody what comes of collectives; before the first gradient is given."""
        self._side = side

    @property
    def tensors(self) -> int:
        """How many tensors, the first ones, have gradients that come this way."""
        return len(self._of_tensor)

    def give(self, tensor: int, step: int, gradient: Tensor, *, absent: bool) -> None:
        """Take a gradient, or memory for the others' mean; it is the lane's until that is there.

        Args:
            tensor: its number.
            step: of the channel.
            gradient: dense, laid out as on all ranks.
            absent: whether this rank has none.
        """
        produced = self._order.produced()
        parts_left = len(self._of_tensor[tensor])
        self._held[tensor] = PendingGradient(numbers_of(gradient), absent, produced, parts_left)
        self._say(_Said(READY, tensor, step, absent))

    def have(self, part: Part, step: int, *, absent: bool) -> None:
        """Note that the mean of a part that this rank carries is back from the other nodes."""
        self._say(_Said(MEAN, part.number, step, absent))

    def hear(self, kind: int, number: int, step: int, *, absent: bool) -> None:
        """Note what another rank of the node says; returns at once."""
        self._said.put(_Said(kind, number, step, absent))

    def let_go(self) -> None:
        """Issue nothing more, after a failure, and end what is under way; returns at once."""
        self._lost.set()
        self._said.put(None)

    def stop(self) -> None:
        """End the thread and the group, when all steps are complete or the session has failed."""
        self._said.put(None)
        if self._thread is not threading.current_thread():
            # A thread that is stuck in a driver is left alone: it wakes nobody any more.
            self._thread.join(_STOP_S)

    def forget_in_child(self) -> None:
        """Leave the group alone in a forked child."""
        _left_behind.append(self._group)

    # ---- the thread

    def _run(self) -> None:
        try:
            with torch.no_grad():
                self._open()
                self._opened.set()
                self._take_turns()
        except GivenUpError:
            pass
        except Exception as error:
            self._broken(error)
        finally:
            self._opened.set()
            group, self._group = self._group, None
            if group is not None:
                with contextlib.suppress(RuntimeError):
                    group.end()

    def _open(self) -> None:
        """Open the group and use it once: whoever cannot take part is noticed here."""
        self._group = group = self._open_group()
        values = torch.zeros(1, dtype=torch.float32, device=self._device)
        with self._order.behind(self._order.produced()):
            self._order.follow(group.sum_to(values, _FIRST))
            self._under_way.append(_UnderWay(self._order.done(), [values], _nothing))
        while self._under_way:
            self._look()
            if self._lost.wait(_LOOK_MAX_S):
                raise GivenUpError

    def _broken(self, error: Exception) -> None:
        if not self._opened.is_set():
            self._refusal = error
            return
        # Who has died the sockets know, a moment later at most.
        if not self._lost.wait(_NAMED_WITHIN_S):
            what = f"{type(error).__name__} in a collective of node {self._layout.node}: {error}"
            assert self._side is not None
            self._side.fail(Failure(what, None, None))

    def _take_turns(self) -> None:
        while (said := self._next()) is not None:
            if said.kind == READY:
                self._count(said)
            elif said.kind == MEAN:
                self._announce(_Said(TAKE, said.number, said.step, said.absent))
            else:
                self._take_turn(said)

    def _next(self) -> _Said | None:
        """Return what was said next, and see meanwhile to what the device has done."""
        look_s = _LOOK_MIN_S
        while True:
            self._look()
            try:
                return self._said.get(timeout=look_s) if self._under_way else self._said.get()
            except queue.Empty:
                look_s = min(2 * look_s, _LOOK_MAX_S)

    def _look(self) -> None:
        while self._under_way and self._under_way[0].is_done():
            if self._lost.is_set():
                # What was ended looks done, too.
                raise GivenUpError
            first = self._under_way.popleft()
            first.uses.clear()
            first.then()

    def _say(self, said: _Said) -> None:
        if self._own == _FIRST:
            self._said.put(said)
        else:
            self._link.send(_FIRST, said.kind, said.number, said.step, flag=said.absent)

    def _count(self, said: _Said) -> None:
        """On the first rank: note that a rank has spoken of a tensor."""
        tensor = said.number
        self._heard[tensor] += 1
        self._present[tensor] |= not said.absent
        if self._heard[tensor] == self._layout.local_size:
            absent = not self._present[tensor]
            self._heard[tensor], self._present[tensor] = 0, False
            self._announce(_Said(ADD, tensor, said.step, absent))

    def _announce(self, turn: _Said) -> None:
        """On the first rank: say whose turn it is, to all ranks in one order, and take it."""
        for peer in self._link.peers:
            self._link.send(peer, turn.kind, turn.number, turn.step, flag=turn.absent)
        self._take_turn(turn)

    def _take_turn(self, turn: _Said) -> None:
        if self._lost.is_set():
            raise GivenUpError
        if turn.kind == TAKE:
            self._take(self._parts[turn.number], turn)
            return
        for part in self._of_tensor[turn.number]:
            if not turn.absent:
                self._add(part, turn.step)
            elif part.carrier == self._own:
                self._hand_over(part, turn.step, absent=True)

    def _add(self, part: Part, step: int) -> None:
        """Issue the sum of a part, and on its carrier what follows."""
        held = self._held[part.tensor]
        assert self._group is not None
        with self._order.behind(held.produced):
            share = held.share(part)
            if held.absent:
                # What is added to it keeps its bits, the sign of a zero included.
                share.fill_(-0.0)
            terms = share.to(TERMS[share.dtype])
            self._order.follow(self._group.sum_to(terms, part.carrier))
            then: Callable[[], None] = _nothing
            if part.carrier == self._own:
                mean = terms.div_(self._ranks(terms.dtype)).to(share.dtype)
                self._landing(part, share.dtype).copy_(mean, non_blocking=True)
                then = functools.partial(self._hand_over, part, step, absent=False)
            self._under_way.append(_UnderWay(self._order.done(), [share, terms], then))
        self.nbytes += part.nbytes

    def _take(self, part: Part, turn: _Said) -> None:
        """Issue the spreading of a part's mean over all nodes."""
        then = functools.partial(self._landed, part, turn.step, absent=turn.absent)
        if turn.absent:
            then()
            return
        held = self._held[part.tensor]
        assert self._group is not None
        with self._order.behind(held.produced):
            share = held.share(part)
            if part.carrier == self._own:
                share.copy_(self._landing(part, share.dtype), non_blocking=True)
            # As bytes: not all backends know all dtypes, and nothing is computed here.
            work = self._group.spread_from(share.view(torch.uint8), part.carrier)
            self._order.follow(work)
            self._under_way.append(_UnderWay(self._order.done(), [share], then))
        self.nbytes += part.nbytes

    def _hand_over(self, part: Part, step: int, *, absent: bool) -> None:
        assert self._side is not None
        landing = self._landing(part, self._held[part.tensor].numbers.dtype)
        self._side.add_up(part, step, landing.data_ptr(), absent=absent)

    def _landed(self, part: Part, step: int, *, absent: bool) -> None:
        held = self._held[part.tensor]
        held.parts_left -= 1
        if not held.parts_left:
            del self._held[part.tensor]
        # Whoever hears of it may look whether anybody else holds the memory.
        del held
        assert self._side is not None
        self._side.landed(part, step, absent=absent)

    def _ranks(self, dtype: torch.dtype) -> Tensor:
        """Return what sums are divided by; CUDA divides by a plain number by multiplying, which
        rounds otherwise."""
        ranks = self._divisors.get(dtype)
        if ranks is None:
            ranks = torch.full((), self._layout.local_size, dtype=dtype, device=self._device)
            self._divisors[dtype] = ranks
        return ranks

    def _landing(self, part: Part, dtype: torch.dtype) -> Tensor:
        """Return the host's memory of a part that this rank carries; the same in all steps."""
        landing = self._landings.get(part.number)
        if landing is None:
            count = part.nbytes // dtype.itemsize
            landing = torch.empty(count, dtype=dtype, pin_memory=self._order.pins, device="cpu")
            self._landings[part.number] = landing
        return landing


def _nothing() -> None:
    """What follows where nothing does."""
