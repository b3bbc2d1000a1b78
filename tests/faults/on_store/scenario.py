"""What happens to the rendezvous store of a training, and at which moment."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from tests.faults.scenario import (
    BEFORE_CONNECTED,
    PREPARING,
    TRAININGS,
    Scenario,
    Training,
)

HARMLESS = ("hold a byte", "hold half a request", "garbage", "many clients", "reset in mid-write")
"""Other clients of a store, which keep nobody from it."""
SILENT = ("stop", "kill")
"""Faults of the store's process."""
FORGING = ("delete keys", "replace keys", "replay keys")
"""Writes by somebody who can reach the store."""
FAULTS = (*HARMLESS, *SILENT, *FORGING)
_WEIGHTS = (3, 3, 2, 2, 2, 5, 2, 3, 3, 3)
MOMENTS = (*BEFORE_CONNECTED, *PREPARING, "restore", "forward", "waiting", "checkpoint", "close")
SECRET = "campaign of stores, 128 bits: 0123456789abcdef"


@dataclass(frozen=True)
class StoreScenario(Scenario):
    """One fault of a store; see `Scenario`. The fault is one of `FAULTS`.

    Attributes:
        secret: whether the ranks have one, and sign what they write.
        going_on: whether they go on without lost ranks.
        killed: a rank that is killed a little later, so that the others agree on new members, or
            None.
        wakes_after_s: seconds until a store that is stopped goes on; None: never.
    """

    secret: bool = False
    going_on: bool = False
    killed: int | None = None
    wakes_after_s: float | None = None

    @property
    def kind(self) -> Training:
        """Return the training's options."""
        options: dict[str, Any] = {**TRAININGS[self.training].options, "going_on": self.going_on}
        if self.secret:
            options["secret"] = SECRET
        return replace(TRAININGS[self.training], options=options)

    @property
    def silenced(self) -> tuple[int, ...]:
        """Return the ranks whose processes are killed."""
        return () if self.killed is None else (self.killed,)

    @property
    def store(self) -> str:
        """Return which program hosts the store."""
        return "gradlane store" if self.agent else "rank 0"

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return {**super().to_json(), "store": self.store}

    def __str__(self) -> str:
        """Say what happens, in one line."""
        when = self.moment if self.moment in BEFORE_CONNECTED else f"{self.moment} of {self.step}"
        later = "" if self.delay_ms is None else f" + {self.delay_ms:.0f} ms"
        wakes = "" if self.wakes_after_s is None else f" for {self.wakes_after_s:.1f} s"
        killed = "" if self.killed is None else f", kill: {self.killed}"
        words = [word for word in ("secret", "going_on") if getattr(self, word)]
        return (
            f"{self.fault}{wakes}: {self.store}, {when}{later}{killed}, on {self.world_size}"
            f"{''.join(f', {word}' for word in words)}"
        )


def draw(seed: int) -> StoreScenario:
    """Draw a scenario."""
    random_ = random.Random(f"store {seed}")
    fault = random_.choices(FAULTS, _WEIGHTS)[0]
    world_size = random_.choice((2, 3, 3, 4))
    moment = random_.choice(MOMENTS)
    # The store's process is to be at fault, and no rank.
    agent = fault in SILENT or random_.random() < 0.6
    going_on = random_.random() < (0.7 if fault in FORGING else 0.3)
    announcer = random_.randrange(world_size)
    step = random_.randrange(2, 6)
    if moment == "checkpoint":
        step += step % 2
    if moment == "close":
        step = 8
    killed = None
    if fault in FORGING and going_on and world_size > 2 and agent:
        killed = random_.choice([rank for rank in range(world_size) if rank != announcer])
    return StoreScenario(
        seed=seed,
        training="p3",
        world_size=world_size,
        fault=fault,
        moment=moment,
        victims=(),
        announcer=announcer,
        start_step=0,
        step=step,
        delay_ms=None if random_.random() < 0.6 else 20.0 * random_.random(),
        call=random_.randrange(6),
        namespaces=False,
        agent=agent,
        listener="",
        secret=random_.random() < 0.5,
        going_on=going_on,
        killed=killed,
        wakes_after_s=random_.choice((0.5, 2.0, 5.0, 12.0)) if fault == "stop" else None,
    )
