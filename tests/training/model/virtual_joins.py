"""Ranks join a training in virtual time: everything from one seed, and no process or connection.

The session's own code runs: requests and invitations, the places where ranks agree, the membership,
what the first step begins with. In place of the engine stands what it promises of a world
(`docs/decisions/0062-going-on.md`): what ranks exchange has one result on all of them, whether or
not a rank that is lost meanwhile is in it, and all hear of the same losses in the same order, at
moments of their own. State that is given while the others train takes some time, and fails where a
donor is lost or never begins to give. One thread runs at a time, up to its next call of the store,
sleep or exchange; which one is next follows from delays that the seed draws.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from gradlane.errors import RendezvousError
from gradlane.training.model.joining import JoinedWorld
from gradlane.training.model.precopy import PrecopyPlan
from gradlane.training.options.going_on import GoingOn
from gradlane.training.options.option_groups import Network
from gradlane.training.options.options import Options
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.membership import Membership
from gradlane.training.session.joining import Joins
from gradlane.training.session.scopes import SessionScopes
from gradlane.training.session.world import World

STEP_S = 0.2
STEPS_AFTER = 6
CONNECT_TIMEOUT_S = 60.0
CONNECT_S = 15.0
_numbers = itertools.count()
"""Of clusters, in their jobs' names: the process keeps what the ranks of a job have agreed on."""
_OPTIONS = Options(going_on=GoingOn(), network=Network(connect_timeout_s=CONNECT_TIMEOUT_S))


class KilledError(BaseException):
    """The process has ended: nothing of its program runs any more."""


class Clock:
    """Runs threads one at a time, each up to its next pause."""

    def __init__(self, seed: int) -> None:
        self.now_s = 0.0
        self.draw = random.Random(seed)
        self.pauses = 0
        self.failures: list[str] = []
        self._due: list[tuple[float, int, _Thread]] = []
        self._count = 0
        self._turn = threading.Semaphore(0)
        self._running: _Thread | None = None

    @property
    def process(self) -> Process:
        """The process of the thread that runs."""
        assert self._running is not None
        return self._running.process

    def start(self, process: Process, body: Callable[[], object], after_s: float = 0.0) -> None:
        """Run a body in a thread of a process."""
        self._push(_Thread(self, process, body), after_s)

    def pause(self, seconds: float = 0.0) -> None:
        """Let others run, and the thread that calls for at least so long not."""
        thread = self._running
        assert thread is not None
        self.pauses += 1
        thread.process.count_pause()
        # Mostly short, at times as on a machine that is busy elsewhere.
        late_s = self.draw.choice((0.0, 1e-4, 1e-3, 1e-2)) + (self.draw.random() < 0.01)
        self._push(thread, seconds + late_s)
        self._turn.release()
        thread.resume.acquire()
        if thread.process.is_killed:
            raise KilledError

    def run(self, limit_s: float) -> None:
        """Run until no thread is left, or past a moment, by which all should have ended."""
        while self._due:
            self.now_s, _, thread = heapq.heappop(self._due)
            if self.now_s > limit_s and not thread.process.is_killed:
                self.failures.append(f"{thread.process.name} still runs after {limit_s} s")
                thread.process.is_killed = True
            self._running = thread
            thread.go()
            self._turn.acquire()

    def end_turn(self) -> None:
        """Note that the thread that runs has ended."""
        self._turn.release()

    def _push(self, thread: _Thread, seconds: float) -> None:
        self._count += 1
        heapq.heappush(self._due, (self.now_s + seconds, self._count, thread))

    # ---- in place of the modules `time` and `threading`

    def monotonic(self) -> float:
        """Return the time in seconds."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Sleep."""
        self.pause(seconds)

    def Event(self) -> _Event:  # noqa: N802
        """Return a flag."""
        return _Event(self)

    def Thread(self, *, target: Callable[[], object], **_: Any) -> SimpleNamespace:  # noqa: N802
        """Return a thread of the process that runs."""
        process = self.process
        return SimpleNamespace(start=lambda: self.start(process, target))


class _Event:
    def __init__(self, clock: Clock) -> None:
        self._clock, self._is_set = clock, False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, seconds: float) -> bool:
        self._clock.pause(0.0 if self._is_set else seconds)
        return self._is_set


class _Thread:
    def __init__(self, clock: Clock, process: Process, body: Callable[[], object]) -> None:
        self.process = process
        self.resume = threading.Semaphore(0)
        self._clock, self._body = clock, body
        self._thread: threading.Thread | None = None

    def go(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        else:
            self.resume.release()

    def _run(self) -> None:
        try:
            if not self.process.is_killed:
                self._body()
        except KilledError:
            pass
        except BaseException:
            self._clock.failures.append(f"{self.process.name}: {traceback.format_exc()}")
        finally:
            self._clock.end_turn()


class Process:
    """A process that may be killed at one of its pauses."""

    def __init__(
        self, cluster: Cluster, name: str, fatal_pause: int, *, joins_only: bool = False
    ) -> None:
        """Begin.

        Args:
            cluster: that it is in.
            name: for failures.
            fatal_pause: number of the pause in which it is killed, if one more may be; 0: none.
            joins_only: whether only pauses count that are taken while ranks connect to join.
        """
        self.name = name
        self.is_killed = False
        self.channels: list[tuple[Channel, int]] = []
        self.longest_step_s = 0.0
        self.has_trained = False
        self._cluster = cluster
        self._left = fatal_pause
        self._is_doomed = fatal_pause > 0
        self._joins_only = joins_only

    def count_pause(self) -> None:
        """Come one pause nearer to the fatal one."""
        if self._joins_only and not self._cluster.connecting:
            return
        self._left -= 1
        if self._left <= 0 and self._is_doomed and self._cluster.may_kill(self):
            self.is_killed = True
            for channel, rank in self.channels:
                channel.lose(rank)
            if not self.has_trained:
                self._cluster.start_joiner()


class VirtualStore:
    """The job's store as one rank sees it; calls take a while, and their effect is in between."""

    ends_with_rank_0 = False
    is_signed = False

    def __init__(self, clock: Clock, values: dict[str, bytes], prefix: str = "") -> None:
        self._clock, self._values, self._prefix = clock, values, prefix

    def with_prefix(self, prefix: str) -> VirtualStore:
        return VirtualStore(self._clock, self._values, f"{self._prefix}{prefix}/")

    def as_rank(self, rank: int) -> VirtualStore:
        return self

    def set(self, key: str, value: str | bytes, **_: Any) -> None:
        self._clock.pause()
        self._values[self._prefix + key] = value.encode() if isinstance(value, str) else value
        self._clock.pause()

    def set_if_absent(self, key: str, value: str, **_: Any) -> str:
        self._clock.pause()
        found = self._values.setdefault(self._prefix + key, value.encode()).decode()
        self._clock.pause()
        return found

    def read_first(self, writers: Mapping[str, Any], **_: Any) -> tuple[str, bytes] | None:
        self._clock.pause()
        found = next((key for key in writers if self._prefix + key in self._values), None)
        return None if found is None else (found, self._values[self._prefix + found])

    def read(self, key: str, writer: int | None, **_: Any) -> bytes | None:
        found = self.read_first({key: writer})
        return None if found is None else found[1]

    def wait_for(self, writers: Mapping[str, Any], limit_s: float) -> None:
        end_s = self._clock.now_s + limit_s
        while self._clock.now_s < end_s and any(
            self._prefix + k not in self._values for k in writers
        ):
            self._clock.pause(0.02)

    def delete(self, key: str) -> None:
        self._values.pop(self._prefix + key, None)

    def drain(self) -> None:
        pass


class Channel:
    """The connections of a world, as the engine keeps them."""

    def __init__(self, clock: Clock, world: str, world_size: int) -> None:
        self._clock, self._world, self._world_size = clock, world, world_size
        self._members: dict[int, tuple[Process, Membership]] = {}
        self._lost: list[int] = []
        self._gone: set[int] = set()
        self._said: list[dict[int, Any]] = []
        self._results: list[dict[int, Any] | None] = []

    def open(self, rank: int, process: Process, membership: Membership) -> None:
        """Connect a rank."""
        self._members[rank] = process, membership
        process.channels.append((self, rank))

    def are_connected(self) -> bool:
        """Return whether all ranks have connected.

        Raises:
            RendezvousError: one was lost before.
        """
        if len(self._members) < self._world_size and self._gone:
            raise RendezvousError("a rank was lost while the ranks connected")
        return len(self._members) == self._world_size

    def leave(self, rank: int) -> None:
        """Say goodbye."""
        self._gone.add(rank)

    def lose(self, rank: int) -> None:
        """Lose a rank: after a while the others agree on that, and each hears of it."""
        if rank in self._gone:
            return
        self._gone.add(rank)
        if len(self._members) < self._world_size:
            return

        def agree() -> None:
            self._lost.append(rank)
            change, survivors = len(self._lost), self._survivors()
            for said, result in zip(self._said, self._results, strict=True):
                # A result has the lost rank's part, or has it not, for all alike.
                if result is None and rank in said and self._clock.draw.random() < 0.5:
                    del said[rank]
            for other in survivors:
                process, membership = self._members[other]
                hear = (self._world, change, tuple(survivors), 0, f"rank {rank} was lost")
                self._clock.start(
                    process,
                    lambda hear=hear, membership=membership: membership.hear(*hear),  # type: ignore[misc]
                    # In the order of the changes.
                    0.4 * change + 0.3 * self._clock.draw.random(),
                )

        self._clock.start(Process(Cluster.nobody(), "network", 0), agree, self._clock.draw.random())

    def _survivors(self) -> list[int]:
        return [one for one in sorted(self._members) if one not in self._lost]

    def exchange(self, rank: int, number: int, value: Any) -> dict[int, Any]:
        """Give all ranks each one's value; the n-th time."""
        while len(self._said) <= number:
            self._said.append({})
            self._results.append(None)
        self._said[number][rank] = value
        while self._results[number] is None:
            self._clock.pause(0.005)
            # A rank that is lost holds all up until they have agreed that it is.
            if all(one in self._said[number] for one in self._survivors()):
                self._results[number] = dict(sorted(self._said[number].items()))
        self._clock.pause(0.02 * self._clock.draw.random())
        result = self._results[number]
        assert result is not None
        return result

    def has_all_goodbyes(self) -> bool:
        """Return whether every rank has gone in good order or is lost."""
        return set(self._members) <= self._gone


@dataclass
class Connected:
    """What `connect_to_join` returns."""

    channel: Channel
    rank: int
    scope: Any

    def look(self) -> None:
        """Losses are told by the membership."""

    def abort(self, reason: str) -> None:
        """Be a lost rank of this world."""
        self.channel.lose(self.rank)


class Prepared:
    """The steps of a model, as far as membership and joins go, as `TrainingSteps` takes them."""

    def __init__(
        self,
        cluster: Cluster,
        ctx: Any,
        connected: Connected,
        optimizer: Any,
        steps_before: int,
        on_step_begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._cluster, self._ctx, self._connected = cluster, ctx, connected
        self._on_step_begin = on_step_begin
        self._exchanges = 0
        self._unread: list[tuple[int, dict[int, Any]]] = []
        self._after_step: Callable[[], None] = lambda: None
        self.options: Options = ctx.options
        self.trained = range(cluster.trained)
        self.optimizer = optimizer
        self.steps = self.update = self.numbers = self.listeners = self
        self.residuals = self
        self.step = steps_before
        ctx.membership.training_step_of = lambda step: self.step

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Have a function called after each step."""
        self._after_step = listener

    def _exchange(self, value: Any) -> dict[int, Any]:
        number, self._exchanges = self._exchanges, self._exchanges + 1
        return self._connected.channel.exchange(self._connected.rank, number, value)

    def train(self) -> None:
        """Train a step; all that take part have to be in the same one, with the same state."""
        membership = self._ctx.membership
        self._on_step_begin()
        self._read_statuses()
        self.step += 1
        self._cluster.clock.pause(STEP_S * self._cluster.clock.draw.random())
        state = (self.step, membership.generation, membership.members, self.optimizer.lr)
        found = self._exchange((membership.known_generation, membership.request, state))
        states = {one[2] for one in found.values()}
        assert len(states) == 1, f"ranks train unlike: {states}"
        self._unread.append((self.step, found))
        if membership.is_pending:
            known = [one[0] for one in found.values()]
            membership.put_into_force(known, lambda step: self.step)
        if self._cluster.clock.draw.random() < 0.5:
            self._read_statuses()
        self._after_step()

    def _read_statuses(self) -> None:
        for step, found in self._unread:
            for _, request, _ in found.values():
                if request:
                    self._ctx.membership.note_request(request, step)
        self._unread.clear()

    def gather_integers(self, values: list[int]) -> list[list[int]]:
        """Gather numbers of all members; as `MemberNumbers.gather_integers`."""
        membership = self._ctx.membership
        found = self._exchange((membership.known_generation, values))
        texts = {rank: own for rank, (_, own) in found.items()}
        while any(rank not in found for rank in membership.members):
            found = self._exchange((membership.known_generation, None))
            known = [one[0] for one in found.values()]
            membership.put_into_force(known, lambda step: self.step)
        return [texts[rank] for rank in membership.members]

    @property
    def ranks_each(self) -> int:
        """Each rank talks to the network by itself."""
        return 1

    @property
    def can_precopy(self) -> bool:
        """Whether members give their state before they let a rank in; the same on all."""
        return self._cluster.precopies

    def wait_for_all(self) -> None:
        """Wait for no update: there are none."""

    def begin_precopy(self, store: Any, plan: PrecopyPlan, look: Any) -> PrecopySource:
        """Begin to give state.

        Raises:
            RendezvousError: this rank cannot.
        """
        if self._cluster.clock.draw.random() < 0.05:
            raise RendezvousError("no memory is left")
        pair = self._cluster.precopy(plan.job)
        return PrecopySource(pair, self._ctx.membership.rank, self._cluster.clock.process)

    def connect_beside(self, world: JoinedWorld, precopy: object) -> Connected:
        """Connect in the world that a rank joins."""
        return self._cluster.connect_to_join(world)

    def close(self, timeout_s: float) -> None:
        """Say goodbye, and wait for those of the others."""
        clock, channel = self._cluster.clock, self._connected.channel
        channel.leave(self._connected.rank)
        end_s = clock.now_s + timeout_s
        while not channel.has_all_goodbyes() and clock.now_s < end_s:
            clock.pause(0.01)

    def for_more_ranks(self, ranks: int) -> dict[str, Any]:
        """Read residuals of owners with all members, of which some may be lost meanwhile."""
        self._exchange((self._ctx.membership.known_generation, None))
        return {}

    def moved_to(
        self,
        world: JoinedWorld,
        connected: Any,
        on_step_begin: Callable[[], None],
        residuals: Mapping[str, Any],
    ) -> Prepared:
        """Train in another world."""
        return Prepared(
            self._cluster, world.ctx, connected, self.optimizer, self.step, on_step_begin
        )


@dataclass
class PrecopyPairs:
    """What the donors of a pre-copy have done."""

    donors: dict[int, Process] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)


class PrecopySource:
    """A donor."""

    def __init__(self, pairs: PrecopyPairs, donor: int, process: Process) -> None:
        self._pairs, self._donor = pairs, donor
        pairs.donors[donor] = process

    def end(self) -> None:
        """Give what is there as the last."""
        self._pairs.ended.add(self._donor)

    def close(self, wait_s: float = 0.0) -> None:
        """Give up."""
        self._pairs.donors.pop(self._donor, None)


class PrecopyTarget:
    """The rank that joins; state arrives in a thread of its process."""

    def __init__(self, cluster: Cluster, plan: PrecopyPlan) -> None:
        self._clock, self._plan = cluster.clock, plan
        self._pairs = cluster.precopy(plan.job)
        self._failure = ""
        self._is_done = False
        self.is_ready = False
        self._clock.start(self._clock.process, self._run)

    def _run(self) -> None:
        end_s = self._clock.now_s + CONNECT_S
        while len(self._pairs.donors) < self._plan.donors and not self._failure:
            self._clock.pause(0.02)
            if self._clock.now_s > end_s:
                self._failure = "a donor did not come"
        rounds = self._clock.draw.randint(1, 100)
        # At times the last round takes longer than connecting may.
        last_s = 25.0 * (self._clock.draw.random() < 0.1)
        while not self._failure and len(self._pairs.ended) < self._plan.donors:
            self._clock.pause(0.02)
            rounds -= 1
            self.is_ready = rounds <= 0
            here = [one for one in self._pairs.donors.values() if not one.is_killed]
            if len(here) < self._plan.donors:
                self._failure = "a donor was lost"
        self.is_ready = True
        if not self._failure:
            self._clock.pause(last_s)
        self._is_done = True

    def finish(self, look: Callable[[], object]) -> dict[int, bytes]:
        """Wait until everything is here."""
        while not self._is_done:
            look()
            self._clock.pause(0.02)
        return {}

    def close(self, reason: str) -> None:
        """Give up."""
        self._failure = self._failure or reason
        while not self._is_done:
            self._clock.pause(0.02)


@dataclass(frozen=True)
class Context:
    """The parts of a session's context that joins use."""

    options: Options
    rank_info: RankInfo
    membership: Membership
    checkpoints: None = None
    deadlocks: Any = field(
        default_factory=lambda: SimpleNamespace(use_incarnation=lambda name: None)
    )
    observer: Any = field(default_factory=lambda: SimpleNamespace(use_rank_info=lambda info: None))


class Optimizer:
    """One whose rate the program changes after each step."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": [], "lr": 0}]

    @property
    def lr(self) -> int:
        """The number of steps that the program has ended."""
        return int(self.param_groups[0]["lr"])


class Cluster:
    """A training of some ranks that others join, of which some are killed."""

    def __init__(self, seed: int, *, members: int = 3, kills: int = 1) -> None:
        self.clock = Clock(seed)
        self.seed = seed
        self._number = next(_numbers)
        self.ends: list[tuple[int, tuple[int, ...], int]] = []
        """Generation, members and last step of each rank that has come to the end."""
        self.stop_step: int | None = None
        self.processes: list[Process] = []
        self.has_begun = False
        """Whether all members are connected: who dies before ends the start."""
        self.connecting = False
        """Whether ranks connect to one that joins, or have since the last one joined."""
        self.precopies = self.clock.draw.random() < 0.7
        """Whether members give their state before they let a rank in."""
        self.trained = self.clock.draw.randint(1, 4)
        """Number of trained tensors."""
        self.is_unreachable = False
        """Whether no rank that joins can be connected to."""
        self.tries = 0
        """How often a rank was invited that could not be connected to."""
        self._kills = kills
        self._joiners = 0
        self._precopies: dict[str, PrecopyPairs] = {}
        self._members = members
        self._values: dict[str, bytes] = {}
        self._channels: dict[str, Channel] = {}
        self._last_event_s = 0.0

    @staticmethod
    def nobody() -> Any:
        """Return the cluster of what is no process."""
        return SimpleNamespace(may_kill=lambda process: False)

    def may_kill(self, process: Process) -> bool:
        """Return whether one more process may be killed."""
        if self._kills == 0 or self.stop_step is not None or not self.has_begun:
            return False
        self._kills -= 1
        self._last_event_s = self.clock.now_s
        return True

    def run(self, limit_s: float = 200.0) -> None:
        """Run to the end."""
        for rank in range(self._members):
            process = self._process(f"member {rank}")
            self.clock.start(process, lambda rank=rank: self._member(rank))  # type: ignore[misc]
        for _ in range(self.clock.draw.choice((1, 1, 2))):
            self.start_joiner()
        self.clock.run(limit_s)

    def start_joiner(self) -> None:
        """Start a rank that wants to join, soon."""
        self._joiners += 1
        process = self._process(f"joiner {self._joiners}")
        self.clock.start(process, self._joiner, 2 * self.clock.draw.random())

    def _process(self, name: str) -> Process:
        draw = self.clock.draw
        joins_only = draw.random() < 0.6
        fatal = draw.randint(1, 120) if joins_only else int(10 ** draw.uniform(0.5, 3.3))
        fatal = fatal if draw.random() < 0.6 else 0
        process = Process(self, name, fatal, joins_only=joins_only)
        self.processes.append(process)
        return process

    def parts(self, rank: int, world_size: int) -> tuple[Context, VirtualStore, World, Any]:
        job = f"virtual-{self._number}"
        rank_info = RankInfo(rank, world_size, job, 0)
        ctx = Context(_OPTIONS, rank_info, Membership(rank_info))
        store = VirtualStore(self.clock, self._values)
        scopes = SessionScopes(store, rank_info, CONNECT_TIMEOUT_S, ctx.deadlocks, lambda: None)  # type: ignore[arg-type]
        return ctx, store, World(ctx, scopes), Optimizer()  # type: ignore[arg-type]

    def _member(self, rank: int) -> None:
        ctx, store, world, optimizer = self.parts(rank, self._members)
        channel = self._channel("start", ctx.rank_info)
        channel.open(rank, self.clock.process, ctx.membership)
        while not channel.are_connected():
            self.clock.pause(0.01)
        self.has_begun = True
        models: list[Any] = [Prepared(self, ctx, Connected(channel, rank, None), optimizer, 0)]
        joins = Joins(world, store, models, lambda: None)  # type: ignore[arg-type]
        joins.follow(models[0])
        self._train(world, models, joins, optimizer)

    def _joiner(self) -> None:
        _, store, world, optimizer = self.parts(0, 1)
        models: list[Any] = []
        joins = Joins(world, store, models, lambda: None)  # type: ignore[arg-type]
        try:
            joins.follow(joins.join(None, optimizer, True, "local"))  # type: ignore[arg-type]
        except RendezvousError:
            if not self.is_unreachable:
                raise
            self.clock.process.is_killed = True
            return
        self.connecting = False
        self._last_event_s = self.clock.now_s
        self._train(world, models, joins, optimizer)

    def _train(self, world: World, models: list[Any], joins: Joins, optimizer: Optimizer) -> None:
        process = self.clock.process
        process.has_trained = True
        while True:
            # All ranks come to a step that none of them has come to yet.
            step = models[0].step
            quiet_s = self.clock.now_s - self._last_event_s
            all_train = all(one.has_trained or one.is_killed for one in self.processes)
            if self.stop_step is None and all_train and quiet_s > 5.0:
                self.stop_step = step + STEPS_AFTER
            if self.stop_step is not None and step >= self.stop_step:
                break
            begun_s = self.clock.now_s
            models[0].train()
            process.longest_step_s = max(process.longest_step_s, self.clock.now_s - begun_s)
            optimizer.param_groups[0]["lr"] = models[0].step
        joins.close()
        self.ends.append((world.ctx.membership.generation, world.ctx.membership.members, step))

    def precopy(self, job: str) -> PrecopyPairs:
        """Return what the donors of a pre-copy have done."""
        return self._precopies.setdefault(job, PrecopyPairs())

    def precopy_target(self, ctx: Any, store: Any, plan: PrecopyPlan, *_: Any) -> PrecopyTarget:
        """Take state over from some members; as the class of that name."""
        return PrecopyTarget(self, plan)

    def connect_to_join(
        self, world: JoinedWorld, *_: Any, precopy: PrecopyTarget | None = None
    ) -> Connected:
        """Connect all ranks of a world, and hand the state over; as the function of that name."""
        ctx, rank = world.ctx, world.ctx.rank_info.rank
        if world.joins and self.is_unreachable:
            self.tries += 1
            raise RendezvousError("no member could be reached")
        self.connecting = True
        everyone = range(ctx.rank_info.world_size)
        scope = world.meet()
        scope.put(f"address/{rank}", "")
        scope.get_all({other: f"address/{other}" for other in everyone})
        channel = self._channel(scope.name, ctx.rank_info)
        channel.open(rank, self.clock.process, ctx.membership)
        connected = Connected(channel, rank, scope)
        try:
            end_s = self.clock.now_s + CONNECT_S
            while not channel.are_connected():
                if self.clock.now_s > end_s:
                    raise RendezvousError("a rank could not be reached")
                self.clock.pause(0.01)
            scope.put(f"opened/{rank}", "")
            scope.get_all({other: f"opened/{other}" for other in everyone})
            meeting = world.meet()
            meeting.mark_connected(CONNECT_TIMEOUT_S, lambda: world.look(connected))  # type: ignore[arg-type]
            if rank == 0:
                meeting.put("state", "")
            if world.joins:
                if precopy is not None:
                    precopy.finish(lambda: world.look(connected))  # type: ignore[arg-type]
                meeting.get("state", 0)
                meeting.put("held", "")
            else:
                meeting.get("held", everyone[-1])
            for _round in range(self.clock.draw.randint(1, 50)):
                self.clock.pause(0.02)
                world.look(connected)  # type: ignore[arg-type]
        except BaseException as error:
            connected.abort(str(error))
            raise
        return connected

    def _channel(self, name: str, rank_info: RankInfo) -> Channel:
        channel = Channel(self.clock, rank_info.job, rank_info.world_size)
        return self._channels.setdefault(name, channel)
