"""A model of MXNet's KVStore with the copies that gradlane does not make (Jayarajan et al. 2019).

A gradient is copied from the accelerator to the host, sent, added up by the one thread of a server,
copied into replies, sent back and copied to the accelerator. Each engine, port and thread does one
thing at a time. KVStore moves a tensor whole through each of them, or in as many parts as there are
servers; slices are in all of them at once. The constants of copies and messages are those that
`lowprec_model` fits to ResNet-152 of another paper; nothing is fitted here.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from gradlane.planning.simulation.profiles import Profile
from gradlane_papers.reproduction.lowprec_model import constants
from gradlane_papers.reproduction.simulations import DRAWS

SLICE_ELEMS = 50_000
SPLIT_ELEMS = 1_000_000
"""KVStore splits tensors of this size and above over all servers, and draws one for others."""
GOODPUT_SHARE = 0.956
STEPS = 2
BASELINE, SLICING, PRIORITIES = STRATEGIES = ("kvstore", "slicing", "p3")
TO_HOST, TO_DEVICE = "to the host", "to the accelerator"


@dataclass(frozen=True)
class Machine:
    """Seconds of copies, messages and sums.

    Attributes:
        copy_byte_s: from the accelerator to the host, or back, a byte.
        reply_byte_s: within the host's memory, a byte of a reply.
        message_s: sending or receiving a message, whatever its size.
        sum_byte_s: adding up a byte of one contribution.
        copies_whole: of `TO_HOST` and `TO_DEVICE`, the copies that P3 makes of whole tensors, as
            the baseline does.
    """

    copy_byte_s: float
    reply_byte_s: float
    message_s: float
    sum_byte_s: float = 1e-9
    copies_whole: frozenset[str] = frozenset()

    @classmethod
    def fitted(cls) -> Machine:
        """Return the constants of the low-precision paper's copies through the host."""
        found = constants("mpi")
        return cls(found["link"], found["memory"], found["messages"])


@dataclass
class _Clock:
    now: float = 0.0
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), call))

    def run(self) -> None:
        while self.events:
            self.now, _, call = heapq.heappop(self.events)
            call()


@dataclass
class _Line:
    """A copy engine, a port or a thread: one job at a time, the smallest order first."""

    clock: _Clock
    waiting: list[tuple[int, int, float, Callable[[], None]]] = field(default_factory=list)
    is_busy: bool = False

    def add(self, order: int, seconds: float, done: Callable[[], None]) -> None:
        heapq.heappush(self.waiting, (order, next(self.clock.numbers), seconds, done))
        self._begin()

    def _begin(self) -> None:
        if self.is_busy or not self.waiting:
            return
        _, _, seconds, done = heapq.heappop(self.waiting)
        self.is_busy = True

        def end() -> None:
            self.is_busy = False
            done()
            self._begin()

        self.clock.after(seconds, end)


@dataclass(frozen=True)
class Part:
    """A part of a tensor that one server owns."""

    tensor: int
    size_bytes: int
    server: int


class _Node:
    """A machine that trains and serves, and what its training has and waits for.

    Attributes:
        began: when each of its steps began, in seconds.
        missing: parts of each tensor that have not come back.
        copying: copies of each tensor to the accelerator that have not ended.
        stalled: the tensor that its forward waits for, with the time in the profile; None: none.
    """

    def __init__(self, clock: _Clock, tensors: int) -> None:
        self.to_host, self.port, self.server, self.to_device = (_Line(clock) for _ in range(4))
        self.began: list[float] = []
        self.missing = [0] * tensors
        self.copying = [0] * tensors
        self.stalled: tuple[int, float] | None = None

    def has(self, tensor: int) -> bool:
        """Return whether the tensor is back on the accelerator."""
        return self.missing[tensor] == self.copying[tensor] == 0


class _Exchange:
    """All machines in virtual time."""

    def __init__(
        self,
        profile: Profile,
        parts: Sequence[Sequence[Part]],
        machine: Machine,
        *,
        workers: int,
        rate_bps: float,
        strategy: str,
    ) -> None:
        self.profile, self.parts, self.machine = profile, parts, machine
        self.byte_s = 8.0 / (GOODPUT_SHARE * rate_bps)
        self.whole = strategy == BASELINE
        self.ordered = strategy == PRIORITIES
        self.clock = _Clock()
        self.nodes = [_Node(self.clock, len(parts)) for _ in range(workers)]
        self.contributions: Counter[Part] = Counter()
        self.updated: Counter[int] = Counter()

    def _order(self, tensor: int) -> int:
        return tensor if self.ordered else 0

    def _copies_whole(self, way: str) -> bool:
        return self.whole or (self.ordered and way in self.machine.copies_whole)

    def begin(self, node: _Node) -> None:
        """Begin a step's forward."""
        node.began.append(self.clock.now)
        if len(node.began) <= STEPS:
            self._forward(node, 0, 0.0)

    def _forward(self, node: _Node, tensor: int, at_s: float) -> None:
        """Go on with a forward that has come to `tensor`, `at_s` into the profile."""
        tensors = self.profile.tensors
        if tensor == len(tensors):
            self.clock.after(self.profile.forward_s - at_s, lambda: self._backward(node))
        elif tensors[tensor].need_s > at_s:
            need_s = tensors[tensor].need_s
            self.clock.after(need_s - at_s, lambda: self._forward(node, tensor, need_s))
        elif node.has(tensor):
            self._forward(node, tensor + 1, at_s)
        else:
            node.stalled = (tensor, at_s)

    def _backward(self, node: _Node) -> None:
        for number, tensor in enumerate(self.profile.tensors):
            node.missing[number] = len(self.parts[number])
            ready = partial(self._copy_out, node, number)
            self.clock.after(tensor.ready_s - self.profile.forward_s, ready)
        left_s = self.profile.compute_s - self.profile.forward_s
        self.clock.after(left_s, lambda: self.begin(node))

    def _copy_out(self, node: _Node, tensor: int) -> None:
        own = self.parts[tensor]
        for group in [own] if self._copies_whole(TO_HOST) else [[part] for part in own]:
            seconds = self.machine.copy_byte_s * sum(part.size_bytes for part in group)
            # Copies are made as they come; priorities are those of messages.
            node.to_host.add(0, seconds, partial(self._push, node, group))

    def _push(self, node: _Node, parts: Sequence[Part]) -> None:
        for part in parts:
            self._send(node, self.nodes[part.server], part, partial(self._sum, part))

    def _send(self, source: _Node, target: _Node, part: Part, done: Callable[[], None]) -> None:
        if source is target:
            done()
        else:
            seconds = self.machine.message_s + self.byte_s * part.size_bytes
            source.port.add(self._order(part.tensor), seconds, done)

    def _sum(self, part: Part) -> None:
        seconds = self.machine.message_s + self.machine.sum_byte_s * part.size_bytes
        server = self.nodes[part.server].server
        server.add(self._order(part.tensor), seconds, partial(self._summed, part))

    def _summed(self, part: Part) -> None:
        self.contributions[part] += 1
        if self.contributions[part] % len(self.nodes):
            return
        self.updated[part.tensor] += 1
        if not self.whole:
            self._reply(part)
        elif self.updated[part.tensor] % len(self.parts[part.tensor]) == 0:
            # Workers pull a tensor when they know of all its parts.
            for one in self.parts[part.tensor]:
                self._reply(one)

    def _reply(self, part: Part) -> None:
        owner = self.nodes[part.server]
        seconds = self.machine.message_s + self.machine.reply_byte_s * part.size_bytes
        for node in self.nodes:
            back = partial(self._back, node, part)
            send = partial(self._send, owner, node, part, back)
            owner.server.add(self._order(part.tensor), seconds, send)

    def _back(self, node: _Node, part: Part) -> None:
        """Copy what has come back to the accelerator: each part, or a tensor when it is whole."""
        node.missing[part.tensor] -= 1
        landed = [part]
        if self._copies_whole(TO_DEVICE):
            landed = [] if node.missing[part.tensor] else list(self.parts[part.tensor])
        if landed:
            node.copying[part.tensor] += 1
            seconds = self.machine.copy_byte_s * sum(one.size_bytes for one in landed)
            node.to_device.add(0, seconds, partial(self._landed, node, part.tensor))

    def _landed(self, node: _Node, tensor: int) -> None:
        node.copying[tensor] -= 1
        if node.has(tensor) and node.stalled and node.stalled[0] == tensor:
            stalled, node.stalled = node.stalled, None
            self._forward(node, *stalled)


def parts_of(profile: Profile, strategy: str, workers: int, seed: int) -> list[list[Part]]:
    """Return the parts of each tensor, with their servers.

    Args:
        profile: whose tensors are cut.
        strategy: of `STRATEGIES`.
        workers: each is a server, too.
        seed: of the baseline's draws.
    """
    draws = random.Random(seed)
    numbers = itertools.count()
    parts = []
    for number, tensor in enumerate(profile.tensors):
        if strategy == BASELINE and tensor.numel < SPLIT_ELEMS:
            cut = [(tensor.numel, draws.randrange(workers))]
        elif strategy == BASELINE:
            each = -(-tensor.numel // workers)
            cut = [(min(each, tensor.numel - each * one), one) for one in range(workers)]
        else:
            firsts = range(0, tensor.numel, SLICE_ELEMS)
            cut = [
                (min(SLICE_ELEMS, tensor.numel - first), next(numbers) % workers)
                for first in firsts
            ]
        parts.append([Part(number, 4 * elems, server) for elems, server in cut])
    return parts


def step_s(
    profile: Profile,
    strategy: str,
    rate_bps: float,
    machine: Machine,
    *,
    workers: int = 4,
    seed: int = 0,
) -> float:
    """Return the time of a step in seconds, the longest over the machines.

    Args:
        profile: what is computed.
        strategy: of `STRATEGIES`.
        rate_bps: of each port, each way.
        machine: what copies, messages and sums take.
        workers: each is a server, too.
        seed: of the baseline's draws.
    """
    parts = parts_of(profile, strategy, workers, seed)
    made = _Exchange(profile, parts, machine, workers=workers, rate_bps=rate_bps, strategy=strategy)
    for node in made.nodes:
        made.begin(node)
    made.clock.run()
    return max(node.began[STEPS] - node.began[STEPS - 1] for node in made.nodes)


def gains(profile: Profile, rate_bps: float, machine: Machine) -> dict[str, float]:
    """Return by how many percent strategies have more throughput than the baseline.

    Args:
        profile: what is computed.
        rate_bps: of each port, each way.
        machine: what copies, messages and sums take.
    """
    base_s = sum(step_s(profile, BASELINE, rate_bps, machine, seed=one) for one in range(DRAWS))
    return {
        one: 100.0 * (base_s / DRAWS / step_s(profile, one, rate_bps, machine) - 1.0)
        for one in (SLICING, PRIORITIES)
    }
