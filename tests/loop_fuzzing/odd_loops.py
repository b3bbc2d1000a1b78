"""Puts oddities into a drawn loop: what few programs do, and what gradlane may refuse by name.

A *family* is one kind of them. Most loops get one family, some two, some none.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

from tests.loop_fuzzing import description as d
from tests.loop_fuzzing import oddities
from tests.loop_fuzzing.models import EXPANDED, ODD_BUFFERS, OLD_NORMS

_BUFFERED = ("batch_norm",)
_NORMS_WITH_BUFFERS = ("spectral_norm", "old_spectral_norm")
_STATELESS_AT_FIRST = ("Adagrad", "ASGD", "Rprop", "Adafactor", "RAdam", "NAdam", "Adadelta")
"""Optimizers whose state cannot be thrown away in part in every torch."""
_STEPS = ("step", "scaled_step", "step_other", "step_by_hand")
_BACKWARDS = ("backward", "assign_gradients", "backward_twice")
_LEARNED = tuple(one for one in ODD_BUFFERS if one not in ("tally", "inference", *EXPANDED))
"""Buffers that forwards write."""


class OddLoop:
    """A loop that gets oddities."""

    def __init__(self, loop: d.Loop) -> None:
        """Start with an ordinary one."""
        self.random = random.Random(loop.seed * 2 + 1)
        self.loop = loop
        self.actions = list(loop.actions)

    def chance(self, probability: float) -> bool:
        """Whether something of this probability happens."""
        return self.random.random() < probability

    def draw(self, choices: Any) -> Any:
        """Return one of some choices."""
        return self.random.choice(list(choices))

    def result(self) -> d.Loop:
        """Return the loop with what was drawn."""
        names = list(FAMILIES)
        wanted = self.random.choices([0, 1, 2], [0.15, 0.55, 0.3])[0]
        # Some find no place in some loops.
        for name in self.random.sample(names, 8):
            before = (list(self.actions), self.loop)
            if wanted > 0:
                FAMILIES[name](self)
            if before != (self.actions, self.loop):
                wanted -= 1
        self.actions = [
            dataclasses.replace(one, do="backward")
            if one.do == "backward_twice" and self.is_raced(one.model)
            else one
            for one in self.actions
        ]
        self.actions = [
            dataclasses.replace(one, given={**one.given, "made": "new"})
            if one.do == "step_other" and self.loop.optimizers[one.model].counts
            else one
            for one in self.actions
        ]
        wraps = any(one.do == "wrap_step" for one in self.actions)
        if wraps or any(one.wrapped or one.derived for one in self.loop.optimizers):
            # With `defer=True` the program says itself that its step may be done in parts.
            self.loop = dataclasses.replace(self.loop, defer=False if self.loop.defer else None)
        return dataclasses.replace(self.loop, actions=tuple(self.actions))

    def is_raced(self, model: int) -> bool:
        """Whether two backwards at once give what depends on which is faster, in torch, too.

        What a hook changes twice does, a sum of more than two gradients, what forwards write into
        buffers, and joined parameters: torch may give one of them a view of memory that this graph
        has yet to read for another one, and the other thread then adds to it.
        """
        raced = {*_LEARNED, "joined"} & set(self.loop.models[model].extras)
        changed = any(one.do in ("hook", "change_gradients") for one in self.actions)
        return changed or bool(raced) or self.forgets(model)

    def has_own_steps(self) -> bool:
        """Whether a wrapper made after `prepare` would see this rank's own gradients, or does."""
        models = range(len(self.loop.models))
        return any(
            self.is_inside(first, step) for model in models for first, step in self.steps(model)
        ) or any(one.do in ("assign_gradients", "wrap_step") for one in self.actions)

    # ---- places

    def steps(self, model: int) -> list[tuple[int, int]]:
        """Return (first backward, step) of each ordinary step of a model, by place."""
        found = []
        first = -1
        for place, action in enumerate(self.actions):
            if action.model != model:
                continue
            if action.do in ("zero", "joined", "prepare_again"):
                first = -1
            elif action.do == "backward" and first < 0:
                first = place
            elif action.do in ("step", "scaled_step"):
                if first >= 0 and action.given.get("closure") is None:
                    found.append((first, place))
                first = -1
        return found

    def insert(self, place: int, *actions: d.Action) -> None:
        """Put actions before the one at a place."""
        self.actions[place:place] = actions

    def model(self) -> int:
        """Draw a model."""
        return self.random.randrange(len(self.loop.models))

    def some_steps(self, model: int) -> list[tuple[int, int]]:
        """Draw steps of a model, last first so that places stay right; at least one."""
        steps = self.steps(model)
        chosen = [one for one in steps if self.chance(0.5)]
        return (chosen or steps[-1:])[::-1]

    def only(self) -> dict[str, int]:
        """Draw whether one parameter or all."""
        return {"only": self.random.randrange(64)} if self.chance(0.4) else {}

    def ranks(self) -> tuple[int, ...] | None:
        """Draw who looks."""
        if self.chance(0.75):
            return None
        everyone = range(self.loop.ranks)
        return tuple(sorted(self.random.sample(everyone, self.random.randint(1, len(everyone)))))

    def is_simple(self, model: int) -> bool:
        """Whether a model is alone and keeps no buffers in its forward."""
        blocks = self.loop.models[model].blocks
        return len(self.loop.models) == 1 and not any(
            block.kind in _BUFFERED or block.norm in _NORMS_WITH_BUFFERS for block in blocks
        )

    def is_scaled(self) -> bool:
        """Whether there is a scaler, which needs a gradient in each step."""
        return any(action.do == "scaled_step" for action in self.actions)

    def is_sparse(self) -> bool:
        """Whether a gradient may be sparse, with which few operations work."""
        return any(b.kind == "sparse_words" for model in self.loop.models for b in model.blocks)

    def forgets(self, model: int) -> bool:
        """Whether the loop steps twice without zeroing."""
        stepped = False
        for action in self.actions:
            if action.model != model:
                continue
            if action.do == "zero" or action.given.get("zero") or action.given.get("closure"):
                stepped = False
            elif action.do in _BACKWARDS and stepped:
                return True
            elif action.do in ("step", "scaled_step"):
                stepped = True
        return False

    def is_inside(self, first: int, step: int) -> bool:
        """Whether all backwards of a step are inside no_sync()."""
        between = self.actions[first:step]
        return all(one.given.get("no_sync") for one in between if one.do == "backward")

    # ---- families

    def gradients(self) -> None:
        """Gradients looked at and changed between backward and step."""
        model = self.model()
        if self.is_sparse():
            return
        for _, step in self.some_steps(model):
            drawn = [self.gradient_action(model) for _ in range(self.random.randint(1, 2))]
            self.insert(step, *drawn)

    def gradient_action(self, model: int) -> d.Action:
        """Draw a look at gradients, or a change."""
        via = self.draw(oddities.VIAS)
        if self.chance(0.5):
            given = {"via": via, "how": self.draw(oddities.LOOKS), **self.only()}
            return d.Action("look_at_gradients", model, self.ranks(), given)
        if self.chance(0.3):
            given = {"via": via, "how": self.draw(oddities.WHOLE_CHANGES)}
            return d.Action("change_gradients", model, None, given)
        given = {"via": via, "how": self.draw(oddities.CHANGES), **self.only()}
        if self.is_scaled() and given["how"] in ("none", "delete"):
            given["how"] = "mul"
        return d.Action("change_gradients", model, None, given)

    def early_gradients(self) -> None:
        """Gradients assigned before backward."""
        model = self.model()
        if self.is_sparse() or self.forgets(model):
            return
        for first, _ in self.some_steps(model):
            if self.actions[first].given.get("zero") is None:
                given = {"via": self.draw(oddities.VIAS), "how": "assign", **self.only()}
                self.insert(first, d.Action("change_gradients", model, None, given))

    def late_gradients(self) -> None:
        """Gradients looked at after the step, and held beyond it."""
        model = self.model()
        if self.is_sparse() or not self.is_simple(model):
            return
        # What is kept gets means at the end of a backward inside another one, and again later.
        calls = {block.call for one in self.loop.models for block in one.blocks}
        reentrant = "reentrant" in calls
        for first, step in self.some_steps(model):
            if self.actions[step].do != "step":
                continue
            # Where all backwards were inside no_sync(), the step averages: at once, or later.
            parts = [one.given for one in self.actions[first:step] if one.do == "backward"]
            inside = all(one.get("no_sync") for one in parts)
            if self.chance(0.5) or reentrant or inside:
                given = {"via": self.draw(oddities.VIAS), "how": "clone"}
                self.insert(step + 1, d.Action("look_at_gradients", model, None, given))
            else:
                after = step + (2 if step + 1 < len(self.actions) and self.chance(0.5) else 1)
                self.insert(after, d.Action("look_at_held", model))
                given = {"via": self.draw(oddities.VIAS)}
                self.insert(step, d.Action("hold_gradients", model, None, given))

    def own_gradients(self) -> None:
        """Gradients computed with `torch.autograd.grad` and assigned; `backward(inputs=...)`."""
        model = self.model()
        calls = {block.call for one in self.loop.models for block in one.blocks}
        if self.is_sparse() or "reentrant" in calls or self.has_own_steps():
            return
        for first, step in self.some_steps(model):
            given = self.actions[first].given
            if not set(given) <= {"through", "data", "detach"} or self.accumulates(first, step):
                continue
            if self.chance(0.7) and given["through"] == [model] and not self.is_seen(first, model):
                # On top of averages of a step that was not taken, a rank steps with its own.
                via = self.draw(oddities.VIAS)
                assign = {"through": [model], "data": given["data"], "via": via}
                self.actions[first] = d.Action("assign_gradients", model, None, assign)
            elif given["through"] == [model]:
                # A model that gets no gradient at all has no step, and keeps its own buffers.
                inputs = {**given, "inputs": self.random.randint(1, 3)}
                self.actions[first] = d.Action("backward", model, None, inputs)

    def accumulates(self, first: int, step: int) -> bool:
        """Whether there is more than one backward in a step."""
        return any(one.do in _BACKWARDS for one in self.actions[first + 1 : step])

    def zeroing(self) -> None:
        """Gradients zeroed by hand."""
        model = self.model()
        if self.is_sparse():
            return
        for place, action in enumerate(self.actions):
            if action.do == "zero" and action.model == model and self.chance(0.7):
                begun = any(one.do == "backward" for one in self.since_step(place, model))
                if begun and not self.is_simple(model):
                    continue
                how = "none" if action.given.get("to_none", True) else "zero"
                given = {"via": self.draw(oddities.VIAS), "how": how}
                self.actions[place] = d.Action("zero_by_hand", model, None, given)

    def since_step(self, place: int, model: int) -> list[d.Action]:
        """Return the actions between a model's last step, or zero, and a place."""
        since: list[d.Action] = []
        for action in reversed(self.actions[:place]):
            if action.model == model and action.do in (*_STEPS, "zero", "zero_by_hand", "joined"):
                break
            since.append(action)
        return since

    def is_seen(self, place: int, model: int) -> bool:
        """Whether a forward, of another model's backward perhaps, has begun a model's step."""
        for action in reversed(self.actions[:place]):
            if model in action.given.get("through", ()):
                return True
            if action.model == model and action.given.get("what") == "functional":
                return True
            if action.model == model and action.do in (*_STEPS, "joined", "prepare_again"):
                return False
        return False

    def climbing(self) -> None:
        """Steps of SAM: own gradients inside no_sync(), and another backward from there."""
        model = self.model()
        if not self.is_simple(model) or self.is_sparse():
            return
        if set(EXPANDED) & set(self.loop.models[model].extras):
            # Torch writes no memory that several elements share.
            return
        for first, step in self.some_steps(model):
            given = self.actions[first].given
            if not set(given) <= {"through", "data"} or self.accumulates(first, step):
                continue
            via = self.draw(oddities.VIAS)
            again = self.draw((via, "kept", "parameters"))
            zero = d.Action("zero", model, None, {"whose": self.draw(("model", "optimizer"))})
            if self.chance(0.3):
                by_hand = {"via": via, "how": "none"}
                zero = d.Action("zero_by_hand", model, None, by_hand)
            order = {"via": again if again == "parameters" or via == again else via}
            looks = []
            if self.chance(0.5):
                look = {"via": via, "how": self.draw(oddities.LOOKS)}
                looks = [d.Action("look_at_gradients", model, self.ranks(), look)]
            self.insert(first + 1, d.Action("descend", model, None, order))
            second = {**given, "data": given["data"]}
            self.actions[first : first + 1] = [
                d.Action("backward", model, None, {**given, "no_sync": True}),
                *looks,
                d.Action("climb", model, None, order),
                zero,
                d.Action("backward", model, None, second),
            ]

    def inside_no_sync(self) -> None:
        """Own gradients looked at between micro-batches."""
        model = self.model()
        if self.is_sparse() or self.has_own_steps():
            return
        for first, step in self.some_steps(model):
            given = self.actions[first].given
            if given.get("scaled") or len(self.loop.models) > 1 or given.get("zero"):
                continue
            look = {"via": self.draw(oddities.VIAS), "how": self.draw(oddities.LOOKS)}
            action = d.Action("look_at_gradients", model, self.ranks(), look)
            if self.chance(0.3):
                change = {"via": look["via"], "how": self.draw(oddities.CHANGES), **self.only()}
                action = d.Action("change_gradients", model, None, change)
            if given.get("no_sync"):
                self.insert(first + 1, action)
            elif not self.accumulates(first, step):
                self.actions[first] = d.Action("backward", model, None, {**given, "no_sync": True})
                self.insert(first + 1, action)
                if self.chance(0.5):
                    follows = {**given, "data": given["data"] + 500}
                    self.insert(first + 2, d.Action("backward", model, None, follows))

    def other_steps(self) -> None:
        """Another optimizer, or none, updates the parameters."""
        model = self.model()
        if not self.is_simple(model) or self.is_sparse() or self.forgets(model):
            return
        by_hand = self.chance(0.4)
        made = self.draw(("new", "copy", "zeroes"))
        if self.loop.optimizers[model].counts:
            made = "new"
        via, how = self.draw(oddities.VIAS), self.draw(("data", "sub", "foreach"))
        for first, step in self.some_steps(model):
            if self.actions[step].do != "step" or self.is_inside(first, step):
                continue
            given = {"via": via, "how": how} if by_hand else {"via": via, "made": made}
            do = "step_by_hand" if by_hand else "step_other"
            self.actions[step] = d.Action(do, model, None, given)

    def state(self) -> None:
        """The optimizer's state read and changed."""
        model = self.model()
        optimizer = self.loop.optimizers[model]
        for _, step in self.some_steps(model):
            place = step if self.chance(0.15) else step + 1
            if self.chance(0.5):
                how = self.draw(oddities.STATE_READS)
                if self.loop.serves and how in ("save_dict", "elsewhere"):
                    # These lend the parameters' memory for a moment, which the core here spoils.
                    how = "by_parameter"
                given = {"how": how}
                drawn = d.Action("look_at_state", model, self.ranks(), given)
            else:
                how = self.draw(oddities.STATE_CHANGES)
                if optimizer.kind in _STATELESS_AT_FIRST and how not in (
                    "zero",
                    "refill",
                    "assign",
                ):
                    how = self.draw(("refill", "keep", "load"))
                if how in ("keep", "load") and self.loop.serves:
                    how = "clear"
                given = {"how": how, "only": self.random.randrange(64)}
                drawn = d.Action("change_state", model, None, given)
            self.insert(place, drawn)

    def lists(self) -> None:
        """Lists of parameters that were made before `prepare`."""
        model = self.model()
        for _, step in self.some_steps(model):
            place = step if self.chance(0.1) else step + 1
            if place == step and self.loop.serves:
                # The update on the servers has begun with the backward.
                strange = tuple(sorted({*self.loop.strange, "server_reads"}))
                self.loop = dataclasses.replace(self.loop, strange=strange)
            draw = self.random.random()
            via = self.draw(("kept", "kept", "kept_groups", *oddities.VIAS))
            if draw < 0.45:
                given = {"via": via, "how": self.draw(oddities.LOOKS), **self.only()}
                drawn = d.Action("look_at_kept", model, self.ranks(), given)
            elif draw < 0.7:
                how = self.draw(("foreach", "lerp", "data", "copy", "norms", "group_lists"))
                drawn = d.Action("follow_kept", model, self.ranks(), {"via": via, "how": how})
            else:
                hows = (
                    "mul",
                    "data",
                    "clamp",
                    "copy",
                    "numpy",
                    "detached",
                    "init",
                    "foreach",
                    "swap",
                )
                given = {"via": via, "how": self.draw(hows)}
                drawn = d.Action("write_kept", model, None, given)
            self.insert(place, drawn)

    def groups(self) -> None:
        """Groups of the optimizer made anew."""
        model = self.model()
        hows = ["pop_add", "list", "comprehension", "slice", "kept", "setstate"]
        if self.loop.optimizers[model].scheduler is None:
            hows += ["split", "reverse"]
            optimizer = self.loop.optimizers[model]
            stateless = optimizer.counts is None and not optimizer.options.get("momentum")
            if optimizer.kind == "SGD" and stateless:
                # Torch saves no state of parameters that are in no group any more.
                hows.append("remove")
        steps = self.steps(model)
        if not steps or self.is_sparse():
            return
        _, step = self.draw(steps)
        if self.chance(0.7):
            how = self.draw(("clip", "foreach_all"))
            given = {"via": "groups", "how": how}
            self.insert(step, d.Action("change_gradients", model, None, given))
        elif self.chance(0.5):
            given = {"via": "groups", "how": "foreach"}
            self.insert(step + 1, d.Action("follow_kept", model, None, given))
        earlier = [0, *(one + 1 for _, one in steps if one < step)]
        self.insert(self.draw(earlier), d.Action("regroup", model, None, {"how": self.draw(hows)}))

    def wrapping(self) -> None:
        """The optimizer's step wrapped."""
        model = self.model()
        if self.is_sparse() or any(one.given.get("closure") for one in self.actions):
            return
        inside = self.draw(oddities.INSIDES)
        if inside == "noise" and any(one.do == "joined" for one in self.actions):
            # It is drawn by a count of the program's own, which differs after uneven data.
            inside = "halve"
        if "complex" in self.loop.models[model].extras:
            inside = "halve"
        optimizer = self.loop.optimizers[model]
        draw = self.random.random()
        if draw < 0.35:
            how = self.draw(oddities.WRAPS)
            # Schedulers of torch wrap methods alone.
            early = optimizer.scheduler is not None and (how != "method" or self.chance(0.5))
            optimizer = dataclasses.replace(optimizer, wrapped=(how, inside), early_scheduler=early)
        elif draw < 0.7:
            how = self.draw(oddities.SUBCLASSES)
            if optimizer.scheduler is not None and how == "getattr":
                how = "super"
            early = optimizer.scheduler is not None and self.chance(0.5)
            optimizer = dataclasses.replace(optimizer, derived=(how, inside), early_scheduler=early)
        elif self.has_own_steps():
            return
        else:
            places = [0, *(step + 1 for _, step in self.steps(model))]
            given = {"how": self.draw(oddities.WRAPS), "inside": inside}
            self.insert(self.draw(places[:3]), d.Action("wrap_step", model, None, given))
        self.set_optimizer(model, optimizer)
        self.actions.append(d.Action("look_at_calls", model))

    def set_optimizer(self, model: int, optimizer: d.Optimizer) -> None:
        """Put another optimizer into the loop."""
        optimizers = list(self.loop.optimizers)
        optimizers[model] = optimizer
        self.loop = dataclasses.replace(self.loop, optimizers=tuple(optimizers))

    def early_schedulers(self) -> None:
        """A scheduler that is built before `prepare`."""
        model = self.model()
        optimizer = self.loop.optimizers[model]
        if optimizer.scheduler is not None:
            self.set_optimizer(model, dataclasses.replace(optimizer, early_scheduler=True))

    def counting(self) -> None:
        """An optimizer that says it steps per parameter, but counts."""
        model = self.model()
        optimizer = self.loop.optimizers[model]
        scheduled = optimizer.scheduler in (None, "step", "exponential", "lambda", "warm-up")
        removes = any(one.given.get("how") == "remove" for one in self.actions)
        if self.loop.serves or self.is_sparse() or optimizer.derived or removes or not scheduled:
            return
        counts = self.draw(oddities.COUNTS)
        self.set_optimizer(
            model,
            d.Optimizer("SGD", {"lr": 0.1}, optimizer.groups, optimizer.scheduler, counts=counts),
        )

    def hooks(self) -> None:
        """Hooks registered after `prepare`."""
        model = self.model()
        if self.is_sparse():
            return
        hows = [
            "tensor",
            "tensor_clamp",
            "tensor_in_place",
            "accumulated",
            "accumulated_anew",
            "all_accumulated",
            "node",
            "node_before",
            "step_before",
            "step_after",
        ]
        if self.loop.serves:
            hows = hows[:-2]
        places = [0, *(step + 1 for _, step in self.steps(model))]
        place = self.draw(places)
        given = {"how": self.draw(hows), "only": self.random.randrange(64)}
        if self.chance(0.3):
            later = [one for one in places if one > place]
            if later:
                self.insert(self.draw(later), d.Action("unhook", model))
        self.insert(place, d.Action("hook", model, None, given))

    def toggling(self) -> None:
        """Blocks frozen between forward and backward."""
        model = self.model()
        blocks = self.loop.models[model].blocks
        plain = [
            number
            for number, block in enumerate(blocks)
            if block.same_as is None and block.norm is None and block.call in ("plain", "residual")
        ]
        calls = {block.call for block in blocks}
        if len(self.loop.models) > 1 or not plain or len(blocks) < 2 or self.is_scaled():
            return
        if calls & {"checkpoint", "reentrant"}:
            # Torch recomputes with other tensors then, and says so.
            return
        if any(one.do == "clip" and one.given["how"] == "value" for one in self.actions):
            # Torch's own breaks off where there is no gradient at all.
            return
        for first, _ in self.some_steps(model):
            given = {**self.actions[first].given, "toggled": self.draw(plain)}
            given.pop("inputs", None)
            if not given.get("penalty"):
                self.actions[first] = dataclasses.replace(self.actions[first], given=given)

    def aside(self) -> None:
        """Actions in threads of their own, and others that look on."""
        model = self.model()
        places = ("step", "backward", "read", "zero", "clip", "schedule", "synchronize", "load")
        if self.chance(0.5):
            for place, action in enumerate(self.actions):
                if action.do in places and self.chance(0.35):
                    self.actions[place] = dataclasses.replace(action, thread=True)
        else:
            norms = {block.norm for block in self.loop.models[model].blocks}
            for first, step in self.some_steps(model):
                given = {"how": self.draw(oddities.ASIDES), "times": self.random.randint(1, 4)}
                if self.loop.serves and given["how"] in ("optimizer", "state"):
                    given["how"] = "state_dict"
                if given["how"] == "deepcopy" and norms & set(OLD_NORMS):
                    # Torch copies no module whose weight a forward has computed.
                    given["how"] = "state_dict"
                look = d.Action("look_aside", model, self.ranks(), given)
                self.insert(self.draw((first, first, step, step + 1)), look)
            for place in reversed(range(len(self.actions))):
                if self.actions[place].do == "prepare_again":
                    # Torch breaks off where one thread lists parameters and another adds one.
                    self.insert(place, d.Action("wait_aside", model))
        self.actions.append(d.Action("wait_aside", model))

    def two_threads(self) -> None:
        """Forward and backward in two threads at once."""
        model = self.model()
        blocks = self.loop.models[model].blocks
        fit = all(
            block.norm is None
            and block.when is None
            and block.call not in ("functional", "reentrant")
            and block.tied_to is None
            and block.same_as is None
            for block in blocks
        )
        if not fit or not self.is_simple(model) or self.is_sparse() or self.is_scaled():
            return
        for first, step in self.steps(model)[::-1]:
            given = self.actions[first].given
            if set(given) <= {"through", "data"} and not self.accumulates(first, step):
                self.actions[first] = d.Action("backward_twice", model, None, given)

    def buffers(self) -> None:
        """Buffers that few models have, and buffers written by hand."""
        model = self.model()
        described = self.loop.models[model]
        extra = self.draw(("tally", "tally", "tally", *ODD_BUFFERS))
        if extra == "expanded_frozen" and self.loop.optimizers[model].kind == "Muon":
            # It takes matrices alone.
            return
        if self.is_odd_for(extra):
            return
        models = list(self.loop.models)
        models[model] = dataclasses.replace(described, extras=(*described.extras, extra))
        self.loop = dataclasses.replace(self.loop, models=tuple(models))
        if extra != "tally":
            return
        for first, step in self.some_steps(model):
            if self.accumulates(first, step) or self.actions[first].given.get("no_sync"):
                continue
            if self.is_seen(first, model):
                # Between two forwards of a step each rank keeps its own, as the page says.
                continue
            # Nothing counts writes past torch, which `docs/constructs.md` says.
            hows = [how for how in oddities.BUFFER_WRITES if how not in ("data", "numpy")]
            given = {"how": self.draw(hows), "value": 0.25}
            ranks = self.draw((None, (0,), (1,), (0,)))
            if self.chance(0.3):
                look = {"via": self.draw(("attribute", "mapping"))}
                self.insert(first, d.Action("look_at_buffer", model, None, look))
            self.insert(first, d.Action("write_buffer", model, ranks, given))

    def is_odd_for(self, extra: str) -> bool:
        """Whether a loop does something that plain torch cannot do with such a buffer."""
        does = {one.do for one in self.actions} | {one.given.get("what") for one in self.actions}
        copies = {"load", "joined", "prepare_again", "write", "average", "deepcopy", "twin"}
        frozen = (*EXPANDED, "inference")
        moves = ("resized", "growing", "overlapping")
        # Zeroing between forward and backward ends the step before after this one's forward.
        between = any(one.given.get("zero") for one in self.actions)
        used = ("resized", "replaced", "mapped")
        twice = {block.call for model in self.loop.models for block in model.blocks}
        return (
            (extra in (*frozen, *moves) and bool(does & copies))
            or (extra in used and between)
            or (extra in moves and len(self.loop.models) > 1)
            or bool(twice & {"reentrant"})
        )

    def defaults(self) -> None:
        """Torch's default device and dtype."""
        if self.chance(0.5):
            self.loop = dataclasses.replace(self.loop, defaults={"dtype": "float64"})
            return
        calls = ["backward", "step", "zero", "synchronize", "clip"]
        drawn = self.draw((["prepare"], calls, ["prepare", *calls]))
        kinds = {one.kind for one in self.loop.optimizers}
        calls_of = {b.call for model in self.loop.models for b in model.blocks}
        odd = calls_of & {"checkpoint", "reentrant"} or any(
            one.given.get(name)
            for one in self.actions
            for name in ("scaled", "penalty", "autocast", "closure")
        )
        if kinds != {"SGD"} or odd:
            drawn = ["prepare"]
        defaults = {"device": "meta", "device_in": drawn}
        self.loop = dataclasses.replace(self.loop, defaults=defaults)


FAMILIES: dict[str, Callable[[OddLoop], None]] = {
    "gradients": OddLoop.gradients,
    "early_gradients": OddLoop.early_gradients,
    "late_gradients": OddLoop.late_gradients,
    "own_gradients": OddLoop.own_gradients,
    "zeroing": OddLoop.zeroing,
    "climbing": OddLoop.climbing,
    "inside_no_sync": OddLoop.inside_no_sync,
    "other_steps": OddLoop.other_steps,
    "state": OddLoop.state,
    "lists": OddLoop.lists,
    "groups": OddLoop.groups,
    "wrapping": OddLoop.wrapping,
    "early_schedulers": OddLoop.early_schedulers,
    "counting": OddLoop.counting,
    "hooks": OddLoop.hooks,
    "toggling": OddLoop.toggling,
    "aside": OddLoop.aside,
    "two_threads": OddLoop.two_threads,
    "buffers": OddLoop.buffers,
    "defaults": OddLoop.defaults,
}


def add_oddities(loop: d.Loop) -> d.Loop:
    """Return a loop with oddities that its seed draws."""
    return OddLoop(loop).result()
