"""Puts into a drawn loop what programs do with parameters that they keep.

Operations in which several models meet, parameters of classes of the program's own, caches by
version, frozen parameters that drift, optimizers around optimizers. All must be right.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from tests.loop_fuzzing import description as d
from tests.loop_fuzzing import oddities
from tests.loop_fuzzing.look_ahead import OUTERS
from tests.loop_fuzzing.models import PARAMETER_CLASSES

_STEPS = ("step", "scaled_step", "step_other", "step_by_hand")
_UNCOUNTED = ("data", "numpy", "detached", "set_data", "set", "swap", "copy")
"""Writes that torch does not count, or that replace memory."""
_OF_OPTIMIZERS = (
    *("look_at_state", "change_state", "regroup", "wrap_step", "hook", "look_aside", "joined"),
    *("step_other", "step_by_hand", "reload_optimizer", "prepare_again", "scaled_step"),
    *("look_at_calls", "backward_twice", "unhook", "climb"),
)
"""Actions that a look-ahead does otherwise than an optimizer of torch, or that know its class."""


class KeptLoop:
    """A loop that gets looks at what is kept."""

    def __init__(self, loop: d.Loop) -> None:
        """Start with a drawn one."""
        # Drawn apart, so that what a seed gives otherwise stays.
        self.random = random.Random(f"kept {loop.seed}")
        self.loop = loop
        self.actions = list(loop.actions)

    def result(self) -> d.Loop:
        """Return the loop with what was drawn."""
        if self.chance(0.8 if len(self.loop.models) > 1 else 0.3):
            self.meetings()
        if self.chance(0.3):
            self.classes()
        if self.chance(0.3):
            self.caches()
        if self.chance(0.5):
            self.drifts()
        if self.chance(0.6):
            self.look_aheads()
        return dataclasses.replace(self.loop, actions=tuple(self.actions))

    def chance(self, probability: float) -> bool:
        """Whether something of this probability happens."""
        return self.random.random() < probability

    def draw(self, choices: Any) -> Any:
        """Return one of some choices."""
        return self.random.choice(list(choices))

    def ranks(self) -> tuple[int, ...] | None:
        """Draw who looks."""
        if self.chance(0.7):
            return None
        everyone = range(self.loop.ranks)
        return tuple(sorted(self.random.sample(everyone, self.random.randint(1, len(everyone)))))

    def after_steps(self, model: int | None = None) -> list[int]:
        """Return the places after steps, last first so that they stay right."""
        found = [
            place + 1
            for place, action in enumerate(self.actions)
            if action.do in _STEPS and model in (None, action.model)
        ]
        return found[::-1]

    def meetings(self) -> None:
        """All models' parameters in one operation."""
        for place in self.after_steps():
            if self.chance(0.6):
                model = self.random.randrange(len(self.loop.models))
                given = {"how": self.draw(oddities.MEETINGS)}
                self.actions.insert(place, d.Action("meet", model, self.ranks(), given))

    def classes(self) -> None:
        """Parameters of classes of the program's own."""
        models = list(self.loop.models)
        number = self.random.randrange(len(models))
        calls = {block.call for block in models[number].blocks}
        names = self.draw((("own",), ("own",), ("own", "asked"), ("asked",)))
        if calls & {"functional", "checkpoint", "reentrant"} or self.loop.serves:
            names = ("own",)
        assert set(names) <= set(PARAMETER_CLASSES)
        models[number] = dataclasses.replace(models[number], classes=names)
        self.loop = dataclasses.replace(self.loop, models=tuple(models))

    def caches(self) -> None:
        """Copies of parameters that are made anew where their versions have moved."""
        model = self.random.randrange(len(self.loop.models))
        if any(
            one.given.get("how") in _UNCOUNTED or one.do in ("prepare_again", "joined", "reformat")
            for one in self.actions
        ):
            return
        for place in [*self.after_steps(model), 0]:
            if place == 0 or self.chance(0.7):
                self.actions.insert(place, d.Action("look_at_cache", model, None))

    def drifts(self) -> None:
        """Frozen parameters that change alike on all ranks."""
        frozen = [
            number
            for number, model in enumerate(self.loop.models)
            if any(block.frozen for block in model.blocks)
        ]
        frozen += [one.model for one in self.actions if one.do == "freeze"]
        if frozen:
            model = self.draw(frozen)
            via = self.draw(("kept", "parameters", "attributes"))
            for place in self.after_steps(model):
                if self.chance(0.6):
                    given = {"via": via, "factor": self.draw((0.5, 0.875))}
                    self.actions.insert(place, d.Action("drift", model, None, given))

    def look_aheads(self) -> None:
        """An optimizer around the one of a model."""
        number = self.random.randrange(len(self.loop.models))
        optimizer = self.loop.optimizers[number]
        sparse = any(b.kind == "sparse_words" for b in self.loop.models[number].blocks)
        odd = optimizer.wrapped or optimizer.derived or optimizer.counts
        if (
            odd
            or sparse
            or self.loop.serves
            or optimizer.early_scheduler
            or any(
                one.model == number
                and (
                    one.do in _OF_OPTIMIZERS
                    or one.given.get("scaled")
                    or "groups" in str(one.given.get("via"))
                    or one.given.get("what") == "optimizer_state"
                )
                for one in self.actions[:-1]
            )
        ):
            return
        how = self.draw(OUTERS[:2] if optimizer.scheduler else OUTERS)
        prepared = "base" if how == "bare" else self.draw(("outer", "base"))
        optimizers = list(self.loop.optimizers)
        optimizers[number] = dataclasses.replace(optimizer, outer=(how, prepared))
        # With `defer=True` the program says itself that its step may be done in parts.
        defer = False if self.loop.defer else None
        self.loop = dataclasses.replace(self.loop, optimizers=tuple(optimizers), defer=defer)


def add_kept(loop: d.Loop) -> d.Loop:
    """Return a loop with what its seed draws of looks at what is kept."""
    return KeptLoop(loop).result()
