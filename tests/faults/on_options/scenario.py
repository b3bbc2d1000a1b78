"""Which options of `gradlane.init` differ between the ranks of a training."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tests.faults.scenario import TRAININGS, Scenario, Training

_SECRETS = ("first campaign of options 0123456789abcdef", "other campaign of options 0123456789abc")
ALIKE: dict[str, tuple[Any, ...]] = {
    "strategy": ("p3", "slicing", "wfbp", "kvstore", "ring", "asgd"),
    "codec": ("raw", "bf16", "qsgd:bits=8", "onebit:bucket=64"),
    "update": ("worker", "server"),
    "local": ("off", "leader", "shared"),
    "stragglers": ("wait", "drop", "backup=1"),
    "going_on": (False, True),
    "servers": (1, 2, None),
    "check_every": (0, 1, 100, None),
    "scheme": ("ps", "sfb", None),
    "slice_elems": (50_000, 1000, 7),
    "seed": (0, 1),
    "exact_order": (True, False),
    "frame_bytes": (65_096, 4096),
    "seal": (True, False),
    "secret": (None, *_SECRETS),
    "checkpoint_every": (2, 3),
    "checkpoint_keep": (1, 2),
    "buffers": ("broadcast", "average", "local"),
    "silence_timeout_s": (1.5, 30.0, 300.0),
    "progress_timeout_s": (30.0, 1800.0),
}
"""Options that are the same on all ranks, or are refused by name."""
_NEEDED: dict[Any, dict[str, Any]] = {"asgd": {"update": "server"}}
"""What a rank gives beside a value, which its own `init()` refuses otherwise."""
APART: dict[str, tuple[Any, ...]] = {
    "connect_timeout_s": (30.0, 60.0, 300.0),
    "low_water_bytes": (1, 65_536, 1 << 20),
    "send_buffer_bytes": (0, 4096, 1 << 20),
    "pacing": (True, False),
    "work_threads": (0, 1, 3),
    "lanes": (1, 2),
    "trace": (None, "trace.json"),
}
"""Options that ranks may give as each likes."""
MISTAKES: dict[str, tuple[Any, ...]] = {
    "codec": ("qsgd:bits=5", "zip"),
    "servers": (0, 9),
    "update": ("both",),
    "interface": ("eth77",),
    "secret_file": ("/nonexistent/secret",),
    "secret": ("short",),
}
"""Values that `init()` refuses on the rank that gives them, and not an object before it."""
FAULTS = ("must be alike", "may be apart", "mistake")
_WEIGHTS = (5, 4, 3)


@dataclass(frozen=True)
class OptionsScenario(Scenario):
    """Options that differ; see `Scenario`. The fault is one of `FAULTS`.

    Attributes:
        own: options of each rank, by rank.
        pauses: whether the announcer is busy in its step for longer than the shortest silence.
    """

    own: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    pauses: bool = False

    @property
    def kind(self) -> Training:
        """Return the training's options."""
        options: dict[str, Any] = {}
        if any("seal" in one for one in self.own.values()):
            options["secret"] = _SECRETS[0]
        return replace(TRAININGS[self.training], options=options)

    @property
    def differing(self) -> set[str]:
        """Return the names of the options that are not the same on all ranks."""
        names = {name for one in self.own.values() for name in one}
        return {
            name for name in names if len({repr(self.own[rank].get(name)) for rank in self.own}) > 1
        }

    @property
    def silenced(self) -> tuple[int, ...]:
        """Return no rank: none is killed."""
        return ()

    def __str__(self) -> str:
        """Say what happens, in one line."""
        rows = [
            f"{name}={[self.own[rank].get(name, '-') for rank in sorted(self.own)]}"
            for name in sorted(self.differing)
        ]
        return f"{self.fault}: {', '.join(rows)}{', a pause' if self.pauses else ''}"


def draw(seed: int) -> OptionsScenario:
    """Draw a scenario."""
    random_ = random.Random(f"options {seed}")
    fault = random_.choices(FAULTS, _WEIGHTS)[0]
    world_size = random_.choice((2, 2, 3))
    victim = random_.randrange(world_size)
    own: dict[int, dict[str, Any]] = {rank: {} for rank in range(world_size)}
    if fault == "may be apart":
        for name in random_.sample(list(APART), random_.choice((1, 3, 5))):
            for rank in own:
                own[rank][name] = random_.choice(APART[name])
    elif fault == "must be alike":
        name = random_.choice(list(ALIKE))
        first, other = random_.sample(ALIKE[name], 2)
        for rank in own:
            value = other if rank == victim else first
            own[rank] = {name: value, **_NEEDED.get(value, {})}
    else:
        name = random_.choice(list(MISTAKES))
        own[victim][name] = random_.choice(MISTAKES[name])
    return OptionsScenario(
        seed=seed,
        training="p3",
        world_size=world_size,
        fault=fault,
        moment="start",
        victims=(victim,),
        announcer=victim,
        start_step=0,
        step=3,
        delay_ms=None,
        call=0,
        namespaces=False,
        agent=random_.random() < 0.5,
        listener="",
        own=own,
        pauses=random_.random() < 0.5,
    )
