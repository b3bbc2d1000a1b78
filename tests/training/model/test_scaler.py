"""`GradScaler`: the bits of torch's unscaling, and no wait for means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlane
from gradlane.training.core import load_core
from tests.training.model import test_training
from tests.training.model.held_step import TrainStep, check_norm_alone_is_waited_for
from tests.training.model.models import Awkward, SmallCnn, seeded
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import (
    ReferenceSession,
    average,
    run_reference,
    same_bits,
    snapshot,
)
from tests.training.model.test_training import batch, sgd

STEPS = 8
awkward_loss: Any = test_training.awkward_loss
cnn_loss: Any = test_training.cnn_loss


def scales(
    session: Any,
    build: type[nn.Module],
    loss: Any,
    *,
    clipped: str = "",
    init_scale: float = 1024.0,
    growth: float = 2.0,
    unscales: bool = True,
    kind: Any = None,
    **given: Any,
) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """Train with a scaler and an infinity on one rank; return norms, parameters and scales."""
    model = seeded(build)
    optimizer = kind(model.parameters(), lr=0.1, fused=True) if kind else sgd(model)
    session.prepare(model, optimizer, **given)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=init_scale, growth_interval=2, growth_factor=growth
    )
    norms, seen = [], []
    for step in range(STEPS):
        value = loss(model, session.rank, step)
        if value is not None:
            if step == 4 and session.rank == session.world_size - 1:
                value = value * float("inf")
            scaler.scale(value).backward()
        if isinstance(session, ReferenceSession):
            average(session, model)
        if unscales or clipped:
            scaler.unscale_(optimizer)
        if clipped == "session":
            norms.append(session.clip_grad_norm_(0.05, model=model))
        elif clipped == "torch":
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
        optimizer.zero_grad()
        if isinstance(session, ReferenceSession):
            session.forget()
    return [norm.clone() for norm in norms], snapshot(model), seen


def assert_scales_like_the_reference(
    build: Any, loss: Any, world_size: int, options: dict[str, Any], **given: Any
) -> None:
    def body(session: Any) -> Any:
        return scales(session, build, loss, **given)

    expected = run_reference(world_size, body)
    for rank, (norms, parameters, seen) in enumerate(run_ranks(world_size, body, **options)):
        assert seen == expected[rank][2]
        # The step with the infinity is skipped.
        assert seen[4] < seen[3]
        assert same_bits(norms, expected[rank][0])
        assert same_bits(parameters, expected[rank][1])


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("clipped", ["", "session", "torch"])
@pytest.mark.parametrize("defer", [None, False])
def test_updates_have_the_bits_of_the_reference(
    world_size: int, clipped: str, defer: bool | None
) -> None:
    given = {"clipped": clipped, "defer": defer}
    assert_scales_like_the_reference(SmallCnn, cnn_loss, world_size, {}, **given)


@pytest.mark.parametrize("clipped", ["", "session"])
@pytest.mark.parametrize("unscales", [True, False])
def test_scales_that_are_no_powers_of_two(clipped: str, unscales: bool) -> None:
    given = {"clipped": clipped, "unscales": unscales, "init_scale": 1000.0, "growth": 1.7}
    assert_scales_like_the_reference(SmallCnn, cnn_loss, 2, {}, **given)


def test_the_real_core_and_groups() -> None:
    options = {"core": load_core(), "local": "off"}
    assert_scales_like_the_reference(SmallCnn, cnn_loss, 2, options, clipped="session")


def test_complex_parameters_are_unscaled_whole() -> None:
    def body(session: Any) -> Any:
        return scales(session, Awkward, awkward_loss)

    def outcome(run: Any, world_size: int) -> str:
        try:
            run(world_size, body)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    assert outcome(run_ranks, 2) == outcome(run_reference, 2)


@pytest.mark.parametrize("rebuilds", [False, True])
def test_two_groups_and_a_second_look(rebuilds: bool) -> None:
    """Also where the program has put a plain list in place of a group's."""

    def body(session: Any) -> Any:
        model = seeded(SmallCnn)
        first, *rest = model.parameters()
        groups: list[dict[str, Any]] = [{"params": [first], "lr": 0.3}, {"params": rest}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        session.prepare(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
        for step in range(STEPS):
            scaler.scale(cnn_loss(model, session.rank, step)).backward()
            if isinstance(session, ReferenceSession):
                average(session, model)
            if rebuilds:
                group = optimizer.param_groups.pop()
                optimizer.param_groups.append({**group, "params": list(group["params"])})
            scaler.unscale_(optimizer)
            if step == 4:
                # Another scaler scales again, as torch does.
                again = torch.amp.GradScaler("cpu", init_scale=2.0)
                again.scale(torch.ones(()))
                again.unscale_(optimizer)
            if step == 5:
                # A backward after unscaling adds up on it.
                cnn_loss(model, session.rank, 100 + step).backward()
                if isinstance(session, ReferenceSession):
                    average(session, model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        return snapshot(model)

    expected = run_reference(2, body)
    for rank, parameters in enumerate(run_ranks(2, body)):
        assert same_bits(parameters, expected[rank])


def one_optimizer(kind: type[torch.optim.Optimizer], **settings: Any) -> Any:
    return lambda model: [kind(model.parameters(), **{"lr": 0.1, **settings})]


def two_optimizers(model: Any) -> list[torch.optim.Optimizer]:
    weights, biases = zip(*(layer.parameters() for layer in model), strict=True)
    return [torch.optim.SGD(weights, lr=0.1), torch.optim.AdamW(biases, lr=0.1, fused=True)]


@pytest.mark.usefixtures("each_gradient_alone")
@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        one_optimizer(torch.optim.SGD),
        one_optimizer(torch.optim.SGD, fused=True),
        one_optimizer(torch.optim.AdamW, fused=True),
        two_optimizers,
    ],
    ids=["SGD", "fused SGD", "fused AdamW", "two"],
)
def test_a_scaled_step_waits_for_the_norm_alone(make: Any, clips: bool) -> None:
    def begin(session: Any, optimizers: list[torch.optim.Optimizer]) -> TrainStep:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

        def train_step(loss: Tensor, after_backward: Callable[[], object]) -> Tensor:
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            after_backward()
            norm = torch.ones(())
            if clips:
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
                norm = session.clip_grad_norm_(0.01)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            return norm

        return train_step

    check_norm_alone_is_waited_for(4, begin, make)


@pytest.mark.parametrize("clipped", ["", "session", "torch"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_fused_optimizers_have_the_bits_of_the_reference(kind: Any, clipped: str) -> None:
    given = {"clipped": clipped, "unscales": bool(clipped), "kind": kind}
    assert_scales_like_the_reference(SmallCnn, cnn_loss, 2, {}, **given)


def test_one_rank_alone_with_a_scaler_is_named() -> None:
    def body(session: Any) -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=session.rank == 0)
        for step in range(4):
            scaler.scale(model(batch((2, 4), session.rank, step)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        session.synchronize()

    with pytest.raises(gradlane.GradlaneError, match="GradScaler have to be used on all ranks"):
        run_ranks(2, body, local="off")


LOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "one": lambda model: next(model.parameters()).grad,
    "numbers": lambda model: [one.grad.norm().item() for one in model.parameters()],  # type: ignore[union-attr]
    "copy": lambda model: [one.grad.clone() for one in model.parameters()],  # type: ignore[union-attr]
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("looker", [0, 1])
@pytest.mark.parametrize("steps", [(1,), (0, 2, 3)])
def test_one_rank_may_look_at_gradients_before_the_scaler_does(
    look: str, looker: int, steps: tuple[int, ...]
) -> None:
    """As one that logs their norm: it has its means when the scaler comes, the others have not."""

    def body(session: Any, looks: bool) -> list[Tensor]:
        model = seeded(SmallCnn)
        optimizer = sgd(model)
        session.prepare(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(5):
            scaler.scale(cnn_loss(model, session.rank, step)).backward()
            if looks and session.rank == looker and step in steps:
                LOOKS[look](model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return snapshot(model)

    plain, seen = (
        run_ranks(2, lambda session, looks=looks: body(session, looks)) for looks in (False, True)
    )
    for rank in range(2):
        assert same_bits(seen[rank], plain[0])
