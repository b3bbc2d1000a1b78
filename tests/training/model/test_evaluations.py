"""Optimizers that call their closure themselves, as often as they like: LBFGS and its like."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlane
from tests.built import needs_core
from tests.training.model.models import seeded
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import same_bits, snapshot

STEPS = 3


class Small(nn.Module):
    """Two layers and statistics, so that buffers travel, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 2)

    def forward(self, value: Tensor) -> Tensor:
        """Return two numbers a row."""
        found: Tensor = self.last(torch.tanh(self.norm(self.first(value))))
        return found


def drawn(rank: int, step: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * rank + step))


def loss_of(model: nn.Module, rank: int, step: int) -> Any:
    value: Any = (model(drawn(rank, step)) - 1.0).square().mean()
    return value


def evaluation(model: nn.Module, optimizer: Any, rank: int, step: int) -> Callable[[], Any]:
    """Return the closure of a step."""

    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        return loss

    return closure


class Sharpness(torch.optim.SGD):
    """Steps by the gradient at a point uphill, as SAM does, which it finds by one evaluation."""

    evaluates_closure = True

    def step(self, closure: Any = None) -> Any:
        """Go uphill by the gradients that are there, evaluate, go back and step."""
        moved = []
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                assert parameter.grad is not None
                moved.append(parameter.grad * 0.05)
                parameter.add_(moved[-1])
        loss = closure()
        with torch.no_grad():
            for parameter, by in zip(self.param_groups[0]["params"], moved, strict=True):
                parameter.sub_(by)
        super().step()
        return loss


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def lbfgs(search: str | None) -> Any:
    return lambda model: torch.optim.LBFGS(
        model.parameters(), lr=0.5, max_iter=4, line_search_fn=search
    )


def sharpness(model: nn.Module) -> Any:
    return Sharpness(model.parameters(), lr=0.1, momentum=0.5)


MAKES: dict[str, Any] = {
    "lbfgs": lbfgs(None),
    "searching": lbfgs("strong_wolfe"),
    "sharpness": sharpness,
}


def trains(session: Any, make: Any, how: str, **given: Any) -> tuple[list[Tensor], int, list[Any]]:
    """Train; returns the parameters, how often the closure was called, and what steps returned."""
    model = seeded(Small)
    optimizer = make(model)
    session.prepare(model, optimizer, **given)
    evaluations, results = 0, []
    for step in range(STEPS):

        def closure(step: int = step) -> Any:
            nonlocal evaluations
            evaluations += 1
            optimizer.zero_grad()
            if how == "weight":
                session.weight(session.rank + 1)
            loss = loss_of(model, session.rank, step)
            if how == "twice":
                (loss / 2).backward(retain_graph=True)
                (loss / 2).backward()
            elif how == "accumulates":
                with session.no_sync():
                    (loss / 2).backward(retain_graph=True)
                (loss / 2).backward()
            else:
                loss.backward()
            if how == "clips":
                session.clip_grad_norm_(0.1)
            if how == "clips by torch":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            return loss

        if isinstance(optimizer, Sharpness):
            closure()
        results.append(optimizer.step(closure))
        assert session.step == step + 1
    return [*snapshot(model), *model.buffers()], evaluations, [float(one) for one in results]


def alone(world_size: int, make: Any, how: str) -> tuple[list[Tensor], int, list[Any]]:
    """The same on one process that computes all ranks' gradients and losses."""
    model = seeded(Small)
    optimizer = make(model)
    evaluations, results = 0, []
    weights = [rank + 1 if how == "weight" else 1 for rank in range(world_size)]
    for step in range(STEPS):

        def closure(step: int = step) -> Any:
            nonlocal evaluations
            evaluations += 1
            losses: list[float] = []
            sums: list[list[Any]] = []
            for rank in range(world_size):
                other = copy.deepcopy(model)
                other.zero_grad()
                loss = loss_of(other, rank, step)
                if how in ("twice", "accumulates"):
                    (loss / 2).backward(retain_graph=True)
                    (loss / 2).backward()
                else:
                    loss.backward()
                losses.append(loss.item())
                sums.append([weights[rank] * gradient_of(one) for one in other.parameters()])
                if rank == 0:
                    first = other
            with torch.no_grad():
                for own, kept in zip(model.buffers(), first.buffers(), strict=True):
                    own.copy_(kept)
                for index, parameter in enumerate(model.parameters()):
                    mean = sums[0][index].clone()
                    for one in sums[1:]:
                        mean += one[index]
                    mean /= world_size
                    if how == "weight":
                        mean *= world_size / sum(weights)
                    parameter.grad = mean
            if how.startswith("clips"):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            total = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
            return torch.full((), total / sum(weights))

        if isinstance(optimizer, Sharpness):
            closure()
        results.append(optimizer.step(closure))
    return [*snapshot(model), *model.buffers()], evaluations, [float(one) for one in results]


HOWS = [
    *(("searching", how) for how in ("", "twice", "accumulates", "weight", "clips by torch")),
    ("lbfgs", ""),
    ("sharpness", "twice"),
]


@pytest.mark.parametrize(("kind", "how"), HOWS)
def test_ranks_have_the_bits_of_one_process(kind: str, how: str) -> None:
    world_size = 3 if how else 2
    expected, count, losses = alone(world_size, MAKES[kind], how)
    for found in run_ranks(world_size, lambda session: trains(session, MAKES[kind], how)):
        assert same_bits(found[0], expected), how
        assert found[1:] == (count, losses)
    assert count > STEPS


def test_one_rank_is_as_without_us() -> None:
    expected = alone(1, MAKES["searching"], "")
    found = run_ranks(1, lambda session: trains(session, MAKES["searching"], ""))[0]
    assert same_bits(found[0], expected[0]) and found[1:] == expected[1:]


def test_the_closure_may_clip_by_the_session() -> None:
    first, second = run_ranks(2, lambda session: trains(session, MAKES["searching"], "clips"))
    assert same_bits(first[0], second[0]) and first[1:] == second[1:]


@needs_core
@pytest.mark.parametrize(
    "options",
    [{"codec": "fp8:residual=on"}, {"strategy": "ring"}, {"local": "leader"}],
    ids=["codec", "ring", "nodes"],
)
def test_ranks_agree_under(options: dict[str, Any]) -> None:
    def body(session: Any) -> Any:
        return trains(session, MAKES["searching"], "twice", buffers="average")

    first, second = run_ranks(2, body, **{"local": "off", **options})
    assert same_bits(first[0], second[0]) and first[1:] == second[1:]


def test_ranks_of_local_updates_evaluate_by_themselves() -> None:
    def body(session: Any) -> Any:
        model = seeded(Small)
        optimizer = MAKES["searching"](model)
        session.prepare(model, optimizer, buffers="local")
        for step in range(4):
            optimizer.step(evaluation(model, optimizer, session.rank, step))
        session.synchronize()
        return snapshot(model)

    first, second = run_ranks(2, body, update=gradlane.Local(steps=2))
    assert same_bits(first, second)


def test_checkpoints_are_taken_between_steps_and_hold_the_state(tmp_path: Path) -> None:
    def body(session: Any, steps: range) -> Any:
        model = seeded(Small)
        optimizer = MAKES["searching"](model)
        session.prepare(model, optimizer)
        assert session.restore() == steps.start
        for step in steps:
            optimizer.step(evaluation(model, optimizer, session.rank, step))
        return snapshot(model)

    whole = run_ranks(2, lambda session: body(session, range(4)), **saved(tmp_path / "whole"))
    run_ranks(2, lambda session: body(session, range(2)), **saved(tmp_path / "parts"))
    parts = run_ranks(2, lambda session: body(session, range(2, 4)), **saved(tmp_path / "parts"))
    assert same_bits(whole[0], parts[0]) and same_bits(whole[1], parts[1])


def saved(folder: Path) -> dict[str, Any]:
    return {"checkpoint_folder": str(folder), "checkpoint_every": 1}


# ---- what is refused


class Uneven(torch.optim.SGD):
    """Evaluates as often as its rank says: no optimizer of one mind with the others."""

    evaluates_closure = True

    def step(self, closure: Any = None) -> Any:
        """Evaluate some times."""
        for _ in range(self.defaults["times"]):
            loss = closure()
        super().step()
        return loss


def test_ranks_that_evaluate_unlike_are_named() -> None:
    def body(session: Any) -> None:
        model = seeded(Small)
        optimizer: Any = Uneven(model.parameters(), lr=0.1)
        optimizer.defaults["times"] = 1 + session.rank
        session.prepare(model, optimizer)
        for step in range(3):
            optimizer.step(evaluation(model, optimizer, session.rank, step))

    errors = run_ranks(2, body, expect_errors=True)
    assert all(isinstance(one, gradlane.SessionFailedError) for one in errors), errors
    assert "rank 0 called optimizer.step(); rank 1 evaluated the closure once more" in str(errors)


def broken(session: Any, closure: Callable[[nn.Module], Any], match: str, error: Any) -> None:
    model = seeded(Small)
    optimizer = MAKES["lbfgs"](model)
    session.prepare(model, optimizer)
    with pytest.raises(error, match=match):
        optimizer.step(None if closure is None else lambda: closure(model))
    loss_of(model, 0, 0).backward()
    optimizer.step(lambda: loss_with_gradients(model))


def loss_with_gradients(model: nn.Module) -> Any:
    model.zero_grad()
    loss = loss_of(model, 0, 0)
    loss.backward()
    return loss


def nothing_with_gradients(model: nn.Module) -> None:
    loss_with_gradients(model)


def raises(model: nn.Module) -> None:
    raise KeyError("of the program")


REFUSED: dict[str, tuple[Any, str, Any]] = {
    "none": (None, "without a closure after step 0", gradlane.UsageError),
    "no loss": (nothing_with_gradients, "returned a NoneType in step 1", gradlane.UsageError),
    "raises": (raises, "of the program", KeyError),
}


@pytest.mark.parametrize("name", REFUSED)
def test_closures_that_are_refused_before_anything_is_updated(name: str) -> None:
    closure, match, error = REFUSED[name]
    run_ranks(1, lambda session: broken(session, closure, match, error))


def test_an_evaluation_without_gradients_is_refused() -> None:
    def body(session: Any) -> None:
        model = seeded(Small)
        optimizer = MAKES["lbfgs"](model)
        session.prepare(model, optimizer)
        with pytest.raises(gradlane.UsageError, match=r"closure of optimizer.step\(\) without any"):
            optimizer.step(lambda: loss_of(model, 0, 0))

    run_ranks(1, body)


def test_an_error_in_a_later_evaluation_fails_the_session() -> None:
    def body(session: Any) -> None:
        model = seeded(Small)
        optimizer = MAKES["lbfgs"](model)
        session.prepare(model, optimizer)
        calls: list[int] = []

        def closure() -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise KeyError("of the program")
            return loss_with_gradients(model)

        with pytest.raises(gradlane.SessionFailedError, match="broke off in step 1 with KeyError"):
            optimizer.step(closure)
        with pytest.raises(gradlane.SessionFailedError, match="broke off"):
            model(drawn(0, 0))
        session.abort("of the test")

    run_ranks(1, body)
