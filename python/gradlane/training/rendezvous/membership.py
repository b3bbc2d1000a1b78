"""The ranks that train: all at first, then those that are left after a loss or have joined.

The core agrees on the next members, and finishes the step that was under way. The program must not
see its rank change in the middle of a step, nor in another step than the other ranks. So each rank
tells in its status of a step which members it knows (`model/consistency_check.py`). New members
take effect at the end of the first step in which every rank's status names them.

A rank that joins makes a new world, with connections of its own and ranks that are numbered anew
(`session/joining.py`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gradlane.errors import RendezvousError, SessionFailedError, UsageError
from gradlane.training.core import Channel, CoreModule
from gradlane.training.log import log
from gradlane.training.rendezvous.environment import RankInfo

if TYPE_CHECKING:  # Metrics know members, and need no torch.
    from gradlane.training.rendezvous.half_register import HalfRegister
    from gradlane.training.rendezvous.rendezvous import RendezvousScope


@dataclass(frozen=True)
class MembershipChange:
    """New members of a session, as `Session.on_membership` tells them.

    Attributes:
        generation: number of the membership; 0 was that of the start.
        rank: this rank's place among the members.
        world_size: number of members.
        members: the ranks that go on, by the numbers that they had at the start, or when the last
            rank joined; their places in this list are their ranks from now on.
        lost: ranks that were members before and are none now, by the same numbers.
        joined: ranks that are members now and were none before; all are numbered anew then.
        step: the first training step whose means are all over the members. Where ranks were lost,
            it was in the step before: each of its slices is the mean over the ranks of before, or
            over these.
        reason: which ranks were lost or joined, and why; the same on every rank.
    """

    generation: int
    rank: int
    world_size: int
    members: tuple[int, ...]
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    step: int
    reason: str


@dataclass(frozen=True)
class LostRank:
    """A rank that training has gone on without.

    Attributes:
        rank: its number of the start, or of when the last rank had joined.
        step: the latest training step that a member was in; while the change is not in force,
            as far as this rank knows, afterwards the same on every rank.
        reason: of the change in which it was left out.
    """

    rank: int
    step: int
    reason: str


@dataclass(frozen=True)
class _Agreed:
    """Members that the core has agreed on; `step` is the channel's."""

    members: tuple[int, ...]
    step: int
    reason: str


@dataclass(frozen=True)
class JoinedRank:
    """A rank that has joined.

    Attributes:
        rank: its number.
        step: the first training step that it took part in.
    """

    rank: int
    step: int


class Membership:
    """The members of a session, as its program sees them, and those that will be next.

    Only the thread of the program changes the members; another one learns of the next.
    """

    def __init__(self, rank_info: RankInfo) -> None:
        """Begin with all ranks that train, of which `rank_info` is one."""
        self._own = rank_info.rank
        self.on_event: Callable[[str, str], None] = lambda text, level: None
        """Called, also in another thread, with what has happened, and `warning`."""
        self._known: dict[int, _Agreed] = {}
        self.generation = 0
        """Number of the membership that is in force."""
        self.known_generation = 0
        """Number of the newest membership that this rank has heard of."""
        self.members = tuple(range(rank_info.world_size))
        """The ranks that train, by their numbers of the start."""
        self.lost: tuple[LostRank, ...] = ()
        """Ranks that training has gone on without, the first one first."""
        self.joined: tuple[JoinedRank, ...] = ()
        """Ranks that have joined, the first one first; no earlier ones than this rank."""
        self.request = 0
        """Number of a call to let a rank join that this rank makes; 0: none."""
        self._noted: tuple[int, int] | None = None
        """Number of a call that all ranks have heard of, and in which training step."""
        self.answered = 0
        """Number of the last call that was answered."""
        self.training_step_of: Callable[[int], int] = lambda step: step
        """Turns a step of the channel in force into one of training."""
        self._world = rank_info.job
        """Name of the world whose connections are in force."""
        self._numbers = {rank_info.job: {number: number for number in self.members}}
        """By world: the numbers that its ranks have in the one in force, by those there."""
        self._registers: dict[str, HalfRegister] = {}
        """By the name of the place where the ranks of a channel agree."""
        self._early: list[tuple[str, int, tuple[int, ...], int, str]] = []
        """Changes in worlds that are not in force yet, with their names."""
        # Listeners of what has happened may ask.
        self._lock = threading.RLock()
        self._opened_with = 0
        """Generation of the members that the connections were opened with."""
        self.listeners: list[Callable[[MembershipChange], object]] = []
        """Called with each change that comes into force, on the thread of the program."""

    @property
    def rank(self) -> int:
        """This rank's place among the members; that of the start on a rank that only serves."""
        # Other threads ask while the program's puts new members into force.
        with self._lock:
            own, members = self._own, self.members
        return members.index(own) if own in members else own

    @property
    def world_size(self) -> int:
        """Number of members."""
        return len(self.members)

    @property
    def lacks_ranks(self) -> bool:
        """Whether ranks of the connections that are open were lost."""
        return self.known_generation > self._opened_with

    def refuse_lost(self, call: str) -> None:
        """Refuse a collective call that needs all connected ranks, once one was lost.

        Raises:
            UsageError: one was.
        """
        if self.lacks_ranks:
            raise UsageError(
                f"session.{call} after rank {self.lost[-1].rank} was lost: it needs the "
                "lost rank, too; call it before, or use gather_integers()"
            )

    @property
    def leads(self) -> bool:
        """Whether this is the first member, whose buffers all have."""
        return self.rank == 0

    @property
    def is_pending(self) -> bool:
        """Whether this rank has heard of members that are not in force yet."""
        return self.known_generation > self.generation

    @property
    def _newest(self) -> _Agreed:
        """The newest members that this rank has heard of."""
        agreed = self._known.get(self.known_generation)
        return _Agreed(self.members, 0, "it was lost before") if agreed is None else agreed

    @property
    def _newest_members(self) -> tuple[int, ...]:
        return self._newest.members

    def has_lost(self, number: int, world: str) -> bool:
        """Return whether training goes on without a rank, as far as this one has heard.

        Args:
            number: of the rank in a world that this rank is in, or was before others joined.
            world: its name.
        """
        with self._lock:
            return self._numbers[world].get(number) not in self._newest_members

    def loss_of(self, number: int, world: str) -> str | None:
        """Return why training goes on without a rank of a world; None: as far as known, it is in.

        Args:
            number: of the rank in a world that is in force, was before, or is being connected.
            world: its name.
        """
        with self._lock:
            if world in self._numbers:
                if not self.has_lost(number, world):
                    return None
                # Others may have been lost since, for want of this one.
                now = self._numbers[world].get(number)
                of_rank = (one.reason for one in reversed(self.lost) if one.rank == now)
                return next(of_rank, self._newest.reason)
            early = (one for one in reversed(self._early) if one[0] == world)
            _, _, members, _, reason = next(early, ("", 0, (number,), 0, ""))
            return None if number in members else reason

    def follow(
        self,
        core: CoreModule,
        channel: Channel,
        scope: RendezvousScope,
        register: HalfRegister,
    ) -> None:
        """Learn of changes on a channel from now on, in a thread that ends with it.

        Args:
            core: where the channel's errors come from.
            channel: tells the changes.
            scope: of the channel.
            register: of its world, which decides in it where exactly half of the ranks are left.
        """
        world = scope.rank_info.job
        self._registers[scope.name] = register
        left = scope.rank_info.world_size

        def run() -> None:
            nonlocal left
            try:
                while True:
                    for kind, generation, members, step, text in channel.next_changes(wait=True):
                        if kind == "claim":
                            channel.answer_claim(
                                generation, self._claim(register, generation, text)
                            )
                            continue
                        self.hear(world, generation, tuple(members), step, text)
                        if 2 * len(members) <= left:
                            # The register has decided.
                            register.watch(generation, channel.abort)
                        left = len(members)
            except core.ChannelError:
                return  # The session is over; its waits raise the reason.
            finally:
                register.close()

        threading.Thread(target=run, name="gradlane-members", daemon=True).start()

    def _claim(self, register: HalfRegister, generation: int, value: str) -> str | None:
        """Return what the job's store holds for a generation: this value if it held none."""
        try:
            return register.claim(generation, value)
        except RendezvousError as error:
            self._say(
                f"{error}: half of the ranks are left, and the store alone could tell whether "
                "the other half goes on"
            )
            return None

    def leave_register(self, name: str) -> None:
        """Check for the last time that no other half of a channel's ranks goes on as this one does.

        Call it before the channel's keys, of which the register is one, are deleted.

        Args:
            name: of the place where its ranks agree.

        Raises:
            RendezvousError: one does, or the store was changed.
        """
        register = self._registers.pop(name, None)
        if register is not None:
            register.close()
            register.check()

    def hear(
        self, world: str, change: int, members: tuple[int, ...], step: int, reason: str
    ) -> None:
        """Note a change of the members of a world, once that world is in force.

        Args:
            world: its name.
            change: number of the change among those of the world, from 1 on.
            members: the ranks that are left, by their numbers in the world.
            step: of the world's channel, in which ranks were lost.
            reason: which ranks were lost, and why.
        """
        with self._lock:
            if world != self._world:
                self._early.append((world, change, members, step, reason))
            else:
                self.note(self._opened_with + change, members, step, reason)

    def check_complete(self) -> None:
        """Check that no rank of the open connections was lost.

        Raises:
            SessionFailedError: a rank was lost.
        """
        with self._lock:
            if self.lacks_ranks:
                raise SessionFailedError(
                    f"{self._known[self.known_generation].reason}, while all ranks were to agree: "
                    "the ranks that are left train on, but open no new connections; restart from "
                    "the last checkpoint"
                )

    def check_unchanged(self, world: str) -> None:
        """Check that no rank was lost of a world that is not in force yet.

        Args:
            world: its name.

        Raises:
            SessionFailedError: one was.
        """
        with self._lock:
            for one, _, _, _, reason in self._early:
                if one == world:
                    raise SessionFailedError(f"while a rank joined, {reason}", None)

    def note(self, generation: int, members: tuple[int, ...], step: int, reason: str) -> None:
        """Note members that the core has agreed on, and say so.

        Args:
            generation: number of the membership.
            members: by their numbers of the start.
            step: the channel's latest step that a member was in.
            reason: which ranks were lost, and why.
        """
        before = self._newest_members
        self._known[generation] = _Agreed(members, step, reason)
        gone = [rank for rank in before if rank not in members]
        last = self.training_step_of(step)
        self.lost += tuple(LostRank(rank, last, reason) for rank in gone)
        # Last: readers that see the number look for its members.
        self.known_generation = generation
        self._say(
            f"training goes on without rank {', '.join(map(str, gone))}: {reason} (step {last}, "
            f"{len(members)} of {len(before)} ranks go on: {', '.join(map(str, members))})"
        )

    def put_into_force(
        self, known: Iterable[int], training_step_of: Callable[[int], int], *, tells: bool = True
    ) -> None:
        """Put a membership into force, unless it is; all ranks do it at the end of the same step.

        A rank may never hear of a membership that another one follows at once. So one comes into
        force only where it was the newest on all ranks.

        Args:
            known: numbers of the newest memberships that the ranks of a step knew.
            training_step_of: turns a step of the channel into one of training.
            tells: whether listeners are called: not where no step follows.
        """
        generation, *others = set(known)
        if others or generation <= self.generation:
            return
        agreed, before = self._known[generation], self.members
        last = training_step_of(agreed.step)
        with self._lock:
            # A rank may have heard of a loss in another change, or before it counted a step that
            # was none of training; now all have ended the same ones.
            pending = len(before) - len(self._newest_members)
            told = len(self.lost) - pending
            self.lost = self.lost[:told] + tuple(
                one if one.rank in agreed.members else replace(one, step=last)
                for one in self.lost[told:]
            )
        self.generation, self.members = generation, agreed.members
        if not tells:
            return
        self.tell(
            MembershipChange(
                generation=generation,
                rank=self.rank,
                world_size=self.world_size,
                members=self.members,
                lost=tuple(rank for rank in before if rank not in self.members),
                joined=(),
                step=last + 1,
                reason=agreed.reason,
            )
        )

    def note_request(self, number: int, step: int) -> None:
        """Note a call to let a rank join, which all ranks hear of in a training step's statuses."""
        if number > self.answered and self._noted is None:
            self._noted = number, step

    def due_request(self, step: int) -> int | None:
        """Return the number of a call that is answered after a training step; None: no call.

        Statuses of a step are read at the latest as the next one begins. So all ranks that end the
        step after it have heard of the call.
        """
        return self._noted[0] if self._noted is not None and self._noted[1] < step else None

    def forget_request(self, number: int) -> None:
        """Note that a call was answered; all ranks do it at the end of the same step."""
        self.answered = max(self.answered, number)
        self._noted = None
        self.request = 0

    def open_with(
        self, rank_info: RankInfo, generation: int, step: int, reason: str
    ) -> MembershipChange:
        """Put the members of a new world into force, of which the last one has joined.

        Args:
            rank_info: this rank there.
            generation: number of the membership.
            step: the first training step of all of them.
            reason: which rank has joined.

        Returns:
            The change, of which the listeners are not told yet.
        """
        rank, world_size = rank_info.rank, rank_info.world_size
        with self._lock:
            # Those that the old world has lost at its end are lost in the new one, by new numbers.
            pending = len(self.members) - len(self._newest_members)
            self.lost = self.lost[: len(self.lost) - pending]
            places = {number: place for place, number in enumerate(self.members)}
            self._numbers = {
                world: {old: places[now] for old, now in numbers.items() if now in places}
                for world, numbers in self._numbers.items()
            }
            self._world = rank_info.job
            self._own, self.members, self._known = rank, tuple(range(world_size)), {}
            self._numbers[self._world] = {number: number for number in self.members}
            self.generation = self.known_generation = self._opened_with = generation
            self.joined += (JoinedRank(world_size - 1, step),)
            self._say(f"{reason}: {world_size} ranks train from step {step} on", logging.INFO)
            self.training_step_of = lambda channel_step: step - 1 + channel_step
            early, self._early = self._early, []
            for world, number, members, channel_step, why in early:
                if world == rank_info.job:
                    self.note(generation + number, members, channel_step, why)
        return MembershipChange(
            generation=generation,
            rank=rank,
            world_size=world_size,
            members=self.members,
            lost=(),
            joined=(world_size - 1,),
            step=step,
            reason=reason,
        )

    def tell(self, change: MembershipChange) -> None:
        """Call the listeners with a change that has come into force."""
        for listener in tuple(self.listeners):
            listener(change)

    def _say(self, text: str, level: int = logging.WARNING) -> None:
        log.log(level, "rank %d: %s", self._own, text)
        self.on_event(text, logging.getLevelName(level).lower())
