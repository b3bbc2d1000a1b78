"""Gradients that a program keeps get their means before backward returns, and no others do.

Backward adds to the gradient of a parameter that a forward uses twice. Who else has its memory then
is counted, but autograd may have it, too, for as long as its hooks run: torch 2.7 always does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradlane.training.torch_internals import queue_callback
from tests.training.model.models import seeded
from tests.training.model.ranks import run_ranks

STEPS = 5
SMALL, LARGE = 3, 100
"""Widths of layers whose gradients travel together, and of those whose weights travel alone."""


class Twice(nn.Module):
    """Uses a weight and a bias twice, each as it is; inputs and outputs (N, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.bias = nn.Parameter(torch.randn(width))
        self.width = width

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(inputs @ self.weight + self.bias)
        return hidden @ self.weight + self.bias


class Joined(nn.Module):
    """Uses two weights as one, and that twice, so that their gradients are views of one memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(width, width))
        self.second = nn.Parameter(torch.randn(width, width))
        self.width = width

    def forward(self, inputs: Tensor) -> Tensor:
        both = torch.cat([self.first, self.second])
        return inputs @ both.t() + inputs @ both.square().t()


def hold_memory(model: nn.Module) -> None:
    """Have the memory of each gradient held until backward is over, as by torch 2.7 itself."""
    held: list[Tensor] = []

    def hold(gradient: Tensor) -> None:
        if not held:
            queue_callback(held.clear)
        held.append(gradient.detach())

    for one in model.parameters():
        one.register_hook(hold)  # type: ignore[no-untyped-call]


def loss(model: Any, rank: int, step: int) -> Any:
    return (model(torch.ones(2, model.width)) * (rank + step + 1)).sum()


def gradients(model: nn.Module) -> list[Tensor]:
    return [one.grad for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize("width", [SMALL, LARGE])
@pytest.mark.parametrize("build", [Twice, Joined])
@pytest.mark.parametrize("holds", [False, True])
def test_memory_that_autograd_alone_has_is_not_waited_for(
    holds: bool, build: Callable[[int], Any], width: int, caplog: pytest.LogCaptureFixture
) -> None:
    def body(session: Any) -> None:
        model = seeded(lambda: build(width))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        if holds:
            hold_memory(model)
        for step in range(STEPS):
            loss(model, session.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    caplog.set_level(logging.INFO, "gradlane")
    run_ranks(1, body)
    assert "each step waits for all gradients" not in caplog.text


@pytest.mark.parametrize("width", [SMALL, LARGE])
@pytest.mark.parametrize("build", [Twice, Joined])
@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("keeps", ["flat", "list"])
def test_gradients_that_are_kept_get_their_means(
    keeps: str, holds: bool, build: Callable[[int], Any], width: int
) -> None:
    """They are zeroed in place from the second step on; parameters stay as they are."""

    def body(session: Any) -> list[list[Tensor]]:
        model = seeded(lambda: build(width))
        parameters = [*model.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.0)
        kept = []
        if keeps == "flat":
            kept = [torch.zeros(sum(one.numel() for one in parameters))]
            parts = torch.split(kept[0], [one.numel() for one in parameters])
            for one, part in zip(parameters, parts, strict=True):
                one.grad = part.view_as(one)
        session.prepare(model, optimizer)
        if holds:
            hold_memory(model)
        seen = []
        for step in range(STEPS):
            loss(model, session.rank, step).backward()
            if keeps == "list" and not kept:
                kept = gradients(model)
            # No look at these can be noticed.
            seen.append([one.clone() for one in kept])
            optimizer.step()
            for zeroed in kept:
                zeroed.zero_()
        return seen

    first, second = run_ranks(2, body)
    model = seeded(lambda: build(width))
    for step in range(STEPS):
        means = None
        for rank in range(2):
            model.zero_grad()
            loss(model, rank, step).backward()
            found = [one / 2 for one in gradients(model)]
            means = found if means is None else [a + b for a, b in zip(means, found, strict=True)]
        assert means is not None
        expected = [torch.cat([one.flatten() for one in means])] if keeps == "flat" else means
        for seen in (first[step], second[step]):
            for found_one, mean in zip(seen, expected, strict=True):
                torch.testing.assert_close(found_one, mean)


@pytest.mark.parametrize("width", [SMALL, LARGE])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_view_that_a_program_keeps_of_a_gradient_that_was_added_to(
    keeps: bool, width: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It is taken in a hook of the program's, so the gradient in `.grad` is the very memory."""

    def body(session: Any) -> list[Tensor]:
        model: Any = seeded(lambda: Twice(width))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        session.prepare(model, optimizer)
        kept: list[Tensor] = []

        def look(parameter: Any) -> None:
            if keeps:
                kept.append(parameter.grad.view(-1))

        model.weight.register_post_accumulate_grad_hook(look)
        for step in range(STEPS):
            loss(model, session.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return kept

    caplog.set_level(logging.INFO, "gradlane")
    first, second = run_ranks(2, body)
    assert ("each step waits for all gradients" in caplog.text) == keeps
    assert len(first) == len(second) == (STEPS if keeps else 0)
    assert all(map(torch.equal, first, second))
