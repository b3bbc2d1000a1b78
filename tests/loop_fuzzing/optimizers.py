"""Builds described optimizers and schedulers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.loop_fuzzing import description
from tests.loop_fuzzing.oddities import Counts, subclass

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.8),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 6),
    "warm-up": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.25, total_iters=3),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one-cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=64),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, 0.001, 0.05, step_size_up=2, cycle_momentum=False
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
}


def build_optimizer(
    described: description.Optimizer,
    model: nn.Module,
    around: Callable[[str], Callable[..., Any]],
) -> torch.optim.Optimizer:
    """Build an optimizer over all parameters of a model, in groups that differ.

    Args:
        described: what to build.
        model: whose parameters.
        around: returns what a `step` of one's own does.
    """
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = []
    for number in range(described.groups):
        members = parameters[number :: described.groups]
        if members:
            group: dict[str, Any] = {"params": members}
            if number:
                group["lr"] = described.options.get("lr", 0.01) / (number + 1)
                if described.kind not in ("Rprop", "Adafactor"):
                    group["weight_decay"] = 0.01 * number
            groups.append(group)
    options = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in described.options.items()
    }
    if options.pop("tensor_lr", False):
        options["lr"] = torch.tensor(options["lr"])
    if described.counts is not None:
        return Counts(groups, described.counts)
    kind = getattr(torch.optim, described.kind)
    if described.derived is not None:
        how, inside = described.derived
        kind = subclass(kind, how, lambda _: around(inside))
    return kind(groups, **options)  # type: ignore[no-any-return]


def build_scheduler(kind: str | None, optimizer: torch.optim.Optimizer) -> Any:
    """Build a scheduler, or return None."""
    return None if kind is None else SCHEDULERS[kind](optimizer)
