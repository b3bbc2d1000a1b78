"""`session.weight()`: means over all ranks' samples."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlane
from tests.training.model import test_training
from tests.training.model.models import Attention, Awkward, SmallCnn, seeded
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import (
    run_reference,
    same_bits,
    snapshot,
)
from tests.training.model.test_training import sgd

STEPS = 5
cnn_loss: Any = test_training.cnn_loss
attention_loss: Any = test_training.attention_loss
awkward_loss: Any = test_training.awkward_loss


def samples_of(rank: int, step: int) -> int:
    return (3, 32, 7, 0)[(rank + step) % 4] + (rank == 0)


def trains(session: Any, build: Any, loss: Any, **given: Any) -> list[Tensor]:
    clips = given.pop("clips", False)
    accumulates = given.pop("accumulates", False)
    model = seeded(build)
    optimizer = sgd(model)
    session.prepare(model, optimizer, **given)
    for step in range(STEPS):
        session.weight(samples_of(session.rank, step))
        if accumulates:
            with session.no_sync():
                loss(model, session.rank, 10 * step).backward()
        value = loss(model, session.rank, step)
        if value is not None:
            value.backward()
        if clips:
            session.clip_grad_norm_(0.05, model=model)
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model)


@pytest.mark.parametrize("build_and_loss", [(SmallCnn, cnn_loss), (Attention, attention_loss)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("given", [{}, {"defer": False}, {"accumulates": True}])
def test_means_have_the_bits_of_the_reference(
    build_and_loss: Any, world_size: int, given: dict[str, Any]
) -> None:
    build, loss = build_and_loss

    def body(session: Any) -> list[Tensor]:
        return trains(session, build, loss, **given)

    expected = run_reference(world_size, body)
    for rank, parameters in enumerate(run_ranks(world_size, body)):
        assert same_bits(parameters, expected[rank])


@pytest.mark.parametrize("by_hand", [False, True])
def test_gradients_that_were_thrown_away_weigh_nothing(by_hand: bool) -> None:
    """A step that is skipped, as for a bad loss; also where a wrapper of the optimizer resets."""

    def body(session: Any) -> list[Tensor]:
        model = seeded(SmallCnn)
        optimizer = sgd(model)
        session.prepare(model, optimizer)
        for step in range(STEPS):
            for turn in range(2):
                session.weight(samples_of(session.rank, step + turn))
                cnn_loss(model, session.rank, 10 * step + turn).backward()
                if turn == 0 and by_hand:
                    for one in model.parameters():
                        one.grad = None
                elif turn == 0:
                    optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model)

    expected = run_reference(2, body)
    for rank, parameters in enumerate(run_ranks(2, body)):
        assert same_bits(parameters, expected[rank])


@pytest.mark.parametrize("options", [{}, {"strategy": "ring"}, {"local": "leader"}])
def test_the_real_core(options: dict[str, Any]) -> None:
    """Also with clipping: within rounding, since the norm is that of weighted means."""
    for clips in (False, True):

        def body(session: Any, clips: bool = clips) -> list[Tensor]:
            return trains(session, SmallCnn, cnn_loss, clips=clips)

        expected = run_reference(3, body)
        found = run_ranks(3, body, **{"local": "off", **options})
        for rank, parameters in enumerate(found):
            assert same_bits(parameters, found[0])
            for one, other in zip(parameters, expected[rank], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_ranks_without_gradients_and_odd_dtypes() -> None:
    def body(session: Any) -> list[Tensor]:
        return trains(session, Awkward, awkward_loss)

    model = Awkward()
    if any(one.dtype is torch.float16 for one in model.parameters()):
        with pytest.raises(gradlane.UsageError, match="would overflow"):
            run_ranks(3, body)
        return
    expected = run_reference(3, body)
    for rank, parameters in enumerate(run_ranks(3, body)):
        assert same_bits(parameters, expected[rank])


def test_the_mean_is_that_of_one_process_with_all_samples() -> None:
    sizes = (1, 6, 3)
    data = [torch.randn(size, 5, generator=torch.Generator().manual_seed(size)) for size in sizes]

    # Ranks are threads, which share torch's generator.
    start = nn.Linear(5, 1)

    def body(session: Any) -> Tensor:
        model = copy.deepcopy(start)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        session.weight(sizes[session.rank])
        (model(data[session.rank]) ** 2).mean().backward()
        assert model.weight.grad is not None
        return model.weight.grad.clone()

    alone = copy.deepcopy(start)
    (alone(torch.cat(data)) ** 2).mean().backward()
    for gradient in run_ranks(3, body):
        torch.testing.assert_close(gradient, alone.weight.grad)


def test_join_averages_over_the_samples_that_are_there() -> None:
    def body(session: Any) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        session.prepare(model, optimizer)
        seen = []
        with session.join():
            for _ in range(1 + session.rank):
                session.weight(10 + session.rank)
                model(torch.full((1, 1), 1.0 + session.rank)).sum().backward()
                assert model.weight.grad is not None
                seen.append(model.weight.grad.item())
                optimizer.step()
                optimizer.zero_grad()
        return seen

    first, second = run_ranks(2, body)
    assert first == [pytest.approx((10 * 1 + 11 * 2) / 21)]
    # Rank 0 has run out: the mean is over rank 1's samples alone.
    assert second == [first[0], pytest.approx(2.0)]


@pytest.mark.parametrize("codec", ["qsgd:bits=8", "topk:ratio=0.5"])
def test_codecs_lose_nothing_for_good(codec: str) -> None:
    def body(session: Any) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(64, 64, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        session.prepare(model, optimizer)
        total = torch.zeros(64, 64)
        for _ in range(40):
            session.weight(8 if session.rank else 24)
            inputs = torch.eye(64) * (1.0 + session.rank)
            (model(inputs)).sum().div(64).backward()
            assert model.weight.grad is not None
            total += model.weight.grad
            optimizer.zero_grad()
        return total / 40

    for mean in run_ranks(2, body, local="off", codec=codec):
        torch.testing.assert_close(
            mean.mean(), torch.tensor((24 + 8 * 2) / 32 / 64), rtol=0.05, atol=0
        )


def test_a_scaler_unscales_weighted_means() -> None:
    def body(session: Any) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        session.prepare(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        seen = []
        for _ in range(4):
            session.weight(1 + 2 * session.rank)
            scaler.scale(model(torch.full((1, 1), 1.0 + session.rank)).sum()).backward()
            before = model.weight.item()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append(before - model.weight.item())
        return seen

    for seen in run_ranks(2, body, local="off"):
        assert seen == [pytest.approx((1 + 3 * 2) / 4, abs=1e-5)] * 4


# ---- refusals


def stepped(session: Any, weighs: Any, dtype: torch.dtype = torch.float32) -> None:
    model = nn.Linear(2, 2).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    for _ in range(2):
        weighs(session)
        model(torch.ones(1, 2, dtype=dtype)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    session.synchronize()


def test_a_rank_that_does_not_weigh_is_named() -> None:
    def body(session: Any) -> None:
        stepped(session, lambda it: it.weight(4) if it.rank == 0 else None)

    with pytest.raises(gradlane.GradlaneError, match=r"rank 0 called session\.weight\(\) for step"):
        run_ranks(2, body)


def test_no_samples_at_all_are_refused() -> None:
    with pytest.raises(gradlane.GradlaneError, match=r"session\.weight\(0\) on all ranks"):
        run_ranks(2, lambda session: stepped(session, lambda it: it.weight(0)))


def looks(model: nn.Module) -> list[Tensor | None]:
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]


def holds(model: nn.Module) -> list[Tensor | None]:
    return [one.grad for one in model.parameters()]


def clips(model: nn.Module) -> float:
    return float(nn.utils.clip_grad_norm_(model.parameters(), 1e6))


@pytest.mark.parametrize("between", [looks, holds, clips])
@pytest.mark.parametrize("update_again", [False, True])
def test_gradients_that_add_up_on_means_are_weighted_as_those(
    between: Callable[[nn.Module], Any], update_again: bool
) -> None:
    def loss(model: nn.Module, rank: int, part: int) -> Any:
        return model(torch.full((2, 3), 1.0 + rank + part)).square().sum()

    def body(session: Any) -> list[Tensor]:
        model = seeded(lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)))
        optimizer = sgd(model)
        session.prepare(model, optimizer)
        session.weight(2 + 3 * session.rank)
        loss(model, session.rank, 0).backward()
        kept = between(model)
        loss(model, session.rank, 1).backward()
        if update_again:
            kept = between(model)
            loss(model, session.rank, 2).backward()
        found = [one.grad.clone() for one in model.parameters() if one.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        del kept
        return found

    for found in run_ranks(2, body):
        own = []
        for rank in range(2):
            model = seeded(lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)))
            for part in range(3 if update_again else 2):
                loss(model, rank, part).backward()
            own.append([one.grad for one in model.parameters() if one.grad is not None])
        for mean, first, second in zip(found, *own, strict=True):
            assert torch.allclose(mean, (2 * first + 5 * second) / 7, rtol=1e-5)


def test_a_weight_that_comes_too_late_is_refused() -> None:
    def body(session: Any) -> None:
        model = nn.Linear(2, 2)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(1, 2)).sum().backward()
        session.weight(3)

    with pytest.raises(gradlane.GradlaneError, match="call it before the first backward"):
        run_ranks(2, body)


@pytest.mark.parametrize(
    ("options", "dtype", "words"),
    [
        ({}, torch.float16, "gradients times samples would overflow"),
        ({"update": "server"}, torch.float32, "before all ranks' samples are known"),
        ({"stragglers": "backup=1"}, torch.float32, "before all ranks' samples are known"),
        ({"strategy": gradlane.Strategy(scheme="sfb")}, torch.float32, "travels as factors"),
    ],
)
def test_what_does_not_go_with_weights_is_refused(
    options: dict[str, Any], dtype: torch.dtype, words: str
) -> None:
    def body(session: Any) -> None:
        stepped(session, lambda it: it.weight(4), dtype)

    with pytest.raises(gradlane.GradlaneError, match=words):
        run_ranks(3, body, local="off", **options)


@pytest.mark.parametrize("samples", [-1, 1.5, 2**60, "4"])
def test_what_is_no_number_of_samples_is_refused(samples: Any) -> None:
    with pytest.raises(ValueError, match="give a number of samples"):
        run_ranks(1, lambda session: stepped(session, lambda it: it.weight(samples)))
