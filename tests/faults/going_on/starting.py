"""Faults of a training that goes on and has not begun: in `init()`, `prepare()` and step 1."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.faults.going_on.scenario import (
    AFTER,
    TRAININGS,
    GoingOnScenario,
    Second,
)
from tests.faults.scenario import IN_STEPS, NETWORK_FAULTS, PREPARING

FAULTS = ("kill", "stop", "cut", "partition", "hang up", "garble", "raise", "exit")
_WEIGHTS = (6, 4, 3, 2, 3, 4, 3, 3)
_INSIDE = ("hang up", "garble")
"""Faults of a connection, which is there once the ranks are connected."""
_EARLY = ("start", "rendezvous", "connecting")
_MOMENTS = (*_EARLY, *PREPARING, *IN_STEPS)
_MOMENT_WEIGHTS = (1, 2, 3, 2, 2, 8, *(1,) * len(IN_STEPS))
_RAISED_IN = (*_EARLY, *PREPARING, "forward", "backward", "pushing")


def draw(seed: int) -> GoingOnScenario:
    """Draw a scenario."""
    random_ = random.Random(f"starting {seed}")
    fault = random_.choices(FAULTS, _WEIGHTS)[0]
    possible = dict(zip(_MOMENTS, _MOMENT_WEIGHTS, strict=True))
    if fault in ("raise", "exit"):
        possible = {moment: possible[moment] for moment in _RAISED_IN}
    if fault in _INSIDE:
        possible = {moment: possible[moment] for moment in ("spreading", *IN_STEPS)}
    moment = random_.choices(list(possible), list(possible.values()))[0]
    # Of two ranks whose link is at fault either may go on: the store decides.
    least = 3 if fault == "partition" or (fault in _INSIDE and moment != "spreading") else 2
    world_size = random_.choice([size for size in (2, 2, 3, 3, 4) if size >= least])
    victim = 0 if random_.random() < 0.6 else random_.randrange(1, world_size)
    others = [rank for rank in range(world_size) if rank != victim]
    pair = tuple(sorted((victim, random_.choice(others))))
    exact = fault in ("raise", "exit", *_INSIDE) or moment == "start" or random_.random() < 0.4
    drawn = GoingOnScenario(
        seed=seed,
        training=random_.choice(list(TRAININGS)),
        world_size=world_size,
        fault=fault,
        moment=moment,
        victims=pair if fault in ("partition", *_INSIDE) else (victim,),
        announcer=victim,
        step=1,
        delay_ms=None if exact else random_.choice((2.0, 6.0, 20.0, 60.0)) * random_.random(),
        call=0,
        second=None,
        loads=False,
        namespaces=fault in NETWORK_FAULTS,
        starting=True,
    )
    if fault in ("kill", "stop") and world_size > 2 and random_.random() < 0.2:
        delay_s = random_.choice((0.005, 0.03, 0.2)) * random_.random()
        second = Second("kill", random_.choice(others), AFTER[0], delay_s)
        return replace(drawn, second=second)
    return drawn
