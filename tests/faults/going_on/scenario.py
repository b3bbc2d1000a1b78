"""Faults of a training that goes on: which ranks are lost, how, and at which moments.

The same seed draws the same scenario everywhere; nothing here depends on the machine.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from typing import Any

from tests.faults.scenario import (
    BEFORE_CONNECTED,
    IN_STEPS,
    JOINING,
    NETWORK_FAULTS,
    PREPARING,
    PROGRESS_TIMEOUT_S,
    SIGNALS,
    SILENCE_TIMEOUT_S,
    Training,
)

STEPS = 24
CHECKPOINT_EVERY = 4
CONNECT_TIMEOUT_S = 40.0
"""Ranks have to come to their moment first, on a busy machine too."""
STARTING_CONNECT_TIMEOUT_S = 20.0
STARTING_PROGRESS_TIMEOUT_S = 900.0
"""As by default longer than the bound: nobody is to wait so long for a rank that is lost."""
TRAININGS = {
    name: Training({"strategy": name, "going_on": True, "lanes": lanes})
    for name, lanes in (("p3", 2), ("slicing", 3), ("wfbp", 1))
}
MOMENTS = (*BEFORE_CONNECTED, "restore", *IN_STEPS, "checkpoint", "close")
_MOMENT_WEIGHTS = (1, 1, 1, 2, *(3,) * len(IN_STEPS), 6, 3)
FAULTS = ("kill", "kill the group", "stop", "cut", "partition")
_WEIGHTS = (8, 3, 4, 4, 2)
OF_LINKS = ("partition", "hang up", "garble")
"""Faults between two ranks: no packet passes; or of their connection, which is shut down, or gets a
byte that none of them has sent."""
_SECOND_FAULTS = ("kill", "stop", "cut")
AFTER = ("the first", "agreement", "the change")
"""What a second fault follows: the first one, new members agreed on, or their coming into force."""


@dataclass(frozen=True)
class Second:
    """A fault that follows another one, in the middle of the change that the first one causes.

    Attributes:
        fault: one of `FAULTS`.
        victim: rank at fault.
        after: one of `AFTER`.
        delay_s: seconds that pass first.
    """

    fault: str
    victim: int
    after: str
    delay_s: float


@dataclass(frozen=True)
class GoingOnScenario:
    """One or two faults; see `tests.faults.scenario.Scenario`.

    Attributes:
        seed: what it was drawn from.
        training: key of `TRAININGS`.
        world_size: number of ranks.
        fault: one of `FAULTS`.
        moment: one of `MOMENTS`.
        victims: the rank at fault; of `OF_LINKS`, both ends.
        announcer: the rank whose program reaches the moment.
        step: training step of the moment.
        delay_ms: time from the moment to the fault while the announcer goes on; None: the announcer
            stands still until the fault is there.
        call: number of the file operation of a checkpoint that the fault hits.
        second: another fault, or None.
        asks_at: step at whose end one more rank, with the next number, asks to join; None: none
            does.
        local_size: ranks of a node, which are lost together.
        loads: whether another process of each rank loads its batches.
        namespaces: whether every rank has a network namespace of its own, else loopback.
    """

    seed: int
    training: str
    world_size: int
    fault: str
    moment: str
    victims: tuple[int, ...]
    announcer: int
    step: int
    delay_ms: float | None
    call: int
    second: Second | None
    loads: bool
    namespaces: bool
    asks_at: int | None = None
    local_size: int = 1
    agent: bool = True
    """A process that outlives all ranks hosts the store."""
    listener: str = ""
    starting: bool = False
    """Whether it was drawn by `starting`."""

    @property
    def kind(self) -> Training:
        """Return the training's options."""
        return replace(TRAININGS[self.training], local_size=self.local_size)

    @property
    def connect_timeout_s(self) -> float:
        """Return the ranks' option."""
        return STARTING_CONNECT_TIMEOUT_S if self.starting else CONNECT_TIMEOUT_S

    @property
    def progress_timeout_s(self) -> float:
        """Return the ranks' option."""
        return STARTING_PROGRESS_TIMEOUT_S if self.starting else PROGRESS_TIMEOUT_S

    @property
    def processes(self) -> int:
        """Return the number of ranks, with one that joins."""
        return self.world_size + (self.asks_at is not None)

    @property
    def faults(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return each fault with its victims."""
        second = [] if self.second is None else [(self.second.fault, (self.second.victim,))]
        return [(self.fault, self.victims), *second]

    @property
    def silenced(self) -> tuple[int, ...]:
        """Return the ranks whose processes are killed or stopped."""
        return tuple(rank for fault, victims in self.faults if fault in SIGNALS for rank in victims)

    @property
    def lost(self) -> tuple[int, ...]:
        """Return the ranks that the others go on without: of a cut link, the higher end; with each
        those of its node."""
        return tuple(
            rank
            for fault, victims in self.faults
            for victim in (victims[1:] if fault in OF_LINKS else victims)
            for rank in range(
                self.node_of(victim) * self.local_size,
                (self.node_of(victim) + 1) * self.local_size,
            )
        )

    @property
    def survivors(self) -> list[int]:
        """Return the ranks that are left."""
        return [rank for rank in range(self.processes) if rank not in self.lost]

    @property
    def must_go_on(self) -> bool:
        """Return whether those that are left have to go on.

        Before training has begun only rank 0 has its values, and of ranks that are not connected
        yet none goes on. A majority has to be left, or half: the store then decides for it. A rank
        that joins may be there by then, or not.
        """
        if self.moment in (*BEFORE_CONNECTED, *PREPARING):
            return False
        if (self.moment == "restore" or self.step == 1) and 0 in self.lost:
            return False
        left = self.survivors
        there_before = [rank for rank in left if rank < self.world_size]
        return 2 * len(there_before) >= self.world_size and 2 * len(left) >= self.processes

    def node_of(self, rank: int) -> int:
        """Return the node that a rank is on."""
        return rank // self.local_size

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)

    def __str__(self) -> str:
        """Say what happens, in one line."""
        who = " and ".join(map(str, self.victims))
        when = self.moment
        if when not in (*BEFORE_CONNECTED, *JOINING):
            when += f" of {self.step}"
        later = "" if self.delay_ms is None else f" + {self.delay_ms:.0f} ms"
        second = ""
        if (one := self.second) is not None:
            second = f"; {one.fault}: {one.victim}, {one.delay_s * 1e3:.0f} ms after {one.after}"
        loads = ", loading processes" if self.loads else ""
        joins = "" if self.asks_at is None else f", {self.world_size} asks at {self.asks_at}"
        return (
            f"{self.fault}: {who}, {when}{later}{second}; {self.training} on {self.world_size}"
            f"{joins}{loads}{f', {self.local_size} a node' if self.local_size > 1 else ''}"
        )


def draw(seed: int, local_size: int = 1) -> GoingOnScenario:
    """Draw a scenario; in about three of eight a rank joins, unless nodes have several."""
    if local_size == 1:
        return _with_joins(_draw_faults(seed))
    return _on_nodes(_draw_faults(seed), local_size)


def _on_nodes(scenario: GoingOnScenario, local_size: int) -> GoingOnScenario:
    """Return a scenario with nodes in place of its ranks, of each of which one can be at fault."""
    random_ = random.Random(f"nodes {scenario.seed}")
    rank_of = [
        node * local_size + random_.randrange(local_size) for node in range(scenario.world_size)
    ]
    second = scenario.second
    if second is not None:
        second = replace(second, victim=rank_of[second.victim])
    return replace(
        scenario,
        world_size=local_size * scenario.world_size,
        victims=tuple(rank_of[victim] for victim in scenario.victims),
        announcer=rank_of[scenario.announcer],
        second=second,
        local_size=local_size,
    )


def _with_joins(scenario: GoingOnScenario) -> GoingOnScenario:
    """Return a scenario, or one in which a rank joins as well, and the fault may be around that."""
    random_ = random.Random(f"joining {scenario.seed}")
    if scenario.moment in (*BEFORE_CONNECTED, "restore") or random_.random() > 0.5:
        return scenario
    joined = replace(scenario, asks_at=random_.randrange(1, 10))
    joins = scenario.fault != "partition" and random_.random() < 0.4
    if joins:
        # The rank that joins is the victim.
        rank = scenario.world_size
        joined = replace(joined, victims=(rank,), announcer=rank)
    if random_.random() < 0.7:
        moment = random_.choice(JOINING)
        # Where nobody comes by, the fault is at the end.
        joined = replace(joined, moment=moment, step=STEPS - 4)
    return joined


def _draw_faults(seed: int) -> GoingOnScenario:
    # Another one than `tests.faults.scenario` draws from this seed.
    random_ = random.Random(f"going on {seed}")
    fault = random_.choices(FAULTS, _WEIGHTS)[0]
    # A partition of two ranks is a cut of one.
    world_size = random_.choice((3, 4, 4) if fault == "partition" else (2, 3, 3, 4, 4, 4, 5))
    moment = random_.choices(MOMENTS, _MOMENT_WEIGHTS)[0]
    victim = 0 if random_.random() < 0.5 else random_.randrange(1, world_size)
    others = [rank for rank in range(world_size) if rank != victim]
    victims: tuple[int, ...] = (victim,)
    if fault == "partition":
        victims = tuple(sorted((victim, random_.choice(others))))
    second = None
    if fault != "partition" and world_size > 2 and moment not in BEFORE_CONNECTED:
        second = _draw_second(random_, fault, others) if random_.random() < 0.4 else None
    step = random_.randrange(2, 14)
    if moment == "checkpoint":
        step += -step % CHECKPOINT_EVERY
    if moment == "close":
        step = STEPS
    exact = moment in ("start", "checkpoint") or random_.random() < 0.5
    faults = {fault} | ({second.fault} if second else set())
    return GoingOnScenario(
        seed=seed,
        training=random_.choice(list(TRAININGS)),
        world_size=world_size,
        fault=fault,
        moment=moment,
        victims=victims,
        announcer=victim,
        step=step,
        delay_ms=None if exact else random_.choice((2.0, 6.0, 20.0, 60.0)) * random_.random(),
        call=random_.randrange(14 if victim == 0 else 6),
        second=second,
        loads=random_.random() < 0.2,
        namespaces=bool(faults & set(NETWORK_FAULTS)),
    )


def _draw_second(random_: random.Random, first: str, others: list[int]) -> Second:
    """Draw a fault that comes while ranks agree on new members, or just behind."""
    after = random_.choice(AFTER)
    delay_s = random_.choice((0.005, 0.03, 0.2)) * random_.random()
    if after == "the first" and first in ("stop", "cut"):
        # Ranks agree once they have noticed the silence.
        delay_s += SILENCE_TIMEOUT_S - 0.1
    return Second(random_.choice(_SECOND_FAULTS), random_.choice(others), after, delay_s)
