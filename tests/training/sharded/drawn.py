"""Programs of sharded models drawn at random, each beside torch's own HSDP.

A number stands for a program: the same on every rank, and whenever it is drawn again. What a
program may do is what HSDP can do, too; gradlane gives its bits, or refuses with a reason.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

SEND, KEEP_WHOLE, KEEP_SHARDS = "send", "keep whole", "keep shards"
"""What a backward call does with its gradients."""


@dataclass(frozen=True)
class Backward:
    """One backward call of a step.

    Attributes:
        how: one of the three ways.
        skips: whether a block is left out.
        twice: whether another one is used twice.
    """

    how: str
    skips: bool
    twice: bool


@dataclass(frozen=True)
class Step:
    """One step of a program.

    Attributes:
        backwards: one after another.
        clips: whether gradients are clipped before the optimizer's step.
        steps: whether the optimizer steps; otherwise gradients are thrown away.
        to_none: whether gradients are set to None afterwards, or to zero.
    """

    backwards: tuple[Backward, ...]
    clips: bool
    steps: bool
    to_none: bool


@dataclass(frozen=True)
class Drawn:
    """A program.

    Attributes:
        options: of `programs.Pair`, but for `change`.
        freezes: whether some parameters are not trained.
        division: of the attributes of `programs` that change how torch divides, or empty.
        steps: of the training.
    """

    options: dict[str, Any]
    freezes: bool
    division: str
    steps: tuple[Step, ...]


def draw(number: int) -> Drawn:
    """Return the program of a number."""
    one = random.Random(number)
    options: dict[str, Any] = {"optimizer": one.choice(["AdamW", "SGD", "Adagrad", "two"])}
    recomputes = one.random() < 0.25
    options |= {"tied": one.random() < 0.2, "recomputes": recomputes}
    options["reentrant"] = recomputes and one.random() < 0.4
    policies = (None, None, torch.bfloat16, torch.float32, torch.float64)
    reduced = one.choice(policies)
    if reduced is not None:
        narrow = torch.bfloat16 if reduced != torch.float64 else None
        options["policy"] = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=reduced)
    if one.random() < 0.2:
        options["init"] = {"strategy": one.choice(["ring", "slicing", "wfbp"])}
    freezes = not options["tied"] and not options["reentrant"] and one.random() < 0.2
    # Optimizers of two parts are of whole models.
    freezes &= options["optimizer"] != "two"
    division = one.choice(["", "", "", "sum_alone", "divide_in_node", "divide_later"])
    steps = tuple(_step(one, options) for _ in range(one.randint(2, 4)))
    return Drawn(options, freezes, division, steps)


def _step(one: random.Random, options: dict[str, Any]) -> Step:
    count = one.randint(1, 3)
    kept = one.choice([SEND, KEEP_WHOLE, KEEP_SHARDS])
    # Gradients that reentrant recomputing makes belong to a backward of their own.
    can_vary = not options["reentrant"]
    # With shards kept in the node HSDP averages these alone where a unit is used twice, and adds
    # the mean of its new gradients: another order of sums, known and left out.
    can_repeat = can_vary and not options["recomputes"]
    backwards = []
    for number in range(count):
        how = SEND if number == count - 1 else kept
        skips, twice = can_vary and one.random() < 0.15, can_repeat and one.random() < 0.15
        adds_kept = how == SEND and kept == KEEP_SHARDS and count > 1
        backwards.append(Backward(how, skips, twice and not adds_kept))
    return Step(
        tuple(backwards),
        clips=one.random() < 0.4,
        steps=one.random() < 0.9,
        to_none=one.random() < 0.7,
    )


def step_of(
    drawn: Drawn, loss_of: Callable[[Any, Tensor], Any]
) -> Callable[[Any, Any, list[Tensor]], None]:
    """Return the steps of a program, for `Pair.train`: both models take each.

    Args:
        drawn: the program.
        loss_of: of a model and its words.
    """
    taken: dict[int, int] = {}

    def step(model: Any, optimizer: Any, data: list[Tensor]) -> None:
        number = taken.get(id(model), 0)
        taken[id(model)] = number + 1
        own = drawn.steps[number]
        for backward, words in zip(own.backwards, data, strict=False):
            model.set_requires_gradient_sync(backward.how != KEEP_WHOLE)
            model.set_requires_all_reduce(backward.how != KEEP_SHARDS)
            model.skips, model.twice = backward.skips, backward.twice
            (loss_of(model, words) / len(own.backwards)).backward()
        model.skips = model.twice = False
        if own.clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        if own.steps:
            optimizer.step()
        for parameter in model.parameters():
            if own.to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    return step
