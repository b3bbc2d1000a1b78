"""Small gradients travel together, and nobody can tell by the results."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlane
from gradlane.errors import UsageError
from gradlane.training.model.consistency_check import StatusTensor
from gradlane.training.model.gradient_hooks import GradientHooks
from gradlane.training.model.joined_gradients import (
    GROUP_BYTES_MAX,
    MEMBER_BYTES_MAX,
    SPAN_BYTES_MAX,
    choose_groups,
)
from gradlane.training.model.rank_status import RankStatus, StepEnding
from gradlane.training.modules.gradient_intake import GradientBatch, GradientIntake
from gradlane.training.rendezvous.tensor_table import build_table
from tests.training.model.held_core import HeldCore
from tests.training.model.models import seeded
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import run_reference, same_bits

SMALL = MEMBER_BYTES_MAX // 4
"""Elements of the largest member in f32."""


def members(*shapes: tuple[int, torch.dtype], without: Any = ()) -> list[tuple[int, ...]]:
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size, dtype in shapes]
    table = build_table(nn.ParameterList(parameters))
    return [group.members for group in choose_groups(table, without)]


def test_small_neighbours_are_grouped_around_large_ones() -> None:
    f32 = torch.float32
    assert members((3, f32), (SMALL + 1, f32), (SMALL, f32), (4, f32)) == [(0, 2, 3)]
    assert members((3, f32), (4, f32), (5, f32), without={1}) == [(0, 2)]
    assert members((3, f32), (4, torch.bfloat16), (5, f32), (6, torch.bfloat16)) == [(0, 2), (1, 3)]
    assert members((3, f32), (4, torch.complex64)) == []


def test_groups_are_small_and_their_members_close() -> None:
    full = GROUP_BYTES_MAX // MEMBER_BYTES_MAX
    shapes = [(SMALL, torch.float32)] * (full + 2)
    assert members(*shapes) == [tuple(range(full)), (full, full + 1)]
    far = (SPAN_BYTES_MAX // 4, torch.float32)
    few = (3, torch.float32)
    assert members(few, few, far, few, few) == [(0, 1), (3, 4)]
    # Nothing is left over for one that has nobody to travel with.
    assert members(few, far, few, few) == [(2, 3)]


class Turns(nn.Module):
    """Parameters of which each rank uses some in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(3, 2).t() for _ in range(4))
        self.large = nn.Parameter(torch.randn(SMALL + 1))

    def loss(self, used: list[int], step: int) -> Tensor:
        total = self.large.square().mean()
        for index in used:
            # A gradient of -0.0 has another mean with a rank that has none.
            total = total + (self.parts[index] * torch.tensor([-0.0, 1.0, step])).sum()
        return total


USED = [
    # Rank 0 and rank 1: all; some; none of a group here; the last one nowhere.
    ([0, 1, 2, 3], [0, 1, 2, 3]),
    ([0, 1], [1, 2]),
    ([], [2]),
    ([3], [0]),
    ([], []),
    ([0, 1, 2], [0, 1, 2]),
]


@pytest.mark.parametrize("defer", [None, False])
@pytest.mark.parametrize("weighs", [False, True])
def test_missing_gradients_are_none_or_zeros_as_ever(defer: bool | None, weighs: bool) -> None:
    def body(session: Any) -> list[Tensor | None]:
        model: Any = seeded(Turns)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        session.prepare(model, optimizer, defer=defer)
        seen: list[Tensor | None] = []
        for step, used in enumerate(USED):
            if weighs:
                session.weight(3 + session.rank)
            model.loss(used[session.rank], step).backward()
            optimizer.step()
            seen += [None if one.grad is None else one.grad.clone() for one in model.parameters()]
            optimizer.zero_grad()
        return [*seen, *(one.detach().clone() for one in model.parameters())]

    core = HeldCore()
    expected = run_reference(2, body)
    for rank, found in enumerate(run_ranks(2, body, core=core)):
        assert [one is None for one in found] == [one is None for one in expected[rank]]
        assert same_bits(
            [one for one in found if one is not None],
            [one for one in expected[rank] if one is not None],
        )
    channel = core.channels[0]
    sent = [channel.tensors[number]["name"] for number in channel.members]
    assert sent == [
        "large",
        "parts.0 and 3 more",
        "gradlane's absent gradients",
        "gradlane's rank statuses",
    ]


@pytest.mark.parametrize("defer", [None, False])
@pytest.mark.parametrize("whose", ["model", "optimizer"])
@pytest.mark.parametrize("again", [False, True])
def test_gradients_that_wait_for_their_group_are_zeroed_in_place(
    defer: bool | None, whose: str, again: bool
) -> None:
    """Momentum goes on where a gradient is zero, and not where it is None."""

    def body(session: Any) -> list[Tensor]:
        model: Any = seeded(Turns)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        session.prepare(model, optimizer, defer=defer)
        zeroed = model if whose == "model" else optimizer
        for step, used in enumerate(USED):
            model.loss(used[session.rank], step).backward()
            if step % 2:
                zeroed.zero_grad(set_to_none=False)
                if again:
                    model.loss(used[1 - session.rank][:1], step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [one.detach().clone() for one in model.parameters()]

    expected = run_reference(2, body)
    for rank, found in enumerate(run_ranks(2, body)):
        assert same_bits(found, expected[rank])


def test_gradients_that_a_program_keeps_get_their_means() -> None:
    def body(session: Any) -> list[Tensor]:
        model = seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        for step in range(3):
            (model(torch.ones(2, 3)) * (session.rank + step)).sum().backward()
            if step == 1:
                kept = [one.grad for one in model.parameters()]
            optimizer.step()
            optimizer.zero_grad(set_to_none=step > 1)
        return [one.clone() for one in kept if one is not None]

    first, second = run_ranks(2, body)
    assert same_bits(first, second)
    assert len(first) == 4


@pytest.mark.parametrize("early", [False, True])
def test_a_refused_gradient_is_named(early: bool) -> None:
    def body(session: Any) -> None:
        model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        for step in range(1 if early else 3):
            model(torch.ones(2, 3)).sum().backward(create_graph=step == (0 if early else 2))
            optimizer.step()
            optimizer.zero_grad()

    (error,) = run_ranks(1, body, expect_errors=True)
    assert isinstance(error, gradlane.UsageError)
    assert "the gradient of '" in str(error)
    assert "create_graph" in str(error)


def test_gradients_that_nobody_keeps_are_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    def body(session: Any) -> None:
        model = seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        for step in range(6):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 1)

    caplog.set_level(logging.INFO, "gradlane")
    run_ranks(1, body)
    assert "each step waits for all gradients" not in caplog.text


@pytest.mark.parametrize("odd", ["", "kept", "zeroed in place", "gone"])
def test_a_whole_group_is_taken_as_its_gradients_are_one_by_one(odd: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    entries = [entry for entry in build_table(model) if entry.trained]
    intake = GradientIntake(entries)
    if odd == "zeroed in place":
        model(torch.ones(1, 3)).sum().backward()
        model.zero_grad(set_to_none=False)
    model(torch.ones(1, 3)).sum().backward()
    kept = [model[0].weight.grad] if odd == "kept" else []
    if odd == "gone":
        model[0].weight.grad = None
        with pytest.raises(UsageError, match=r"'0\.weight' is gone"):
            intake.take_batch(GradientBatch(range(4), entries))
        return
    expected = [torch.clone(one.grad) for one in model.parameters() if one.grad is not None]
    taken = intake.take_batch(GradientBatch(range(4), entries))
    assert all(map(torch.equal, taken, expected))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert intake.is_watched() == bool(kept)


def test_a_hook_that_is_registered_later_sees_the_gradient_before_it_is_taken() -> None:
    model = nn.Linear(2, 2)
    taken: list[Any] = []
    hooks = GradientHooks([*model.parameters()])
    hooks.install([lambda index, _: taken.append(index)] * 2)
    assert not hooks.move_last(0, model.weight)
    register: Any = model.weight.register_post_accumulate_grad_hook
    register(lambda _: taken.append("later"))
    assert hooks.move_last(1, model.bias) is False  # Those of the bias are as they were.
    model(torch.ones(1, 2)).sum().backward()
    assert taken.index("later") < taken.index(0)


def test_statuses_that_repeat_are_judged_once_and_others_again() -> None:
    tensor = StatusTensor(0, 2)
    tensor.write(RankStatus(StepEnding.STEPPED, False, 7))
    tensor.tensor[1::2] = tensor.tensor[0::2]
    tensor.tensor.div_(2)
    first = tensor.read()
    assert tensor.read() is first and {one.digest for one in first.values()} == {7}
    tensor.tensor[1] = 0
    assert tensor.read() is not first
