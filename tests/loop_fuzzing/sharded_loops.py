"""Draws loops over models that `fully_shard` has sharded within nodes.

What such a loop does torch's own HSDP can do, too; gradlane gives its bits. Under codecs, and where
torch has nothing like it, see `sharded_verdict.py`.
"""

from __future__ import annotations

import random
from typing import Any

from tests.loop_fuzzing import description as d
from tests.loop_fuzzing.models import KINDS, TIES
from tests.loop_fuzzing.optimizers import SCHEDULERS

SEND, KEEP_WHOLE, KEEP_SHARDS = "send", "keep whole", "keep shards"
"""What a backward does with its gradients."""

_KINDS = sorted(set(KINDS) - {"lstm", "gru", "conv2d_channels_last", "sparse_words"})
"""Not those whose modules hold on to parameters, whose gradients are sparse, or not contiguous."""
_NORMS = ("weight_norm", "spectral_norm", "symmetric")
_EXTRAS = (
    *("scale", "views", "complex_buffer", "frozen_scale", "joined", "hooked", "tally", "replaced"),
    *("mapped", "flags", "shared", "sliced", "count", "overlapping", "growing"),
)
_OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    *[("AdamW", {"lr": 0.02})] * 4,
    *[("SGD", {"lr": 0.1}), ("SGD", {"lr": 0.1, "momentum": 0.9})],
    ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    *[("Adam", {"lr": 0.02, "amsgrad": True}), ("Adagrad", {"lr": 0.05})],
    *[("RMSprop", {"lr": 0.01, "momentum": 0.5, "centered": True}), ("NAdam", {"lr": 0.02})],
    *[("Adamax", {"lr": 0.02}), ("Adadelta", {"lr": 1.0}), ("RAdam", {"lr": 0.02})],
]
_SCHEDULERS = sorted(set(SCHEDULERS) - {"one-cycle", "cyclic", "plateau"})
_READS = ("state_dict", "named", "parameters", "buffers", "evaluate", "optimizer_state")
_CODECS = ("bf16", "qsgd:bits=8")
_LOCAL_CODECS = ("bf16", "topk:ratio=0.1,broadcast_ratio=0.2,bits=2,bucket=64,decay=0.95")
_USES_ONCE = ("plain", "residual", "checkpoint", "no_grad")


class ShardedGenerator:
    """Draws one loop."""

    def __init__(self, seed: int, ranks: tuple[int, ...]) -> None:
        """Draw from a seed, with one of these world sizes."""
        self.random = random.Random(f"sharded {seed}")
        self.seed = seed
        self.ranks = self.random.choice(ranks)
        self.data = 0
        self.local = 4 if self.ranks == 8 and self.chance(0.5) else 2
        self.nodes = self.ranks // self.local
        self.updates_locally = self.chance(0.35)
        self.codec = self.chance(0.2)
        self.division = ""
        if self.nodes == 2 and not (self.updates_locally or self.codec):
            kinds = ["", "", "", "sum_alone", "divide_in_node", "divide_later"]
            self.division = self.random.choice(kinds)

    def chance(self, probability: float) -> bool:
        """Whether something of this probability happens."""
        return self.random.random() < probability

    def loop(self) -> d.Loop:
        """Return the loop."""
        count = 2 if self.chance(0.15) and not self.updates_locally else 1
        plain = self.updates_locally or self.codec
        kinds, weights = ["float32", "float64", "bfloat16"], [0.8, 0.1, 0.1]
        self.dtype = "float32" if plain else self.random.choices(kinds, weights)[0]
        self.models = [self.model() for _ in range(count)]
        optimizers = [self.optimizer() for _ in self.models]
        sharding = self.sharding()
        return d.Loop(
            self.seed,
            self.ranks,
            tuple(self.models),
            tuple(optimizers),
            tuple(self.actions(optimizers)),
            self.options(),
            sharding=sharding,
        )

    def options(self) -> dict[str, Any]:
        """Draw a session's options."""
        options: dict[str, Any] = {}
        if self.chance(0.4):
            options["strategy"] = self.random.choice(["p3", "slicing", "wfbp"])
            # Round more nodes the sum of a block begins elsewhere: other roundings than torch's.
            if not self.updates_locally and self.chance(0.3) and self.nodes == 2:
                options["strategy"] = "ring"
        if self.chance(0.3) and options.get("strategy") in (None, "p3", "slicing"):
            options["slice_elems"] = self.random.choice([1, 3, 7, 64])
        if self.chance(0.2) and not self.updates_locally:
            options["check_every"] = self.random.choice([1, 2])
        if self.codec:
            known = _LOCAL_CODECS if self.updates_locally else _CODECS
            options["codec"] = self.random.choice(known)
            options.pop("strategy", None)
        if self.updates_locally:
            options["update"] = self.local_updates(options)
        return options

    def local_updates(self, options: dict[str, Any]) -> str:
        """Draw the text of local updates."""
        layers = sum(
            not one.frozen and one.tied_to is None and one.same_as is None
            for one in self.models[0].blocks
        )
        fragments = self.random.randint(1, max(1, min(3, layers)))
        steps = self.random.randrange(fragments, 7)
        outer = self.random.choice(["average", "sgd", "nesterov"])
        if str(options.get("codec", "")).startswith("topk"):
            outer = "average"
        given = {
            "steps": steps,
            "fragments": fragments,
            "overlap_steps": self.random.randrange(steps // fragments + 1),
            "mix": self.random.choice([1.0, 0.5]),
            "outer": outer,
        }
        return "local:" + ",".join(f"{name}={value}" for name, value in given.items())

    # ---- models

    def model(self) -> d.Model:
        """Draw a model, of which something is always trained."""
        blocks: list[d.Block] = [d.Block("linear", self.random.choice(["plain", "residual"]))]
        for number in range(1, self.random.randint(2, 5)):
            blocks.append(self.block(number, blocks))
        extras = [one for one in _EXTRAS if self.chance(0.12)]
        return d.Model(tuple(blocks), tuple(extras), self.dtype)

    def block(self, number: int, before: list[d.Block]) -> d.Block:
        """Draw a block."""
        once = [i for i, one in enumerate(before) if one.same_as is None]
        if self.chance(0.1):
            again = [i for i in once if before[i].call in ("plain", "residual", "no_grad")]
            if again:
                return d.Block("linear", same_as=self.random.choice(again))
        kind = self.random.choice(_KINDS)
        owners = [
            i
            for i in once
            if before[i].kind in TIES and not before[i].frozen and not before[i].norm
        ]
        tied_to = norm = None
        if kind in TIES and self.chance(0.25):
            tied_to = self.random.choice(owners) if owners else None
        elif kind in TIES and self.chance(0.25) and self.dtype != "bfloat16":
            norm = self.random.choice(_NORMS)
        kinds, weights = [*_USES_ONCE, "reentrant", "never"], [50, 20, 10, 5, 5, 5]
        call = self.random.choices(kinds, weights)[0]
        when = None
        if self.chance(0.12):
            modulus = self.random.choice([2, 3])
            when = (modulus, self.random.randrange(modulus), False)
        dtype = None
        if self.dtype == "float32" and not self.updates_locally and self.chance(0.05):
            dtype = "float64"
        return d.Block(kind, call, norm, self.chance(0.15), tied_to, None, when, dtype)

    def sharding(self) -> d.Sharding:
        """Draw how models are sharded."""
        reduced = param = None
        if self.dtype == "float32" and self.chance(0.35):
            reduced = self.random.choice(["bfloat16", "float32", "float64"])
            param = "bfloat16" if reduced != "float64" and self.chance(0.8) else None
            # Its buffers stay in float32, by which torch multiplies no bfloat16.
            if any(block.norm == "spectral_norm" for one in self.models for block in one.blocks):
                param = None
        units = []
        # Torch lets one unit alone hold a parameter; blocks of two models go by the same numbers.
        tied = {
            place
            for model in self.models
            for at, block in enumerate(model.blocks)
            for place in (at, block.tied_to)
            if block.tied_to is not None
        }
        count = max(len(model.blocks) for model in self.models)
        number = 0
        while number < count:
            joins = number + 1 < count and self.chance(0.12)
            members = (number, number + 1) if joins and self._always(number + 1) else (number,)
            if not self._always(number):
                members = (number,)
            if tied.isdisjoint(members) and self.chance(0.75):
                units.append(members)
            number += len(members)
        return d.Sharding(
            self.local,
            tuple(units),
            param,
            reduced,
            self.division,
            keeps=self.chance(0.25),
            columns=self.chance(0.15),
            zeros=self.chance(0.15),
        )

    def _always(self, number: int | None) -> bool:
        """Whether a block is called once in every forward, by itself."""
        for model in self.models:
            blocks = model.blocks
            if number is None or number >= len(blocks):
                return False
            block = blocks[number]
            if block.when or block.same_as is not None or block.call not in ("plain", "residual"):
                return False
            if any(one.same_as == number for one in blocks):
                return False
        return True

    def optimizer(self) -> d.Optimizer:
        """Draw an optimizer."""
        kind, given = self.random.choice(_OPTIMIZERS)
        options = dict(given)
        if self.chance(0.25):
            options["foreach"] = self.chance(0.7)
        elif self.chance(0.2) and kind in ("Adam", "AdamW"):
            options["fused"] = self.dtype != "bfloat16"
        scheduler = self.random.choice(_SCHEDULERS) if self.chance(0.3) else None
        return d.Optimizer(kind, options, self.random.choice([1, 1, 2]), scheduler)

    # ---- the loop

    def actions(self, optimizers: list[d.Optimizer]) -> list[d.Action]:
        """Draw what the program does."""
        self.clips = self.random.choice([None, None, "norm", "norm-foreach", "value"])
        self.zero = d.Action("zero", 0, None, {"whose": "model", "to_none": self.chance(0.75)})
        self.at_start = self.chance(0.4)
        self.accumulates = self.random.choice([1, 1, 1, 2, 3])
        self.closes_over = self.chance(0.08) and self.accumulates == 1
        self.looks = self.random.choice([0.0, 0.2, 0.5])
        actions: list[d.Action] = []
        for step in range(self.random.randint(2, 6 if self.updates_locally else 4)):
            for number, optimizer in enumerate(optimizers):
                actions += self.one_step(number, optimizer, is_first=step == 0)
            actions += self.between()
        for number in range(len(self.models)):
            actions.append(d.Action("read", number, None, {"what": "state_dict"}))
            actions.append(d.Action("read", number, None, {"what": "optimizer_state"}))
        return actions

    def one_step(self, number: int, optimizer: d.Optimizer, *, is_first: bool) -> list[d.Action]:
        """Draw the actions of one step of one model."""
        zero = d.Action("zero", number, None, self.zero.given)
        actions = [zero] if self.at_start or number else []
        if self.closes_over and self.chance(0.6):
            actions.append(d.Action("step", number, None, {"closure": self.backward(number)}))
            return [*actions, zero]
        # Torch alone adds up several backwards of a model of which a step needs only one.
        kept = self.kept()
        for turn in range(self.accumulates):
            given = self.backward(number)
            if turn < self.accumulates - 1 and kept != SEND:
                given["sends"] = kept
            if self.chance(0.3):
                given["is_last"] = turn == self.accumulates - 1
            actions.append(d.Action("backward", number, None, given))
        if self.chance(0.2) or (self.codec and is_first):
            actions.append(d.Action("read", number, None, {"what": "gradients"}))
        if not self.updates_locally and self.chance(0.1):
            actions.append(d.Action("read", number, None, {"what": "evaluate"}))
        if self.clips and self.chance(0.8):
            limit = self.random.choice([0.01, 0.1, 1.0])
            actions.append(d.Action("clip", number, None, {"how": self.clips, "limit": limit}))
        if self.chance(0.08) and not is_first:
            return [*actions, zero]
        actions.append(d.Action("step", number))
        if optimizer.scheduler is not None:
            actions.append(d.Action("schedule", number))
        if not self.at_start:
            actions.append(zero)
        return actions

    def kept(self) -> str:
        """Draw what all backwards of a step but the last do with their gradients."""
        ways = [SEND, KEEP_WHOLE]
        # With more nodes the reference is a hook, which torch calls for kept shards, too. Where a
        # unit is used twice HSDP averages kept shards alone (docs/sharded.md).
        once = all(
            block.same_as is None and block.call in (*_USES_ONCE, "never")
            for model in self.models
            for block in model.blocks
        )
        if self.nodes == 2 and once:
            ways.append(KEEP_SHARDS)
        kept = self.random.choice(ways)
        self.repeats = kept != KEEP_SHARDS
        return kept

    def backward(self, number: int) -> dict[str, Any]:
        """Draw the arguments of a forward and backward: model 1 judges what model 0 makes."""
        self.data += 1
        through = [0, 1] if number else [0]
        given: dict[str, Any] = {"through": through, "data": self.data}
        if number:
            given["detach"] = True
        if getattr(self, "repeats", False) and self.chance(0.1):
            given["forwards"] = 2
        return given

    def between(self) -> list[d.Action]:
        """Draw what happens between steps."""
        number = self.random.randrange(len(self.models))
        actions = []
        if self.chance(self.looks):
            actions.append(d.Action("read", number, None, {"what": self.random.choice(_READS)}))
        if self.chance(0.1):
            actions.append(d.Action("hyper", number, None, {"factor": 0.5}))
        if self.chance(0.08):
            actions.append(d.Action("write", number, None, {"factor": 0.875}))
        if self.updates_locally and self.chance(0.2):
            actions.append(d.Action("synchronize", 0))
        if self.chance(0.12):
            # A checkpoint has each buffer of some rank, also where two are the same memory.
            apart = not {"overlapping", "shared"}.intersection(self.models[0].extras)
            swaps = len(self.models) == 1 and not self.updates_locally and apart
            actions.append(d.Action("swap" if swaps and self.chance(0.6) else "resume", number))
        return actions


def generate_sharded(seed: int, ranks: tuple[int, ...] = (4,)) -> d.Loop:
    """Return the loop of a seed.

    Args:
        seed: any integer that is not negative.
        ranks: world sizes to choose from; nodes have two ranks, half of those of eight have four.
    """
    return ShardedGenerator(seed, ranks).loop()
