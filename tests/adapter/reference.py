"""What training must give: every rank's gradients, summed in rank order and divided, then stepped.

It uses torch alone, in one thread, so that whatever the adapter does can be held against it bit by
bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
Loop = Callable[[nn.Module, torch.optim.Optimizer, Any], None]


def mean_in_rank_order(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Return ((g0 + g1) + g2 ...) / N in f32 (f64 for f64); a missing gradient counts as zeros."""
    known = next((one for one in gradients if one is not None), None)
    if known is None:
        return None
    wide = torch.float64 if known.dtype is torch.float64 else torch.float32
    total: Tensor | None = None
    for gradient in gradients:
        term = torch.zeros_like(known, dtype=wide) if gradient is None else gradient.to(wide)
        total = term if total is None else total + term
    assert total is not None
    return (total / len(gradients)).to(known.dtype)


def train_reference(
    world_size: int,
    steps: int,
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    loss: Callable[[nn.Module, int, int], Tensor | None],
    *,
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    before_step: Callable[[nn.Module], None] | None = None,
) -> list[nn.Module]:
    """Train copies of a model, one a rank, and return them.

    Args:
        world_size: number of ranks.
        steps: number of steps, from 1 on.
        make_model: builds the same model each time.
        make_optimizer: builds its optimizer.
        loss: of (model, rank, step); None: this rank runs no backward.
        make_scheduler: builds a learning rate scheduler that is stepped after each step.
        before_step: called with the model when `.grad` is the mean, such as for clipping.
    """
    models = [make_model() for _ in range(world_size)]
    trained = [make_optimizer(model) for model in models]
    schedulers = [make_scheduler(one) for one in trained] if make_scheduler else []
    for step in range(1, steps + 1):
        for rank, model in enumerate(models):
            model.zero_grad()
            value = loss(model, rank, step)
            if value is not None:
                value.backward()  # type: ignore[no-untyped-call]
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            mean = mean_in_rank_order([parameter.grad for parameter in parameters])
            for parameter in parameters:
                parameter.grad = None if mean is None else mean.clone()
        for model, optimizer in zip(models, trained, strict=True):
            if before_step is not None:
                before_step(model)
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return models


def same_bits(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether two lists of tensors are equal in every bit."""
    return len(one) == len(other) and all(
        first.dtype is second.dtype
        and first.shape == second.shape
        and first.detach()
        .contiguous()
        .view(-1)
        .view(torch.uint8)
        .equal(second.detach().contiguous().view(-1).view(torch.uint8))
        for first, second in zip(one, other, strict=True)
    )


def snapshot(model: nn.Module) -> list[Tensor]:
    """Copy all parameters, reading them the way a user would."""
    return [parameter.detach().clone() for parameter in model.parameters()]
