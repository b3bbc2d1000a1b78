"""Frozen parameters that one rank changes by itself, of every dtype and however it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlane
from tests.training.model.ranks import run_ranks

STEPS = 6


def frozen(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


def train(
    session: Any,
    model: nn.Module,
    change: Callable[[int, int], None],
    steps: int = STEPS,
) -> None:
    """Train with a change before the forward of each step, which is given rank and step."""
    held = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(held, lr=0.1)
    session.prepare(model, optimizer)
    for step in range(steps):
        change(session.rank, step)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def all_name(name: str, body: Callable[[Any], None]) -> None:
    """Check that each of two ranks names a frozen parameter."""
    for error in run_ranks(2, body, check_every=1, expect_errors=True):
        assert isinstance(error, gradlane.SessionFailedError), error
        assert f"frozen parameter {name!r} differs" in str(error)


class Holding(nn.Module):
    """A trained layer, and a frozen parameter that no forward reads."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.held = frozen(values)

    def forward(self, values: Tensor) -> Tensor:
        return self.layer(values)  # type: ignore[no-any-return]


VALUES: dict[str, tuple[Tensor, Any]] = {
    "bfloat16": (torch.zeros(4, 3, dtype=torch.bfloat16), 1.0),
    "float8": (torch.zeros(4).to(torch.float8_e4m3fn), 1.0),
    "codes": (torch.zeros(5, 3, dtype=torch.uint8), 3),
    "flags": (torch.zeros(5, dtype=torch.bool), True),
    "complex": (torch.zeros(3, dtype=torch.complex64), 1j),
    "scalar": (torch.tensor(1.0), 2.0),
    "transposed": (torch.zeros(4, 6).t(), 1.0),
    "another zero": (torch.zeros(3), -0.0),
    "not a number": (torch.full((3,), float("nan")), float("inf")),
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_of_every_dtype(kind: str) -> None:
    values, other = VALUES[kind]

    def body(session: Any) -> None:
        model = Holding(values.clone())

        def change(rank: int, step: int) -> None:
            if (rank, step) == (1, 2):
                model.held.data.copy_(torch.tensor(other).to(values.dtype).expand(values.shape))

        train(session, model, change)

    all_name("held", body)


@pytest.mark.parametrize(("shape", "parts"), [((4, 3), 1), ((65, 64), 2), ((300, 100), 8)])
@pytest.mark.parametrize("element", [0, 7, -1])
def test_writes_that_torch_does_not_count_are_found_once_each_part_was_compared(
    shape: tuple[int, int], parts: int, element: int
) -> None:
    """Wherever they are, and however many comparisons there were before."""

    def body(session: Any) -> None:
        model = Holding(torch.zeros(shape))

        def change(rank: int, step: int) -> None:
            if (rank, step) == (1, 3):
                model.held.data.view(-1)[element] = 1.0

        train(session, model, change, 3 + parts + 1)

    all_name("held", body)


class LowRank(nn.Module):
    """A frozen layer with two trained factors beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 3, bias=False).requires_grad_(False)
        self.down = nn.Linear(3, 2, bias=False)
        self.up = nn.Linear(2, 3, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        return self.base(values) + self.up(self.down(values))  # type: ignore[no-any-return]

    def merge(self, sign: float) -> None:
        self.base.weight.data += sign * self.up.weight.data @ self.down.weight.data


def test_factors_that_one_rank_merges_to_evaluate() -> None:
    """It takes them out again, which leaves errors of rounding."""

    def body(session: Any) -> None:
        torch.manual_seed(0)
        model = LowRank()

        def change(rank: int, step: int) -> None:
            if rank == 0 and step == 2:
                model.merge(100.0)
                model.merge(-100.0)

        train(session, model, change)

    all_name("base.weight", body)


def test_a_codebook_of_a_second_model() -> None:
    def body(session: Any) -> None:
        train(session, nn.Linear(3, 3), lambda *_: None, 2)
        model = Holding(torch.zeros(8, 4))

        def change(rank: int, step: int) -> None:
            if (rank, step) == (0, 3):
                with torch.no_grad():
                    model.held[5].lerp_(torch.ones(4), 0.1)

        train(session, model, change)

    all_name("held", body)


def test_a_layer_that_is_frozen_while_training_and_written_on_one_rank() -> None:
    def body(session: Any) -> None:
        model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

        def change(rank: int, step: int) -> None:
            if step == 2:
                model[0].requires_grad_(False)
            if (rank, step) == (1, 3):
                model[0].weight.data.fill_(3.0)

        train(session, model, change)

    for error in run_ranks(2, body, check_every=1, expect_errors=True):
        assert isinstance(error, gradlane.SessionFailedError), error
        assert "parameter '0.weight' differs" in str(error)
