"""A fault drawn from a seed: which training, at which moment, what happens, and to which rank.

The same seed draws the same scenario everywhere; nothing here depends on the machine.
"""

from __future__ import annotations

import random
import signal
from dataclasses import asdict, dataclass
from typing import Any

CHECKPOINT_EVERY = 2
CONNECT_TIMEOUT_S = 8.0
SILENCE_TIMEOUT_S = 4.0
PROGRESS_TIMEOUT_S = 16.0
"""As by default well above the store's response time, which is 6 s here: the rank that waits for a
frozen store is to say so before others have waited too long for that rank."""
CLOSE_TIMEOUT_S = 16.0
REFERENCE_STEPS = 16
"""Steps of an undisturbed run: no faulted run and no restart goes further."""
STEPS_AFTER_START = 8
STEPS_AFTER_RESTART = 4
"""Past whatever checkpoint was being written, so that its files are cleared away."""


@dataclass(frozen=True)
class Training:
    """Options of `gradlane.init`, and the world sizes that they go with.

    Attributes:
        options: arguments of `gradlane.init`.
        worlds: numbers of ranks, those that only serve included.
        local_size: ranks of a node.
        serving: number of ranks that only serve.
        resumes_bits: whether a restart goes on with the bits of an undisturbed run. The random
            rounding of a codec follows from the steps since the start.
    """

    options: dict[str, Any]
    worlds: tuple[int, ...] = (2, 3, 4)
    local_size: int = 1
    serving: int = 0
    resumes_bits: bool = True


TRAININGS = {
    "p3": Training({}),
    "p3, update on servers": Training({"update": "server"}),
    "two servers": Training({"servers": 2}, worlds=(3, 4)),
    "ring": Training({"strategy": "ring", "lanes": 2}),
    "wfbp": Training({"strategy": "wfbp", "lanes": 3}),
    "deferred-pull": Training({"strategy": "deferred-pull"}),
    "bf16": Training({"codec": "bf16", "lanes": 2}),
    "qsgd": Training({"codec": "qsgd:bits=8"}, worlds=(2, 3), resumes_bits=False),
    "onebit": Training({"codec": "onebit:bucket=64"}, worlds=(2, 4)),
    "factors": Training({"scheme": "sfb"}, worlds=(2, 3)),
    "local leader": Training({"local": "leader"}, worlds=(2, 4), local_size=2),
    "local shared": Training({"local": "shared"}, worlds=(4,), local_size=2),
    "separate server": Training({"codec": "bf16"}, worlds=(3, 4), serving=1),
}

BEFORE_CONNECTED = ("start", "rendezvous", "connecting")
PREPARING = ("prepare", "checking", "spreading")
"""Before `prepare()`, as it compares settings, and as it spreads rank 0's values."""
IN_STEPS = ("forward", "backward", "pushing", "waiting", "update", "broadcast")
JOINING = ("asking", "handing over", "deciding", "moving", "joined")
"""Moments of a rank that joins a training, and of those that let it in."""
MOMENTS = (*BEFORE_CONNECTED, "restore", *IN_STEPS, "checkpoint", "close")
FAULTS = ("kill", "stop", "raise", "cut", "partition", "freeze the store", "silent listener")
_WEIGHTS = (6, 4, 4, 4, 3, 2, 1)
NETWORK_FAULTS = ("cut", "partition")
SIGNALS = {
    "kill": signal.SIGKILL,
    "kill the group": signal.SIGKILL,
    "stop": signal.SIGSTOP,
}
"""Of the faults that silence a process."""
LISTENERS = ("silent", "hangs up", "speaks HTTP")
_NOT_RAISED_IN = ("connecting", "restore", "waiting", "update", "broadcast")
"""Moments inside the engine, where no user code runs that could raise."""


@dataclass(frozen=True)
class Scenario:
    """One fault.

    Attributes:
        seed: what it was drawn from.
        training: key of `TRAININGS`.
        world_size: number of ranks, those that only serve included.
        fault: one of `FAULTS`.
        moment: one of `MOMENTS`.
        victims: ranks at fault; of a partition, both ends; none when the store is.
        announcer: the rank whose program reaches the moment.
        start_step: step of the checkpoint that the training goes on from, 0 for none.
        step: training step of the moment.
        delay_ms: time from the moment to the fault while the announcer goes on; None: the announcer
            stands still until the fault is there.
        call: number of the file operation of a checkpoint that the fault hits.
        namespaces: whether every node has a network namespace of its own, else loopback.
        agent: whether a process of its own hosts the store, as torchrun's agent does.
        listener: what listens on MASTER_PORT in place of a store, one of `LISTENERS`, or "".
    """

    seed: int
    training: str
    world_size: int
    fault: str
    moment: str
    victims: tuple[int, ...]
    announcer: int
    start_step: int
    step: int
    delay_ms: float | None
    call: int
    namespaces: bool
    agent: bool
    listener: str

    @property
    def kind(self) -> Training:
        """Return the training's options."""
        return TRAININGS[self.training]

    @property
    def workers(self) -> int:
        """Return the number of ranks that train."""
        return self.world_size - self.kind.serving

    @property
    def last_step(self) -> int:
        """Return the step after which the program closes its session."""
        return self.start_step + STEPS_AFTER_START

    @property
    def hides_link(self) -> bool:
        """Return whether a partition keeps a rank from the store before anyone can hear of it."""
        return self.moment in BEFORE_CONNECTED and 0 in self.victims and not self.agent

    @property
    def silenced(self) -> tuple[int, ...]:
        """Return the ranks whose processes are killed or stopped."""
        return self.victims if self.fault in SIGNALS else ()

    def node_of(self, rank: int) -> int:
        """Return the node that a rank is on."""
        return rank // self.kind.local_size

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)

    def __str__(self) -> str:
        """Say what happens, in one line."""
        who = {
            "partition": "ranks " + " and ".join(map(str, self.victims)),
            "freeze the store": "the store's host",
            "silent listener": f"MASTER_PORT {self.listener}",
        }.get(self.fault, "rank " + ", ".join(map(str, self.victims)))
        when = self.moment if self.moment in BEFORE_CONNECTED else f"{self.moment} of {self.step}"
        later = "" if self.delay_ms is None else f" + {self.delay_ms:.0f} ms"
        return f"{self.fault}: {who}, {when}{later}, {self.training} on {self.world_size}"


def draw(seed: int) -> Scenario:
    """Draw a scenario."""
    random_ = random.Random(seed)
    fault = random_.choices(FAULTS, _WEIGHTS)[0]
    names = list(TRAININGS)
    if fault == "partition":
        # The nodes of a pair are cut from each other, so each rank has a node of its own.
        names = [name for name in names if TRAININGS[name].local_size == 1]
    training = random_.choice(names)
    kind = TRAININGS[training]
    # A cut of the only node would hit nobody, and a partition of two ranks is such a cut.
    least = {"cut": 2 * kind.local_size, "partition": 3}.get(fault, 2)
    world_size = random_.choice([world for world in kind.worlds if world >= least])
    moments = _moments(fault)
    moment = random_.choice(moments)
    workers = world_size - kind.serving
    eligible = workers if fault == "raise" else world_size
    # Rank 0 hosts the store and decides for all: it is hit as often as all others together.
    victim = 0 if random_.random() < 0.5 else random_.randrange(1, eligible) if eligible > 1 else 0
    other = random_.choice([rank for rank in range(world_size) if rank != victim])
    node = victim // kind.local_size
    victims: dict[str, tuple[int, ...]] = {
        "cut": tuple(range(node * kind.local_size, (node + 1) * kind.local_size)),
        "partition": tuple(sorted((victim, other))),
        "freeze the store": (),
        "silent listener": (),
    }
    # A rank that only serves goes through no step, so a rank that trains says when it is in one.
    serves = victim >= workers and moment != "start"
    announcer = random_.randrange(workers) if serves or fault == "freeze the store" else victim
    start_step = random_.choice((2, 4) if moment == "restore" else (0, 0, 2, 4))
    step = start_step + random_.randrange(2, 6)
    if moment == "checkpoint":
        step += step % CHECKPOINT_EVERY
    if moment == "close":
        step = start_step + STEPS_AFTER_START
    exact = fault == "raise" or moment in ("start", "checkpoint") or random_.random() < 0.5
    if moment in ("update", "broadcast") and kind.options.get("update") == "server":
        exact = False
    delay_ms = None if exact else random_.choice((2.0, 6.0, 20.0)) * random_.random()
    return Scenario(
        seed=seed,
        training=training,
        world_size=world_size,
        fault=fault,
        moment=moment,
        victims=victims.get(fault, (victim,)),
        announcer=announcer,
        start_step=start_step,
        step=step,
        delay_ms=delay_ms,
        call=random_.randrange(14 if announcer == 0 else 6),
        namespaces=fault in NETWORK_FAULTS or (fault == "freeze the store" and seed % 2 == 1),
        agent=fault == "freeze the store" or random_.random() < 0.2,
        listener=random_.choice(LISTENERS) if fault == "silent listener" else "",
    )


def _moments(fault: str) -> tuple[str, ...]:
    if fault == "silent listener":
        return ("start",)
    if fault == "freeze the store":
        return (*BEFORE_CONNECTED, "restore", "forward", "waiting", "checkpoint", "close")
    if fault == "raise":
        return tuple(moment for moment in MOMENTS if moment not in _NOT_RAISED_IN)
    return MOMENTS
