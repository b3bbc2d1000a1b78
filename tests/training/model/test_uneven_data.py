"""Ranks with unlike amounts of data end with the same parameters, and none of them hangs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlane
from tests.training.model import test_training
from tests.training.model.held_core import HeldCore
from tests.training.model.models import Attention, Awkward, SmallCnn, seeded
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import same_bits, snapshot, train_reference
from tests.training.model.test_training import batch, sgd

attention_loss: Any = test_training.attention_loss
cnn_loss: Any = test_training.cnn_loss


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [
        value
        for group in optimizer.param_groups
        for parameter in group["params"]
        for _, value in sorted(optimizer.state[parameter].items())
        if isinstance(value, Tensor)
    ]


@pytest.mark.parametrize("batches", [(3, 5, 4), (5, 3, 5), (0, 2, 0), (4, 4, 4)])
@pytest.mark.parametrize("clips", [False, True])
def test_uneven_data_equals_the_reference(batches: tuple[int, ...], clips: bool) -> None:
    """A rank without data counts as zeros; afterwards all go on together from the same state."""
    core = HeldCore()
    longest = max(batches)

    def body(session: Any) -> tuple[list[Tensor], list[Tensor]]:
        model = seeded(Attention)
        optimizer = adam(model)
        session.prepare(model, optimizer)
        with session.join():
            for step in range(1, 1 + batches[session.rank]):
                attention_loss(model, session.rank, step).backward()
                if clips:
                    clip(model)
                optimizer.step()
                optimizer.zero_grad()
        for step in (longest + 1, longest + 2):
            attention_loss(model, session.rank, step).backward()
            if clips:
                clip(model)
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model), state_of(optimizer)

    def loss(model: nn.Module, rank: int, step: int) -> Tensor | None:
        if batches[rank] < step <= longest:
            return None
        value: Tensor = attention_loss(model, rank, step)
        return value

    expected = train_reference(
        3,
        longest + 2,
        lambda: seeded(Attention),
        adam,
        loss,
        before_step=clip if clips else None,
    )
    results = run_ranks(3, body, core=core)
    for parameters, state in results:
        assert same_bits(parameters, snapshot(expected[0]))
        assert same_bits(state, results[0][1])
    # A world for training and, if the data was uneven, one for the hand-over.
    assert len({one.settings["job"] for one in core.channels}) == (
        1 if len(set(batches)) == 1 else 2
    )


def test_the_order_of_the_state_and_shared_settings_are_handed_over() -> None:
    """The rank that ran out of data keeps its own keys, and its own tensors of settings."""

    def body(session: Any) -> tuple[list[int], list[float]]:
        layers = [nn.Linear(2, 2, bias=False) for _ in range(3)]
        rate = torch.tensor(0.1)
        groups = [{"params": [layer.weight]} for layer in layers]
        optimizer = torch.optim.Adam(groups, lr=rate)
        session.prepare(nn.ModuleList(layers), optimizer)
        with session.join():
            # Rank 1 has data for the last layer alone.
            for layer in layers[::-1][: 3 - 2 * session.rank]:
                layer(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        rate.mul_(0.5)
        numbers = {id(layer.weight): number for number, layer in enumerate(layers)}
        order = [numbers[id(key)] for key in optimizer.state]
        return order, [float(group["lr"]) for group in optimizer.param_groups]

    half = float(torch.tensor(0.1) * 0.5)
    assert run_ranks(2, body) == [([2, 1, 0], [half] * 3)] * 2


@pytest.mark.parametrize("batches", [(0, 2), (1, 2)])
@pytest.mark.parametrize("has_other", [False, True])
def test_state_of_any_memory_format_is_handed_over(
    batches: tuple[int, int], has_other: bool
) -> None:
    """A momentum has the format of the gradient, which the ranks' convolutions choose."""

    def body(session: Any) -> tuple[list[Tensor], tuple[int, ...]]:
        model: Any = seeded(lambda: nn.Conv2d(4, 4, (3, 1), bias=False))
        model.to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        session.prepare(model, optimizer)
        if has_other and session.rank == 0:
            optimizer.state[model.weight]["momentum_buffer"] = torch.zeros(4, 4, 3, 1)
        with session.join():
            for step in range(batches[session.rank]):
                model(batch((1, 4, 5, 2), session.rank, step)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        (momentum,) = state_of(optimizer)
        return [momentum.contiguous(), *snapshot(model)], momentum.stride()

    first, second = run_ranks(2, body)
    assert same_bits(first[0], second[0]) and first[1] == second[1]
    assert first[0][0].abs().sum() > 0


@pytest.mark.parametrize("shares", ["the one with data", "the one without"])
def test_groups_share_settings_after_a_handover_where_the_sources_do(shares: str) -> None:
    """A tensor that two groups share on one rank and not on the other would drift later."""

    def body(session: Any) -> list[float]:
        layers = [nn.Linear(2, 2, bias=False) for _ in range(2)]
        rate = torch.tensor(0.1)
        both = (session.rank == 0) == (shares == "the one with data")
        groups = [
            {"params": [layer.weight], "lr": rate if both else rate.clone()} for layer in layers
        ]
        optimizer = torch.optim.Adam(groups)
        first = optimizer.param_groups[0]["lr"]
        session.prepare(nn.ModuleList(layers), optimizer)
        with session.join():
            for _ in range(2 - session.rank):
                sum(layer(torch.ones(1, 2)).sum() for layer in layers).backward()
                optimizer.step()
                optimizer.zero_grad()
        first.mul_(0.5)
        return [float(group["lr"]) for group in optimizer.param_groups]

    tenth, half = float(torch.tensor(0.1)), float(torch.tensor(0.1) * 0.5)
    expected = [half, half if shares == "the one with data" else tenth]
    assert run_ranks(2, body) == [expected] * 2


def test_several_models_no_sync_and_a_scheduler() -> None:
    batches = (2, 5)

    def body(session: Any) -> tuple[list[Tensor], list[float]]:
        models = [seeded(Attention), seeded(SmallCnn)]
        losses = [attention_loss, cnn_loss]
        optimizers = [sgd(model) for model in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            session.prepare(model, optimizer)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.5)
        for epoch in range(2):
            with session.join():
                for step in range(batches[(session.rank + epoch) % 2]):
                    for model, optimizer, loss in zip(models, optimizers, losses, strict=True):
                        with session.no_sync():
                            loss(model, session.rank, 10 * epoch + step).backward()
                        loss(model, session.rank, 50 + 10 * epoch + step).backward()
                        if step % 2 == 0 or model is models[0]:
                            optimizer.step()
                        optimizer.zero_grad()
            scheduler.step()
        rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
        return [*snapshot(models[0]), *snapshot(models[1]), *models[1].buffers()], rates

    (first, rates), (second, others) = run_ranks(2, body)
    assert same_bits(first, second)
    assert rates == others == [0.05 * 0.25, 0.05]
    assert not same_bits(first[:2], snapshot(seeded(Attention))[:2])


def test_a_scheduler_that_counts_unlike_batches_is_noticed() -> None:
    def body(session: Any) -> None:
        model = seeded(Attention)
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        session.prepare(model, optimizer)
        for epoch in range(2):
            with session.join():
                for step in range(2 + session.rank):
                    attention_loss(model, session.rank, 10 * epoch + step).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()

    for error in run_ranks(2, body, expect_errors=True):
        assert isinstance(error, gradlane.SessionFailedError)
        assert "one that counts batches needs the same count" in str(error)


@pytest.mark.parametrize("defer", [None, False])
@pytest.mark.parametrize("count", [1, 2])
def test_all_ranks_stop_in_the_same_step(defer: bool | None, count: int) -> None:
    def body(session: Any) -> list[Tensor]:
        models = [seeded(Attention, seed=seed) for seed in range(count)]
        optimizers = [sgd(model) for model in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            session.prepare(model, optimizer, defer=defer)

        def train(steps: range) -> None:
            for step in steps:
                for model, optimizer in zip(models, optimizers, strict=True):
                    attention_loss(model, session.rank, step).backward()
                    optimizer.step()
                    optimizer.zero_grad()

        with (
            pytest.raises(gradlane.UnevenDataError, match=r"rank \d stops with all others"),
            session.join(throw_on_early_termination=True),
        ):
            train(range(1, 4 if session.rank == 1 else 9))
        for optimizer in optimizers:
            optimizer.zero_grad()
        # Nothing was lost and nothing was taken twice: training goes on.
        with session.join(throw_on_early_termination=True):
            train(range(4, 6))
        return snapshot(models[0])

    (expected, *_) = train_reference(3, 5, lambda: seeded(Attention, seed=0), sgd, attention_loss)
    for parameters in run_ranks(3, body):
        assert same_bits(parameters, snapshot(expected))


def test_leaving_in_the_middle_of_a_step() -> None:
    def body(session: Any) -> None:
        model = seeded(Attention)
        session.prepare(model, sgd(model))
        with (
            pytest.raises(gradlane.UsageError, match=r"the end of session.join\(\) inside step 1"),
            session.join(),
        ):
            attention_loss(model, session.rank, 1).backward()

    run_ranks(1, body)


def test_a_rank_that_trains_outside_of_the_join() -> None:
    def body(session: Any) -> None:
        model = seeded(Attention)
        optimizer = sgd(model)
        session.prepare(model, optimizer)
        if session.rank == 0:
            with session.join():
                pass
        for step in range(1, 4):
            attention_loss(model, session.rank, step).backward()
            optimizer.step()

    _, second = run_ranks(2, body, expect_errors=True)
    assert isinstance(second, gradlane.SessionFailedError)
    assert "rank 0 has come to the end of session.join() before step 1" in str(second)


def test_a_rank_is_lost_while_others_go_along() -> None:
    def body(session: Any) -> None:
        model = seeded(Awkward)
        optimizer = sgd(model)
        session.prepare(model, optimizer)
        with session.join():
            if session.rank == 1:
                raise ArithmeticError("the loss is not a number")

    first, second = run_ranks(2, body, expect_errors=True)
    assert isinstance(first, gradlane.PeerLostError)
    assert isinstance(second, ArithmeticError)


def test_what_join_refuses() -> None:
    def body(session: Any) -> None:
        model = seeded(Attention)
        session.prepare(model, sgd(model))
        with (
            session.join(),
            pytest.raises(gradlane.UsageError, match="one is enough"),
            session.join(),
        ):
            pass

    run_ranks(1, body)

    def serving(session: Any) -> None:
        model = seeded(Attention)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(gradlane.UsageError, match='update="server"'), session.join():
            pass

    run_ranks(1, serving, update="server")
