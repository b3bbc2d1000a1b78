"""Draws a loop from a seed.

Most loops are ordinary ones in strange clothes, which must be right; some hold a construct that may
be refused (see `verdict.REFUSALS`), which must be right or refused by the words given there.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from tests.loop_fuzzing import description as d
from tests.loop_fuzzing.kept_loops import add_kept
from tests.loop_fuzzing.models import EXTRAS, KINDS, NORMS, OLD_NORMS, TIES
from tests.loop_fuzzing.odd_loops import add_oddities
from tests.loop_fuzzing.optimizers import SCHEDULERS
from tests.loop_fuzzing.program import READS

_OPTIMIZERS: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"lr": 0.05, "momentum": 0.5, "dampening": 0.1, "maximize": True},
    ],
    "Adam": [{"lr": 0.02}, {"lr": 0.02, "amsgrad": True}, {"lr": 0.02, "weight_decay": 0.1}],
    "AdamW": [{"lr": 0.02}, {"lr": 0.02, "betas": [0.8, 0.9], "amsgrad": True}],
    "Adamax": [{"lr": 0.02}],
    "NAdam": [{"lr": 0.02}, {"lr": 0.02, "decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{"lr": 0.02}],
    "RMSprop": [{"lr": 0.01}, {"lr": 0.01, "momentum": 0.5, "centered": True}],
    "Rprop": [{"lr": 0.01}],
    "Adadelta": [{"lr": 1.0}],
    "Adagrad": [{"lr": 0.05}, {"lr": 0.05, "initial_accumulator_value": 0.1, "lr_decay": 0.1}],
    "ASGD": [{"lr": 0.05, "t0": 2}],
    "Adafactor": [{"lr": 0.05}],
    "Muon": [{"lr": 0.05}, {"lr": 0.05, "momentum": 0.9, "nesterov": False, "weight_decay": 0.1}],
}
_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
_TENSOR_LR = ("Adam", "AdamW", "SGD", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam")
_NO_FOREACH = ("Adafactor", "Muon")
_SIMPLE = ("linear", "linear_no_bias", "narrow", "uncalled", "listed")
_MATRICES = ("linear_no_bias", "words")


class Generator:
    """Draws one loop."""

    def __init__(self, seed: int, ranks: tuple[int, ...]) -> None:
        """Draw from a seed, with one of these world sizes."""
        self.random = random.Random(seed)
        self.seed = seed
        self.ranks = self.random.choice(ranks)
        self.strange: set[str] = set()
        self.serves = self.chance(0.08)
        self.odd = self.chance(0.2)
        self.data = 0
        # Muon takes matrices alone, in a torch that has it.
        self.of_matrices = not self.serves and hasattr(torch.optim, "Muon") and self.chance(0.04)

    def chance(self, probability: float) -> bool:
        """Whether something of this probability happens."""
        return self.random.random() < probability

    def loop(self) -> d.Loop:
        """Return the loop."""
        count = 2 if self.chance(0.2) else 1
        models = tuple(self.model() for _ in range(count))
        optimizers = tuple(self.optimizer(model) for model in models)
        self.models, self.optimizers = models, optimizers
        buffers = self.buffers()
        # With other rules some buffers are averaged over the ranks that have data.
        self.may_join = buffers == "local"
        self.grown: set[int] = set()
        self.frozen: set[int] = set()
        self.prepared_frozen: set[int] = set()
        actions = self.actions(count)
        defer = None if self.chance(0.6) else self.chance(0.4)
        return d.Loop(
            self.seed,
            self.ranks,
            models,
            optimizers,
            tuple(actions),
            self.options(),
            defer,
            buffers,
            tuple(sorted(self.strange)),
        )

    def options(self) -> dict[str, Any]:
        """Draw a session's options."""
        options: dict[str, Any] = {}
        if self.serves:
            options["update"] = "server"
        if self.chance(0.4):
            options["strategy"] = self.random.choice(
                ["p3", "slicing", "wfbp", "kvstore", "deferred-pull"]
            )
        if self.chance(0.3) and options.get("strategy") in (None, "p3", "slicing"):
            options["slice_elems"] = self.random.choice([1, 3, 7, 64])
        return options

    def buffers(self) -> str:
        """Draw what happens to buffers."""
        mode = self.random.choice(["broadcast", "broadcast", "average", "local"])
        calls = {block.call for model in self.models for block in model.blocks}
        # A functional call lists parameters in mid-forward, where buffers of a step may land.
        return "local" if "functional" in calls else mode

    # ---- models

    def model(self) -> d.Model:
        """Draw a model with at least one parameter that is always used."""
        dtype = self.random.choices(
            ["float32", "float64", "bfloat16", "float16"], [0.76, 0.08, 0.1, 0.06]
        )[0]
        if self.serves and dtype == "float64":
            # The servers have no kernel for it, and say so in prepare().
            dtype = "float32"
        blocks: list[d.Block] = []
        for number in range(self.random.randint(1, 5)):
            blocks.append(self.block(number, blocks, dtype))
        if dtype == "float32" and self.chance(0.08) and not (self.serves or self.of_matrices):
            number = self.random.randrange(len(blocks))
            block = blocks[number]
            tied = block.tied_to is not None or any(one.tied_to == number for one in blocks)
            if block.kind in _SIMPLE and block.norm is None and not tied:
                blocks[number] = d.Block(block.kind, frozen=block.frozen, dtype="float64")
        if _repeats_reentrant(blocks):
            # Each recomputation is a backward of its own, and how many there are varies by step.
            self.strange.add("several_backwards")
        extras = [one for one in EXTRAS if one != "complex" and self.chance(0.12)]
        if self.of_matrices:
            blocks = [*blocks, d.Block("linear_no_bias")]
            return d.Model(tuple(blocks), ("transposed",) if self.chance(0.3) else (), dtype)
        if not any(_always_trained(block) for block in blocks) and "scale" not in extras:
            extras.append("scale")
        if self.serves:
            extras = [one for one in extras if one != "strided"]
        if self.odd and self.chance(0.05):
            extras.append("complex")
        return d.Model(tuple(blocks), tuple(extras), dtype)

    def block(self, number: int, before: list[d.Block], dtype: str) -> d.Block:
        """Draw a block."""
        if before and self.chance(0.1):
            owners = [i for i, one in enumerate(before) if one.same_as is None]
            return d.Block("linear", same_as=self.random.choice(owners))
        kinds = [kind for kind in KINDS if kind != "sparse_words"]
        if self.serves:
            # Which words are chosen must not hang on rounding.
            kinds.remove("words")
        kind = self.random.choice(kinds)
        if self.of_matrices:
            kind = self.random.choice(_MATRICES)
        elif self.odd and dtype == "float32" and not self.serves and self.chance(0.06):
            kind = "sparse_words"
        if kind in ("lstm", "gru", "spectral_norm") and dtype in ("float16",):
            kind = "linear"
        tied_to, norm = None, None
        if kind in TIES:
            owners = [
                i
                for i, one in enumerate(before)
                if one.kind in TIES
                and one.norm is None
                and one.same_as is None
                and not one.frozen
                and one.dtype is None
            ]
            if owners and self.chance(0.35):
                tied_to = self.random.choice(owners)
            elif self.chance(0.35):
                norm = self.random.choice(list(NORMS))
                if dtype in ("bfloat16", "float16"):
                    norm = "symmetric"
        call = self.random.choices(
            ["plain", "residual", "checkpoint", "reentrant", "functional", "no_grad", "never"],
            [50, 15, 9, 5, 8, 5, 4],
        )[0]
        if norm in OLD_NORMS and call in ("functional", "checkpoint", "reentrant"):
            call = "plain"
        when = None
        if self.chance(0.15):
            modulus = self.random.choice([2, 3])
            when = (modulus, self.random.randrange(modulus), self.chance(0.5))
        frozen = tied_to is None and self.chance(0.1)
        if frozen and norm in OLD_NORMS:
            frozen = False
        return d.Block(kind, call, norm, frozen, tied_to, None, when)

    # ---- optimizers

    def optimizer(self, model: d.Model) -> d.Optimizer:
        """Draw an optimizer."""
        kind = "SGD" if self.serves else self.random.choice(list(_OPTIMIZERS))
        if self.of_matrices:
            kind = "Muon"
        elif kind == "Muon" or not hasattr(torch.optim, kind):
            kind = "AdamW"
        if "complex" in model.extras or (kind == "Adafactor" and _has_empty(model)):
            kind = "SGD"
        options = dict(self.random.choice(_OPTIMIZERS[kind]))
        if not self.serves:
            if self.chance(0.25) and kind not in _NO_FOREACH:
                options["foreach"] = self.chance(0.7)
            elif self.chance(0.3) and kind in _FUSED and "maximize" not in options:
                options["fused"] = True
            if kind in _TENSOR_LR and self.chance(0.1) and not options.get("foreach"):
                options["tensor_lr"] = True
            if self.chance(0.08) and kind != "Muon":
                options["maximize"] = True
        if "complex" in model.extras:
            options.pop("fused", None)
        if "fused" in options and (model.dtype in ("float16", "bfloat16") or "momentum" in options):
            # Torch's own breaks off: momentum of a parameter that had no gradient at first.
            del options["fused"]
        scheduler = self.random.choice(list(SCHEDULERS)) if self.chance(0.4) else None
        if scheduler in ("one-cycle", "cyclic") and kind not in ("SGD", "Adam", "AdamW"):
            scheduler = "exponential"
        if scheduler == "one-cycle" and kind == "SGD" and not options.get("momentum"):
            scheduler = "cosine"
        if options.get("tensor_lr") and scheduler is not None:
            scheduler = self.random.choice(["step", "exponential", "lambda"])
        return d.Optimizer(kind, options, self.random.choice([1, 1, 2, 3]), scheduler)

    # ---- the loop

    def actions(self, count: int) -> list[d.Action]:
        """Draw what the program does."""
        self.style: dict[str, Any] = {
            "zero": self.random.choice(["start", "between", "end", "end"]),
            "whose": self.random.choice(["model", "optimizer"]),
            "to_none": self.chance(0.85),
            "clip": self.random.choice(
                [None, None, "norm", "norm-foreach", "value", "session", "session"]
            ),
            "read": self.random.choice([0.0, 0.15, 0.5]),
            "autocast": self.chance(0.12),
            "closure": self.chance(0.08),
            "accumulate": self.random.choice([1, 1, 1, 1, 2, 3]),
            "no_sync": self.chance(0.8),
            "scaled": self.chance(0.07),
            "penalty": self.chance(0.06) and self._is_smooth(),
            # Drawn apart, so that what a seed gives otherwise stays.
            "weighs": random.Random(f"weights {self.seed}").random() < 0.15,
        }
        self.forgets = self.chance(0.02)
        if self.serves:
            self.style.update(clip=None, closure=False, scaled=False)
        dtypes = {model.dtype for model in self.models}
        if dtypes != {"float32"} or any("complex" in model.extras for model in self.models):
            self.style.update(autocast=False, scaled=False)
        if not self._adds_up_in_one():
            self.style.update(no_sync=True)
        if any("complex" in model.extras for model in self.models):
            self.style.update(clip=None)
        if any(b.kind == "sparse_words" for model in self.models for b in model.blocks):
            # Torch has neither zeros in place nor clipping by value for sparse gradients.
            self.style.update(to_none=True)
            if self.style["clip"] == "value":
                self.style["clip"] = "norm"
        if self.style["scaled"]:
            # A step that the scaler skips leaves gradients as they are, whatever the rule.
            self.forgets = False
            self.style.update(closure=False, penalty=False)
        if count == 2 or self.style["accumulate"] > 1 or self.style["autocast"]:
            self.style["closure"] = False
        if self.serves or count == 2 or self.ranks == 1 or "float16" in dtypes:
            self.style["weighs"] = False
        if self.style["weighs"]:
            self.style["closure"] = False
            if self.style["clip"] == "session":
                # The norm of weighted means is that of means times a factor: other roundings.
                self.style["clip"] = "norm"
        actions: list[d.Action] = []
        for _ in range(self.random.randint(2, 5)):
            actions += self.reads(count)
            order = [0, 1] if count == 2 else [0]
            if count == 2 and self.chance(0.2):
                order = [1, 0]
            for number in order:
                actions += self.one_step(number, count)
            actions += self.between(count)
        for number in range(count):
            actions.append(d.Action("read", number, None, {"what": "state_dict"}))
            if not self.serves:
                actions.append(d.Action("read", number, None, {"what": "optimizer_state"}))
        return actions

    def one_step(self, number: int, count: int) -> list[d.Action]:
        """Draw the actions of one step of one model."""
        style = self.style
        through, detach = self.route(number, count)
        actions: list[d.Action] = []
        zero = d.Action(
            "zero", number, None, {"whose": style["whose"], "to_none": style["to_none"]}
        )
        if style["zero"] == "start" or (count == 2 and not style["closure"]):
            actions.append(zero)
        if style["closure"] and self.chance(0.6):
            closure = self.backward(through, detach)
            actions.append(d.Action("step", number, None, {"closure": closure}))
            actions += self.reads(count)
            return actions if style["zero"] != "end" else [*actions, zero]
        if self.chance(0.08) and not self.serves:
            # A step that is skipped: the gradients are forgotten.
            skipped = {**self.backward(through, detach), **self.weighed()}
            if style["zero"] == "between" and count == 1:
                skipped["zero"] = style["whose"]
            actions.append(d.Action("backward", number, None, skipped))
            if style["clip"] and self.chance(0.4):
                actions.append(self.clip(number))
                if style["scaled"]:
                    actions.append(d.Action("update_scale", number))
            actions.append(zero)
        rounds = style["accumulate"] if not self.serves else 1
        for turn in range(rounds):
            given = self.backward(through, detach)
            if turn == 0:
                given |= self.weighed()
            if style["zero"] == "between" and count == 1 and turn == 0:
                given["zero"] = style["whose"]
            if turn < rounds - 1:
                if style["no_sync"]:
                    given["no_sync"] = True
                else:
                    self.strange.add("several_backwards")
            elif self.chance(0.05) and not self.serves and self._adds_up_in_one():
                given["losses"] = 2
                self.strange.add("several_backwards")
            elif turn and style["no_sync"] and self.chance(0.1):
                given["no_sync"] = True
                if style["clip"]:
                    self.strange.add("all_inside")
            actions.append(d.Action("backward", number, None, given))
            if turn == rounds - 1 and self.chance(0.07):
                actions += self.reads(count, inside=True)
        if style["clip"] and self.chance(0.8):
            actions.append(self.clip(number))
            if (
                self.odd
                and not given.get("no_sync")
                and self._adds_up_in_one()
                and self.chance(0.05)
            ):
                actions.append(d.Action("backward", number, None, self.backward(through, detach)))
        if self.chance(0.08) and not self.serves and not style["scaled"]:
            actions.append(d.Action("read", number, None, {"what": "gradients"}))
        actions.append(d.Action("scaled_step" if style["scaled"] else "step", number))
        if self.chance(style["read"]):
            actions += self.reads(count)
        if self.optimizers[number].scheduler is not None:
            metric = round(self.random.random(), 3)
            given = {"metric": metric} if self.optimizers[number].scheduler == "plateau" else {}
            actions.append(d.Action("schedule", number, None, given))
        if style["zero"] == "end" and not self.forgets:
            actions.append(zero)
        return actions

    def backward(self, through: list[int], detach: bool) -> dict[str, Any]:
        """Draw the arguments of a forward and backward."""
        self.data += 1
        given: dict[str, Any] = {"through": through, "data": self.data}
        if detach:
            given["detach"] = True
        if self.style["autocast"]:
            given["autocast"] = True
        if self.style["scaled"]:
            given["scaled"] = True
            if self.chance(0.2):
                given["explodes"] = self.random.randrange(self.ranks)
        if self.style["penalty"] and len(through) == 1:
            given["penalty"] = True
        return given

    def weighed(self) -> dict[str, Any]:
        """Return what makes a backward the first of a step that averages over samples."""
        return {"weighs": True} if self.style["weighs"] else {}

    def route(self, number: int, count: int) -> tuple[list[int], bool]:
        """Draw which models a batch goes through: model 1 judges what model 0 makes."""
        if count == 1:
            return [0], False
        if number == 1:
            return [0, 1], True
        # With updates on the servers nobody can take back what reaches the other model.
        if self.serves or self.chance(0.3):
            return [0], False
        self.strange.update(("several_backwards", "read_by_some"))
        return [0, 1], False

    def clip(self, number: int) -> d.Action:
        """Draw a clipping."""
        limit = self.random.choice([0.01, 0.1, 1.0])
        given = {"how": self.style["clip"], "limit": limit}
        if self.style["scaled"]:
            given["scaled"] = True
        return d.Action("clip", number, None, given)

    def between(self, count: int) -> list[d.Action]:
        """Draw what happens between steps."""
        number = self.random.randrange(count)
        choices: list[d.Action] = []
        if self.chance(0.7):
            choices.append(d.Action("write", number, None, {"factor": 0.875}))
        if self.chance(0.7):
            choices.append(d.Action("hyper", number, None, {"factor": 0.5}))
        if self.chance(0.08):
            choices.append(d.Action("keep", number))
        if self.chance(0.08):
            choices.append(d.Action("load", number))
        if self.chance(0.05) and not self.serves:
            choices.append(d.Action("reload_optimizer", number))
        if self.chance(0.08):
            choices.append(d.Action("synchronize", number))
        if self.chance(0.15):
            choices.append(d.Action("average", number, self.some_ranks()))
        if self.chance(0.08):
            choices += self.freezing(number)
        if self.chance(0.06) and not self.serves:
            grows = self.optimizers[number].scheduler is None and self._may_grow(number)
            grows = grows and number not in self.grown
            if grows:
                self.grown.add(number)
            if number in self.frozen:
                self.prepared_frozen.add(number)
            # A step that the scaler skipped, or that another model's backward began, ends first.
            zero = d.Action("zero", number, None, {"whose": "optimizer"})
            choices += [zero, d.Action("prepare_again", number, None, {"grows": grows})]
        if self.chance(0.08) and not self.serves and self.may_join and count == 1:
            self.data += 10
            batches = [self.random.randint(1, 3) for _ in range(self.ranks)]
            uneven: dict[str, Any] = {"batches": batches, "data": self.data}
            zero = d.Action("zero", number, None, {"whose": "optimizer"})
            choices += [zero, d.Action("joined", number, None, uneven)]
            self.data += 10
        kinds = {block.kind for block in self.models[number].blocks}
        if "conv2d_channels_last" in kinds and self.chance(0.3):
            given = {"channels_last": self.chance(0.3)}
            some = self.some_ranks()
            if some is not None:
                # It reads gradients, which waits for all where another model began the step.
                choices.append(d.Action("zero", number, None, {"whose": "optimizer"}))
            choices.append(d.Action("reformat", number, some, given))
            if self.serves:
                self.strange.add("reformat")
            elif some is not None:
                # Sums over a parameter then have other bits, and it may be prepared again.
                self.strange.add("layouts")
        return choices

    def _may_grow(self, number: int) -> bool:
        """Whether a vector may be added to a model: Muon takes none."""
        return not self.of_matrices and "complex" not in self.models[number].extras

    def freezing(self, number: int) -> list[d.Action]:
        """Draw a block that is frozen or thawed; one that always trains stays."""
        blocks = self.models[number].blocks
        always = [i for i, block in enumerate(blocks) if _always_trained(block)]
        spare = [
            i
            for i, block in enumerate(blocks)
            if block.same_as is None and block.norm is None and (i not in always[:1])
        ]
        if not spare or ("scale" not in self.models[number].extras and not always):
            return []
        block = self.random.choice(spare)
        tied = [
            block,
            blocks[block].tied_to,
            *(i for i, b in enumerate(blocks) if b.tied_to == block),
        ]
        if any(one in always[:1] for one in tied) and "scale" not in self.models[number].extras:
            return []
        trained = self.chance(0.5)
        if not trained:
            self.frozen.add(number)
        elif blocks[block].frozen or number in self.prepared_frozen:
            self.strange.add("thawed")
        return [d.Action("freeze", number, None, {"block": block, "trained": trained})]

    def reads(self, count: int, inside: bool = False) -> list[d.Action]:
        """Draw some reads; `inside`: between backward and step, where some attach gradients."""
        if not inside and not self.chance(self.style["read"]):
            return []
        actions = []
        for _ in range(self.random.randint(1, 2)):
            what = self.random.choice([*READS, "evaluate", "inference", "inference"])
            number = self.random.randrange(count)
            if what in ("gradients", "twin") or (what == "optimizer_state" and self.serves):
                what = "state_dict"
            if inside:
                what = self.random.choice(["evaluate", "inference", "attributes", "state_dict"])
                if self.serves:
                    what = "evaluate"
                    self.strange.add("server_reads")
            actions.append(d.Action("read", number, self.some_ranks(), {"what": what}))
        return actions

    def some_ranks(self) -> tuple[int, ...] | None:
        """Draw who does something that is allowed to some."""
        if self.chance(0.6):
            return None
        return tuple(
            sorted(self.random.sample(range(self.ranks), self.random.randint(1, self.ranks)))
        )

    def _adds_up_in_one(self) -> bool:
        """Whether gradients of several backwards round as torch's do, also outside no_sync().

        A functional call averages in between.
        """
        return not any(b.call == "functional" for model in self.models for b in model.blocks)

    def _is_smooth(self) -> bool:
        """Whether second derivatives exist for every part of the models."""
        return all(
            block.kind in _SIMPLE and block.norm is None and block.call in ("plain", "residual")
            for model in self.models
            for block in model.blocks
        )


def _repeats_reentrant(blocks: list[d.Block]) -> bool:
    """Whether parameters of a reentrant checkpoint are used at several places.

    How many of them fire hangs on what comes before, whose output may need no gradient at times.
    """
    for number, block in enumerate(blocks):
        owner = block.tied_to if block.tied_to is not None else number
        places = [
            one
            for other, one in enumerate(blocks)
            if other == owner or one.tied_to == owner or one.same_as in (owner, number)
        ]
        calls = {
            blocks[one.same_as].call if one.same_as is not None else one.call for one in places
        }
        if len(places) > 1 and "reentrant" in calls:
            return True
    return False


def _has_empty(model: d.Model) -> bool:
    return bool({"empty", "empty_used"} & set(model.extras))


def _always_trained(block: d.Block) -> bool:
    return (
        not block.frozen
        and block.same_as is None
        and block.when is None
        and block.call in ("plain", "residual")
        and block.kind not in ("words", "sparse_words")
    )


def generate(seed: int, ranks: tuple[int, ...] = (2, 3), *, odd: bool = True) -> d.Loop:
    """Return the loop of a seed.

    Args:
        seed: any integer that is not negative.
        ranks: world sizes to choose from.
        odd: whether it may have what only few programs do, see `odd_loops.py` and `kept_loops.py`.
    """
    loop = Generator(seed, ranks).loop()
    return add_kept(add_oddities(loop)) if odd else loop
