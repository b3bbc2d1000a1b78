"""A step that a program ends while its means are not there, only their norm."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.training.model.held_core import HeldCore
from tests.training.model.ranks import run_ranks
from tests.training.model.test_training import batch

TrainStep = Callable[[Tensor, Callable[[], object]], Tensor]
"""Trains a step on a loss, calls a function after backward, and returns the gradients' norm."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def check_norm_alone_is_waited_for(
    steps: int,
    begin: Callable[[Any, Any], TrainStep],
    make_optimizer: Callable[[nn.Module], Any] = sgd,
) -> None:
    """Check that two ranks end a step, and have its norm, while the core holds a layer's means.

    Args:
        steps: of the training, of which the last one is held.
        begin: returns how a session's optimizer trains a step.
        make_optimizer: makes it, or several, of the model.
    """
    core = HeldCore()
    norms: dict[int, float] = {}
    barrier = threading.Barrier(3)

    def body(session: Any) -> None:
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = make_optimizer(model)
        session.prepare(model, optimizer)
        train_step = begin(session, optimizer)
        for step in range(steps):
            meet = barrier.wait if step == steps - 1 else lambda _: None
            loss = model(batch((2, 4), session.rank, step)).sum()
            norm = train_step(loss, lambda meet=meet: meet(20))  # type: ignore[misc]
            model.zero_grad()
            if step == steps - 1:
                # No mean of the first layer is here.
                norms[session.rank] = norm.item()
                barrier.wait(20)
        assert model[0].weight.grad is None

    thread = threading.Thread(target=run_ranks, args=(2, body), kwargs={"core": core}, daemon=True)
    thread.start()
    barrier.wait(20)
    core.held.update({0, 1})
    barrier.wait(20)
    assert norms[0] == norms[1] > 0
    core.release(0, 1)
    thread.join(20)
    assert not thread.is_alive()
