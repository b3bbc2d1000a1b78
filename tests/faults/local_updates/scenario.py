"""Faults of ranks that train by themselves: which ranks are lost, how, and when.

The same seed draws the same scenario everywhere; nothing here depends on the machine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from tests.faults.going_on.scenario import AFTER, GoingOnScenario, Second
from tests.faults.scenario import (
    IN_STEPS,
    NETWORK_FAULTS,
    PREPARING,
    SILENCE_TIMEOUT_S,
    Training,
)

STEPS = 30
FAULTS = ("kill", "stop", "cut", "partition", "raise")
_WEIGHTS = (8, 3, 3, 2, 5)
_SECOND_FAULTS = ("kill", "stop", "cut")
_SECOND_WEIGHTS = (4, 1, 1)
EXCHANGING = ("exchange", "sent", "synchronize")
"""Before a rank sends its differences, right after, and before it meets the others."""
MOMENTS = (*PREPARING, *IN_STEPS, *EXCHANGING, "close")
_MOMENT_WEIGHTS = (1, 1, 1, 2, 2, 2, 4, 2, 4, 4, 6, 3, 3)
_NOT_RAISED_IN = ("checking", "spreading", "waiting", "update", "broadcast", "exchange", "sent")
"""Moments inside the engine, where no user code runs that could raise."""
CODECS = (None, None, None, "bf16", "qsgd:bits=8", "onebit:bucket=64", "topk:ratio=0.1,bits=4")
_STRATEGIES = ("p3", "slicing", "wfbp")


@dataclass(frozen=True)
class LocalScenario(GoingOnScenario):
    """One or two faults of a training with local updates; see `GoingOnScenario`.

    Attributes:
        update: of `gradlane.Local`.
        codec: for the differences.
        lanes: number of connections to each rank.
        meets_at: step after which all ranks call `session.synchronize()`; 0: none does.
        gathers: whether they gather integers, and read the state, in callbacks and every 4 steps.
    """

    update: dict[str, Any] = field(default_factory=dict)
    codec: str | None = None
    lanes: int = 1
    meets_at: int = 0
    gathers: bool = False

    @property
    def kind(self) -> Training:
        """Return the training's options."""
        options = {"strategy": self.training, "going_on": True, "lanes": self.lanes}
        return Training({**options, "codec": self.codec}, local_size=self.local_size)

    def __str__(self) -> str:
        """Say what happens, in one line."""
        update = ", ".join(f"{name}={value}" for name, value in self.update.items())
        meets = f", meet at {self.meets_at}" if self.meets_at else ""
        gathers = ", gather" if self.gathers else ""
        return f"{super().__str__()}, {self.codec}, Local({update}){meets}{gathers}"


def draw(seed: int) -> LocalScenario:
    """Draw a scenario."""
    random_ = random.Random(f"local updates {seed}")
    fault = random_.choices(FAULTS, _WEIGHTS)[0]
    local_size = 2 if random_.random() < 0.25 else 1
    nodes = random_.choice((3, 3, 4) if local_size > 1 else (2, 3, 3, 4, 4, 5, 6))
    if fault == "partition":
        # A partition of two nodes is a cut of one.
        nodes = max(nodes, 3)
    possible = dict(zip(MOMENTS, _MOMENT_WEIGHTS, strict=True))
    if fault == "raise":
        possible = {one: weight for one, weight in possible.items() if one not in _NOT_RAISED_IN}
    moment = random_.choices(list(possible), list(possible.values()))[0]
    victim = 0 if random_.random() < 0.4 else random_.randrange(1, nodes)
    others = [node for node in range(nodes) if node != victim]
    rank_of = [node * local_size + random_.randrange(local_size) for node in range(nodes)]
    victims: tuple[int, ...] = (rank_of[victim],)
    if fault == "partition":
        other = random_.choice(others)
        victims = (rank_of[min(victim, other)], rank_of[max(victim, other)])
    second = None
    if fault != "partition" and nodes > 2 and random_.random() < 0.4:
        second = _draw_second(random_, fault, rank_of[random_.choice(others)])
    faults = {fault} | ({second.fault} if second else set())
    # A rank may be through before a fault that comes a little later.
    exact = fault == "raise" or random_.random() < 0.5 or moment == "close"
    return LocalScenario(
        seed=seed,
        training=random_.choice(_STRATEGIES),
        world_size=local_size * nodes,
        fault=fault,
        moment=moment,
        victims=victims,
        announcer=rank_of[victim],
        step=STEPS if moment == "close" else random_.randrange(2, STEPS - 8),
        delay_ms=None if exact else random_.choice((2.0, 6.0, 20.0, 60.0)) * random_.random(),
        call=0,
        second=second,
        loads=False,
        namespaces=bool(faults & set(NETWORK_FAULTS)),
        local_size=local_size,
        update=_draw_update(random_),
        codec=random_.choice(CODECS),
        lanes=random_.randrange(1, 4),
        meets_at=random_.randrange(1, STEPS) if random_.random() < 0.5 else 0,
        gathers=random_.random() < 0.3,
    )


def _draw_update(random_: random.Random) -> dict[str, Any]:
    steps = random_.randrange(1, 9)
    fragments = random_.randrange(1, min(3, steps) + 1)
    return {
        "steps": steps,
        "fragments": fragments,
        "overlap_steps": random_.choice((0, random_.randrange(steps // fragments + 1))),
        "mix": random_.choice((1.0, 0.5)),
        "outer": random_.choice(("nesterov", "sgd", "average")),
    }


def _draw_second(random_: random.Random, first: str, victim: int) -> Second:
    """Draw a fault that comes while ranks agree on new members, just behind, or much later."""
    after = random_.choice(AFTER)
    delay_s = random_.choice((0.0, 0.005, 0.03, 0.2)) * random_.random()
    if after == "the first" and first in ("stop", "cut"):
        # Ranks agree once they have noticed the silence.
        delay_s += SILENCE_TIMEOUT_S - 0.1
    fault = random_.choices(_SECOND_FAULTS, _SECOND_WEIGHTS)[0]
    return Second(fault, victim, after, delay_s)
