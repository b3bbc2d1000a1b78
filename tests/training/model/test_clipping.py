"""`session.clip_grad_norm_`: torch's update by the exact norm, bit by bit; no wait for means."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlane
from gradlane.training.core import load_core
from tests.training.model import test_training
from tests.training.model.held_step import TrainStep, check_norm_alone_is_waited_for
from tests.training.model.models import Attention, Awkward, SmallCnn, seeded
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import (
    ReferenceSession,
    exact_norm,
    run_reference,
    same_bits,
    snapshot,
)
from tests.training.model.test_training import sgd

CORE: Any = load_core()
STEPS = 6

attention_loss: Any = test_training.attention_loss
awkward_loss: Any = test_training.awkward_loss
cnn_loss: Any = test_training.cnn_loss


def clips(session: Any, build: type[nn.Module], loss: Any, max_norm: float, **given: Any) -> Any:
    """Train with clipping; return norms and parameters."""
    model = seeded(build)
    optimizer = sgd(model)
    session.prepare(model, optimizer, **given)
    norms: list[Tensor] = []
    for step in range(1, STEPS + 1):
        value = loss(model, session.rank, step)
        if value is not None:
            value.backward()
        norms.append(session.clip_grad_norm_(max_norm, model=model))
        optimizer.step()
        optimizer.zero_grad()
    # Read long after their steps.
    return [norm.clone() for norm in norms], snapshot(model)


def assert_clips_like_the_reference(
    build: Any, loss: Any, max_norm: float, world_size: int, **options: Any
) -> None:
    given = {"defer": options.pop("defer", None)}

    def body(session: Any) -> Any:
        return clips(session, build, loss, max_norm, **given)

    expected = run_reference(world_size, body)
    for rank, (norms, parameters) in enumerate(run_ranks(world_size, body, **options)):
        assert same_bits(norms, expected[rank][0])
        assert same_bits(parameters, expected[rank][1])


@pytest.mark.parametrize("build_and_loss", [(SmallCnn, cnn_loss), (Attention, attention_loss)])
@pytest.mark.parametrize("max_norm", [0.05, 1e9])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_updates_have_the_bits_of_the_reference(
    build_and_loss: Any, max_norm: float, world_size: int
) -> None:
    build, loss = build_and_loss
    assert_clips_like_the_reference(build, loss, max_norm, world_size)


@pytest.mark.parametrize("defer", [None, False])
def test_ranks_without_gradients_and_odd_dtypes(defer: bool | None) -> None:
    assert_clips_like_the_reference(Awkward, awkward_loss, 0.1, 3, defer=defer)


@pytest.mark.parametrize("strategy", ["p3", "wfbp", "slicing", "kvstore", "deferred-pull"])
@pytest.mark.parametrize("slice_elems", [7, 1000])
def test_neither_strategy_nor_slice_size_changes_a_bit(strategy: str, slice_elems: int) -> None:
    if strategy in ("kvstore", "deferred-pull"):
        options: dict[str, Any] = {}
    else:
        options = {"slice_elems": slice_elems}
    assert_clips_like_the_reference(
        SmallCnn, cnn_loss, 0.05, 3, core=CORE, strategy=strategy, local="off", **options
    )


@pytest.mark.parametrize("options", [{"strategy": "ring"}, {"codec": "qsgd:bits=8"}])
def test_means_that_are_not_in_rank_order_are_clipped_alike_as_they_arrive_and_whole(
    options: dict[str, Any],
) -> None:
    def body(session: Any, defer: bool) -> Any:
        return clips(session, SmallCnn, cnn_loss, 0.05, defer=defer)

    given = {"core": CORE, "local": "off", **options}
    whole = run_ranks(2, lambda session: body(session, False), **given)
    arriving = run_ranks(2, lambda session: body(session, True), **given)
    for one, other in zip(whole, arriving, strict=True):
        assert same_bits(one[0], other[0]) and same_bits(one[1], other[1])


@pytest.mark.usefixtures("each_gradient_alone")
def test_step_waits_for_the_norm_alone_and_the_norm_for_no_mean() -> None:
    def begin(session: Any, optimizer: torch.optim.Optimizer) -> TrainStep:
        def train_step(loss: Tensor, after_backward: Callable[[], object]) -> Tensor:
            loss.backward()  # type: ignore[no-untyped-call]
            after_backward()
            norm: Tensor = session.clip_grad_norm_(0.01)
            optimizer.step()
            return norm

        return train_step

    check_norm_alone_is_waited_for(3, begin)


def test_what_a_program_reads_after_clipping_is_clipped() -> None:
    def body(session: Any) -> Any:
        model = seeded(SmallCnn)
        optimizer = sgd(model)
        session.prepare(model, optimizer)
        seen = []
        for step in range(1, STEPS + 1):
            cnn_loss(model, session.rank, step).backward()
            session.clip_grad_norm_(0.05, model=model)
            if step % 2 == 0:
                seen += [one.grad.clone() for one in model.parameters() if one.grad is not None]
            if step == 4:
                # Clipped once more, by less than they are.
                session.clip_grad_norm_(0.01, model=model)
            optimizer.step()
            seen += [one.grad.clone() for one in model.parameters() if one.grad is not None]
            optimizer.zero_grad()
        return seen, snapshot(model)

    expected = run_reference(2, body)
    for rank, (seen, parameters) in enumerate(run_ranks(2, body)):
        assert same_bits(seen, expected[rank][0])
        assert same_bits(parameters, expected[rank][1])


def test_some_steps_are_clipped_and_others_not() -> None:
    def body(session: Any) -> list[Tensor]:
        model = seeded(SmallCnn)
        optimizer = sgd(model)
        session.prepare(model, optimizer)
        for step in range(1, 10):
            cnn_loss(model, session.rank, step).backward()
            if step in (2, 3, 5, 8, 9):
                session.clip_grad_norm_(0.05, model=model)
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model)

    expected = run_reference(2, body)
    for parameters in run_ranks(2, body):
        assert same_bits(parameters, expected[0])


def test_a_clipped_step_that_is_forgotten_leaves_zeros_where_gradients_were() -> None:
    def body(session: Any) -> None:
        model: Any = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        for _ in range(3):
            # The last layer is not used.
            model[0](torch.ones(1, 2)).sum().backward()
            session.clip_grad_norm_(0.1)
            optimizer.zero_grad(set_to_none=False)
        assert all(bool((one.grad == 0).all()) for one in model[0].parameters())
        assert all(one.grad is None for one in model[1].parameters())

    run_ranks(2, body)


def test_accumulation_is_clipped_as_one_step() -> None:
    def body(session: Any) -> list[Tensor]:
        model = seeded(SmallCnn)
        optimizer = sgd(model)
        session.prepare(model, optimizer)
        for step in range(1, 6):
            with session.no_sync():
                cnn_loss(model, session.rank, step).backward()
                if step == 3:
                    cnn_loss(model, session.rank, 70).backward()
            if step != 3:
                cnn_loss(model, session.rank, 50 + step).backward()
            session.clip_grad_norm_(0.05, model=model)
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model)

    expected = run_reference(2, body)
    for parameters in run_ranks(2, body):
        assert same_bits(parameters, expected[0])


def test_another_backward_or_zero_grad_after_clipping() -> None:
    def body(session: Any) -> list[Tensor]:
        model = seeded(SmallCnn)
        optimizer = sgd(model)
        session.prepare(model, optimizer)
        for step in range(1, 7):
            cnn_loss(model, session.rank, step).backward()
            session.clip_grad_norm_(0.05, model=model)
            if step == 3:
                # As with DDP: it adds up on the clipped mean, which is averaged again.
                if isinstance(session, ReferenceSession):
                    session.forget()
                cnn_loss(model, session.rank, 30).backward()
                session.clip_grad_norm_(0.07, model=model)
            if step == 4:
                optimizer.zero_grad()
                if isinstance(session, ReferenceSession):
                    session.forget()
                continue
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model)

    expected = run_reference(2, body)
    for parameters in run_ranks(2, body):
        assert same_bits(parameters, expected[0])


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_norms_that_are_not_finite(bad: float) -> None:
    def body(session: Any) -> Any:
        model: Any = nn.Linear(3, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        session.prepare(model, optimizer)
        norms = []
        for step in range(4):
            value = bad if step > 1 and session.rank == 1 else 1.0
            (model(torch.full((1, 3), 1.0)) * value).sum().backward()
            norms.append(session.clip_grad_norm_(1.0, error_if_nonfinite=step == 3))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    for error in run_ranks(2, body, expect_errors=True):
        assert isinstance(error, RuntimeError)
        # The one that finds it first tells the other.
        assert f"the norm of all averaged gradients is {bad}" in str(error)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_the_factor_of_a_norm_that_is_not_finite_is_told_as_0(bad: float) -> None:
    def body(session: Any) -> tuple[int, int, float]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        (model(torch.ones(1, 2)).sum() * bad).backward()
        session.clip_grad_norm_(1.0)
        optimizer.step()
        session.synchronize()
        found = session.metrics()
        return found["clip_steps"], found["clipped_steps"], found["clip_factor"]

    assert run_ranks(2, body) == [(1, 1, 0.0)] * 2


def test_preparing_again_loses_no_clipped_step() -> None:
    def body(session: Any) -> tuple[int, float]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            session.prepare(model, optimizer)
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()
                session.clip_grad_norm_(0.1)
                optimizer.step()
                optimizer.zero_grad()
            session.synchronize()
        found = session.metrics()
        return found["clip_steps"], round(found["clip_factor_sum"], 4)

    assert run_ranks(2, body) == [(4, round(4 * 0.1 / 3**0.5, 4))] * 2


def test_other_norms_are_torchs() -> None:
    for norm_type in (1.0, 3.0, math.inf):

        def body(session: Any, norm_type: float = norm_type) -> Any:
            model = seeded(SmallCnn)
            session.prepare(model, sgd(model))
            cnn_loss(model, session.rank, 1).backward()
            norm = session.clip_grad_norm_(0.1, norm_type)
            clipped = [one.grad for one in model.parameters() if one.grad is not None]
            return norm.item(), [one.clone() for one in clipped]

        def torchs(session: Any, norm_type: float = norm_type) -> Any:
            model = seeded(SmallCnn)
            session.prepare(model, sgd(model))
            cnn_loss(model, session.rank, 1).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
            return norm.item(), [one.grad for one in model.parameters() if one.grad is not None]

        for found, right in zip(run_ranks(2, body), run_ranks(2, torchs), strict=True):
            assert found[0] == pytest.approx(right[0], rel=1e-6)
            for one, other in zip(found[1], right[1], strict=True):
                assert torch.allclose(one, other, rtol=1e-5, atol=0)


def test_the_norm_is_torchs_but_for_rounding() -> None:
    def body(session: Any) -> None:
        model = seeded(Attention)
        optimizer = sgd(model)
        session.prepare(model, optimizer)
        for step in range(1, 4):
            attention_loss(model, session.rank, step).backward()
            norm = session.clip_grad_norm_(1e9)
            gradients = [one.grad for one in model.parameters() if one.grad is not None]
            assert norm.dtype is torch.float32 and norm.shape == ()
            assert float(norm) == pytest.approx(
                float(torch.linalg.vector_norm(torch.cat([one.flatten() for one in gradients]))),
                rel=1e-6,
            )
            assert float(norm) == torch.tensor(exact_norm(gradients)).item()
            optimizer.step()
            optimizer.zero_grad()

    run_ranks(2, body)


def test_two_hundred_clipped_steps_learn_what_one_process_learns() -> None:
    """One process that is given the mean in rank order and clips by torch: but for rounding."""
    steps = 200

    def body(session: Any) -> tuple[list[float], list[Tensor]]:
        model = seeded(Attention)
        optimizer = sgd(model)
        session.prepare(model, optimizer)
        losses, norms = [], []
        for step in range(1, steps + 1):
            loss = attention_loss(model, session.rank, step)
            loss.backward()
            norms.append(session.clip_grad_norm_(0.02, model=model))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert all(norm > 0.02 for norm in norms)
        return losses, snapshot(model)

    def alone(session: Any) -> tuple[list[float], list[Tensor]]:
        model = seeded(Attention)
        optimizer = sgd(model)
        session.prepare(model, optimizer)
        losses = []
        for step in range(1, steps + 1):
            loss = attention_loss(model, session.rank, step)
            loss.backward()
            session.average(model)
            nn.utils.clip_grad_norm_(model.parameters(), 0.02)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, snapshot(model)

    ours = run_ranks(2, body, core=CORE, local="off")
    exact, torchs = run_reference(2, body), run_reference(2, alone)
    for rank in range(2):
        assert ours[rank][0] == exact[rank][0] and same_bits(ours[rank][1], exact[rank][1])
        assert ours[rank][0] == pytest.approx(torchs[rank][0], rel=1e-5, abs=1e-6)


def test_a_norm_is_used_like_any_tensor() -> None:
    def body(session: Any) -> None:
        model: Any = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        session.prepare(model, optimizer)
        for step in range(3):
            model(torch.tensor([[3.0, 4.0]])).sum().backward()
            norm = session.clip_grad_norm_(10.0)
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                continue
            assert f"{norm:.1f}" == "5.0" and norm > 4 and bool(torch.isfinite(norm))
            assert torch.stack([norm, norm]).tolist() == [5.0, 5.0]
            assert norm.numpy() == 5.0 and (norm / 2).item() == 2.5
            assert "5." in repr(norm)

    run_ranks(2, body)


def test_ranks_that_do_not_clip_alike_are_told() -> None:
    def body(session: Any, norms: tuple[float | None, float | None], core_steps: int) -> None:
        model: Any = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        for step in range(core_steps):
            model(torch.ones(1, 2)).sum().backward()
            max_norm = 1.0 if step == 0 else norms[session.rank]
            if max_norm is not None:
                session.clip_grad_norm_(max_norm)
            optimizer.step()
            optimizer.zero_grad()

    for norms in ((0.1, 0.2), (0.1, None)):
        errors = run_ranks(
            2, lambda session, norms=norms: body(session, norms, 5), expect_errors=True
        )
        assert all(isinstance(one, gradlane.GradlaneError) for one in errors), errors
        told = " ".join(map(str, errors))
        assert "the norm that gradients are clipped to" in told or "clips gradients" in told


def test_what_cannot_be_clipped_is_refused() -> None:
    def inside(session: Any) -> None:
        model: Any = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(gradlane.UsageError, match="with no prepared models"):
            session.clip_grad_norm_(1.0)
        session.prepare(model, optimizer)
        with pytest.raises(gradlane.UsageError, match=r"Linear\) that this session has not"):
            session.clip_grad_norm_(1.0, model=nn.Linear(1, 1))
        for parameters in (model.parameters(), list(model.parameters())):
            with pytest.raises(gradlane.UsageError, match=r"session\.clip_grad_norm_\(1\.0\)"):
                session.clip_grad_norm_(parameters, 1.0)
        with (
            session.no_sync(),
            pytest.raises(gradlane.UsageError, match=r"inside session.no_sync\(\)"),
        ):
            model(torch.ones(1, 2)).sum().backward()
            session.clip_grad_norm_(1.0)

    def served(session: Any) -> None:
        model: Any = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(gradlane.UsageError, match='update="server"'):
            session.clip_grad_norm_(1.0)
        optimizer.step()

    run_ranks(2, inside)
    run_ranks(2, served, update="server")


def test_the_reference_clips_by_the_exact_norm() -> None:
    def body(session: ReferenceSession) -> float:
        model: Any = nn.Linear(2, 1, bias=False)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.tensor([[3.0, 4.0]])).sum().backward()
        norm = session.clip_grad_norm_(1.0, model=model)
        assert model.weight.grad.norm().item() == pytest.approx(1.0, rel=1e-5)
        return norm.item()

    assert run_reference(2, body) == [5.0, 5.0]


def test_a_line_that_makes_each_step_wait_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    def body(session: Any, clips_by_torch: bool) -> None:
        model: Any = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        for _ in range(6):
            model(torch.ones(1, 2)).sum().backward()
            if clips_by_torch:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            else:
                session.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

    with caplog.at_level("INFO", logger="gradlane"):
        run_ranks(1, lambda session: body(session, False))
        assert "waits for all gradients" not in caplog.text
        run_ranks(1, lambda session: body(session, True))
    told = [line for line in caplog.messages if "waits for all gradients" in line]
    assert len(told) == 1 and "test_clipping.py:" in told[0], told
