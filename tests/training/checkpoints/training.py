"""A small training whose every batch is known, so that two runs can be compared step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gradlane
from tests.training.model.models import seeded


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 300)
        self.norm = nn.BatchNorm1d(300)
        self.last = nn.Linear(300, 20)

    def forward(self, values: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(values))))  # type: ignore[no-any-return]


def batch_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    """The loss of a rank's batch of a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    loss: Tensor = (model(torch.randn(4, 20, generator=generator)) - 1.0).square().mean()
    return loss


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(
    session: gradlane.Session,
    last: int,
    *,
    optimizer_name: str = "adamw",
    same_batches: bool = False,
    after_step: Callable[[int], Any] = lambda step: None,
) -> tuple[int, list[float]]:
    """Go on from the last checkpoint to a step; returns where it began, and all losses."""
    model = seeded(Model)
    model, optimizer = session.prepare(model, optimizer_of(optimizer_name, model))
    begun = session.restore()
    losses = []
    for step in range(begun + 1, last + 1):
        loss = batch_loss(model, 0 if same_batches else session.rank, step)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        after_step(step)
    session.synchronize()
    return begun, losses
