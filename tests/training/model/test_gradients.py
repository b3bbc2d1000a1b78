"""However a loop gets its gradients, they are the mean over ranks of what each had in `.grad`.

The same loop runs with gradlane and with a reference that averages at `optimizer.step()`.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import gradlane
from tests.training.model import test_training
from tests.training.model.held_core import HeldCore
from tests.training.model.models import Attention, Awkward, SmallCnn, seeded
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import (
    ReferenceSession,
    average,
    run_reference,
    same_bits,
    snapshot,
)
from tests.training.model.test_training import batch, sgd

STEPS = 6

# Losses whose `backward` is not typed.
attention_loss: Any = test_training.attention_loss
awkward_loss: Any = test_training.awkward_loss
cnn_loss: Any = test_training.cnn_loss


def assert_equals_the_reference(
    body: Callable[[Any], list[Tensor]], world_size: int = 2, **options: Any
) -> list[Tensor]:
    """Run a loop both ways and compare every bit; returns the parameters."""
    expected = run_reference(world_size, body)
    for rank, parameters in enumerate(run_ranks(world_size, body, **options)):
        assert same_bits(parameters, expected[rank])
    result: list[Tensor] = expected[0]
    return result


def prepare(session: Any, build: type[nn.Module], **options: Any) -> tuple[Any, Any]:
    model = seeded(build)
    optimizer = sgd(model)
    session.prepare(model, optimizer, **options)
    return model, optimizer


# ---- accumulation


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("defer", [None, False])
@pytest.mark.parametrize("clips", [False, True])
def test_accumulation_with_no_sync(world_size: int, defer: bool | None, clips: bool) -> None:
    def body(session: Any) -> list[Tensor]:
        model, optimizer = prepare(session, SmallCnn, defer=defer)
        for step in range(STEPS):
            with session.no_sync():
                for part in range(2):
                    cnn_loss(model, session.rank, 10 * step + part).backward()
            cnn_loss(model, session.rank, 10 * step + 2).backward()
            if clips:
                average(session, model)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model)

    assert_equals_the_reference(body, world_size)


def test_a_parameter_that_only_an_early_batch_uses() -> None:
    """Its hook does not fire in the last batch; on one rank it fires in none."""

    def body(session: Any) -> list[Tensor]:
        model, optimizer = prepare(session, Awkward)
        for step in range(STEPS):
            with session.no_sync():
                model.uses_sometimes = session.rank == 0
                model(batch((3, 6), session.rank, 10 * step)).square().mean().backward()
            model.uses_sometimes = False
            model(batch((3, 6), session.rank, 10 * step + 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model)

    assert_equals_the_reference(body, 3)


def test_all_batches_of_a_step_in_no_sync() -> None:
    def body(session: Any) -> list[Tensor]:
        model, optimizer = prepare(session, Attention)
        for step in range(STEPS):
            # Ranks may accumulate over different numbers of batches.
            with session.no_sync():
                for part in range(1 + (session.rank + step) % 2):
                    attention_loss(model, session.rank, 10 * step + part).backward()
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model)

    assert_equals_the_reference(body, 3)


def test_gradients_that_were_changed_before_they_were_averaged() -> None:
    def body(session: Any) -> None:
        model, optimizer = prepare(session, Attention)
        with session.no_sync():
            attention_loss(model, 0, 1).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with pytest.raises(gradlane.UsageError, match=r"changed in place before it was averaged"):
            optimizer.step()

    run_ranks(1, body)


def test_local_gradients_are_zeroed_locally() -> None:
    """One rank throws a batch away; the others know nothing of it."""
    core = HeldCore()

    def body(session: Any) -> list[Tensor]:
        model, optimizer = prepare(session, Attention)
        for step in range(STEPS):
            if session.rank == 1:
                with session.no_sync():
                    attention_loss(model, 1, 100 + step).backward()
                optimizer.zero_grad()
            attention_loss(model, session.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model)

    assert_equals_the_reference(body, core=core)
    assert max(call[2] for call in core.calls) == STEPS


# ---- several backwards in a step


@pytest.mark.parametrize("defer", [None, False])
def test_accumulation_without_no_sync(defer: bool | None) -> None:
    """The number of batches may fall, as at the end of an epoch."""

    def body(session: Any) -> list[Tensor]:
        model, optimizer = prepare(session, SmallCnn, defer=defer)
        for step, parts in enumerate((3, 3, 1, 3, 2, 3)):
            for part in range(parts):
                cnn_loss(model, session.rank, 10 * step + part).backward()
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model)

    assert_equals_the_reference(body, 3)


@pytest.mark.parametrize("defer", [None, False])
def test_overlap_comes_back_in_the_second_step(defer: bool | None) -> None:
    core = HeldCore()

    def body(session: Any) -> list[int]:
        model, optimizer = prepare(session, SmallCnn, defer=defer)
        sent = []
        for step in range(3):
            cnn_loss(model, session.rank, step).backward()
            sent.append(sum(call[1] == "gradient_ready" for call in core.calls))
            optimizer.step()
            optimizer.zero_grad()
            session.synchronize()
        return sent

    (sent,) = run_ranks(1, body, core=core)
    before = sent[0]
    # All eight gradients of step 1 and of step 2, each time as one, and the statuses of step 2 have
    # left when its backward is over.
    assert sent[1] == before + 1 + 2
    assert sent[2] == sent[1] + 2


def test_two_losses_with_a_common_trunk() -> None:
    def body(session: Any) -> list[Tensor]:
        model, optimizer = prepare(session, Awkward)
        for step in range(STEPS):
            hidden = model.encoder(batch((3, 6), session.rank, step)).tanh()
            model.reused(hidden).sum().backward(retain_graph=True)
            model.sometimes(hidden).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model)

    assert_equals_the_reference(body)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, noise: Tensor) -> Tensor:
        return self.body(noise)  # type: ignore[no-any-return]


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, values: Tensor) -> Tensor:
        return self.body(values)  # type: ignore[no-any-return]


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("penalty", [True, False])
def test_gan(joint: bool, penalty: bool) -> None:
    """The generator's loss leaves gradients in the discriminator, which are forgotten."""

    def body(session: Any) -> list[Tensor]:
        g, d = seeded(Generator), seeded(Discriminator)
        g_optimizer, d_optimizer = sgd(g), torch.optim.Adam(d.parameters(), lr=0.01)
        session.prepare(g, g_optimizer)
        session.prepare(d, d_optimizer)
        for step in range(STEPS):
            real = batch((5, 4), session.rank, step).requires_grad_()
            fake = g(batch((5, 3), session.rank, 100 + step))
            d_optimizer.zero_grad()
            scores = d(real)
            loss: Any = (1 - scores).square().mean()
            if penalty:
                (slope,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
                loss = loss + slope.square().sum()
            if joint:
                (loss + d(fake.detach()).square().mean()).backward()
            else:
                loss.backward()
                d(fake.detach()).square().mean().backward()
            d_optimizer.step()
            g_optimizer.zero_grad()
            fooled: Any = (1 - d(fake)).square().mean()
            fooled.backward()
            g_optimizer.step()
        return [*snapshot(g), *snapshot(d)]

    assert_equals_the_reference(body, 3)


def test_reentrant_checkpoints_fire_a_hook_several_times() -> None:
    def body(session: Any) -> list[Tensor]:
        model, optimizer = prepare(session, Awkward)
        for step in range(STEPS):
            hidden: Any = batch((3, 6), session.rank, step).requires_grad_()
            for layer in (model.encoder, model.reused, model.reused, model.decoder):
                hidden = torch.utils.checkpoint.checkpoint(
                    layer, hidden, use_reentrant=True, preserve_rng_state=False
                )
            hidden.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model)

    assert_equals_the_reference(body)


def test_a_backward_on_top_of_averaged_gradients() -> None:
    """As with DDP, what was averaged counts once more on every rank."""

    def body(session: Any) -> list[Tensor]:
        model, optimizer = prepare(session, Attention)
        for step in range(STEPS):
            attention_loss(model, session.rank, step).backward()
            average(session, model)
            attention_loss(model, session.rank, 50 + step).backward()
            if isinstance(session, gradlane.Session):
                optimizer.step()
            else:
                session.average(model)
                optimizer.step()
            optimizer.zero_grad()
        return snapshot(model)

    assert_equals_the_reference(body)


# ---- steps that are not taken


def test_steps_that_all_ranks_skip() -> None:
    def body(session: Any) -> list[Tensor]:
        model, optimizer = prepare(session, SmallCnn)
        for step in range(STEPS):
            cnn_loss(model, session.rank, step).backward()
            if step % 3 == 1:
                optimizer.zero_grad()
            elif step % 3 == 2:
                average(session, model)
                model.zero_grad()
                if isinstance(session, ReferenceSession):
                    session.forget()
            else:
                optimizer.step()
                optimizer.zero_grad()
        return snapshot(model)

    assert_equals_the_reference(body, 3)


def test_one_rank_steps_and_another_zeroes() -> None:
    def body(session: Any) -> None:
        model, optimizer = prepare(session, Attention)
        for step in range(1, 5):
            attention_loss(model, session.rank, step).backward()
            if step == 2 and session.rank == 1:
                optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()

    for error in run_ranks(3, body, expect_errors=True):
        assert isinstance(error, gradlane.SessionFailedError)
        assert "the ranks ended step 2 differently" in str(error)
        assert "ranks 0, 2 called optimizer.step(); rank 1 forgot the gradients" in str(error)


def test_a_last_step_that_ends_differently() -> None:
    """No step follows whose statuses would tell: rank 0 finds out when the session is closed."""

    def body(session: Any) -> None:
        model, optimizer = prepare(session, Attention)
        for step in range(1, 4):
            attention_loss(model, session.rank, step).backward()
            if step == 3 and session.rank == 1:
                optimizer.zero_grad()
            else:
                optimizer.step()
                optimizer.zero_grad()
        session.close()

    first, second = run_ranks(2, body, expect_errors=True)
    assert isinstance(first, gradlane.SessionFailedError)
    assert "the ranks ended step 3 differently: rank 0 called optimizer.step()" in str(first)
    assert second is None


def test_learning_rates_that_differ() -> None:
    def body(session: Any) -> None:
        model, optimizer = prepare(session, Attention)
        for step in range(1, 5):
            if step == 3:
                optimizer.param_groups[0]["lr"] *= 1 + session.rank
            attention_loss(model, session.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    for error in run_ranks(2, body, expect_errors=True):
        assert isinstance(error, gradlane.SessionFailedError)
        assert "hyper-parameters in step 3 differ between rank 0 and rank 1" in str(error)


def test_zeros_in_place_are_gradients() -> None:
    """After `zero_grad(set_to_none=False)` momentum and decay go on without a gradient."""

    def body(session: Any) -> list[Tensor]:
        model, optimizer = prepare(session, Awkward)
        for step in range(1, 10):
            awkward_loss(model, session.rank, step).backward()
            if step != 6:
                optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return snapshot(model)

    assert_equals_the_reference(body, 3)
    assert_equals_the_reference(body, 1)


# ---- loss scaling, autocast


@pytest.mark.parametrize("unscales", [True, False])
@pytest.mark.parametrize("name", ["sgd", "adam", "adam-fused"])
def test_grad_scaler_skips_alike_on_all_ranks(unscales: bool, name: str) -> None:
    skipped = []

    def body(session: Any) -> list[Tensor]:
        model = seeded(SmallCnn)
        optimizer: torch.optim.Optimizer = sgd(model)
        if name != "sgd":
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=name == "adam-fused")
        session.prepare(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for step in range(STEPS):
            loss = cnn_loss(model, session.rank, step)
            if step == 2 and session.rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            average(session, model)
            if unscales:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped.append(scaler.get_scale() < before)
            optimizer.zero_grad()
            if isinstance(session, ReferenceSession):
                session.forget()
        return snapshot(model)

    parameters = assert_equals_the_reference(body)
    assert sum(skipped) == 4
    assert all(parameter.isfinite().all() for parameter in parameters)


def test_grad_scaler_skips_alike_when_everything_was_accumulated_locally() -> None:
    """An infinity on one rank counts on all, though no backward ran outside no_sync()."""
    scales: dict[int, list[float]] = {}

    def body(session: Any) -> list[Tensor]:
        model, optimizer = prepare(session, SmallCnn)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for step in range(STEPS):
            loss = cnn_loss(model, session.rank, step)
            if step == 2 and session.rank == 1:
                loss = loss * float("inf")
            with session.no_sync():
                scaler.scale(loss).backward()
            if not isinstance(session, gradlane.Session):
                average(session, model)
            scaler.step(optimizer)
            scaler.update()
            scales.setdefault(session.rank, []).append(scaler.get_scale())
            optimizer.zero_grad()
            if isinstance(session, ReferenceSession):
                session.forget()
        return snapshot(model)

    assert_equals_the_reference(body)
    assert scales[0] == scales[1]
    assert len(set(scales[0])) > 1


def test_grad_scaler_alone_attaches() -> None:
    """Without any call that lists the parameters, what the optimizer's groups hold is averaged."""

    def body(session: Any) -> list[Tensor]:
        model, optimizer = prepare(session, SmallCnn)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(STEPS):
            scaler.scale(cnn_loss(model, session.rank, step)).backward()
            if not isinstance(session, gradlane.Session):
                average(session, model)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return snapshot(model)

    assert_equals_the_reference(body, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    def body(session: Any) -> list[Tensor]:
        model, optimizer = prepare(session, Attention)
        for step in range(STEPS):
            with torch.autocast("cpu", dtype=dtype):
                loss = attention_loss(model, session.rank, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model)

    assert_equals_the_reference(body)


# ---- reads through the optimizer


def test_reads_through_the_groups_of_the_optimizer() -> None:
    def body(session: Any) -> list[Tensor]:
        model, optimizer = prepare(session, Attention)
        for step in range(STEPS):
            attention_loss(model, session.rank, step).backward()
            if not isinstance(session, gradlane.Session):
                average(session, model)
            for group in optimizer.param_groups:
                nn.utils.clip_grad_value_(group["params"], 0.01)
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in optimizer.param_groups[0]["params"]]

    assert_equals_the_reference(body)


@pytest.mark.usefixtures("each_gradient_alone")
def test_groups_are_plain_in_copies_and_afterwards() -> None:
    core = HeldCore()
    kept = []

    def body(session: Any) -> None:
        model, optimizer = prepare(session, Attention)
        attention_loss(model, 0, 1).backward()
        core.held = set(range(6))
        optimizer.step()
        optimizer.zero_grad()
        waits = [call for call in core.calls if call[1].startswith("wait")]
        assert optimizer.param_groups[0]["lr"] == 0.05
        assert len(optimizer.param_groups[0]["params"]) == 6
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        assert [call for call in core.calls if call[1].startswith("wait")] == waits
        core.release(*range(6))
        for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert type(other.param_groups[0]["params"]) is list
            assert same_bits(other.param_groups[0]["params"], snapshot(model))
        parameters = optimizer.param_groups[0]["params"]
        assert type(parameters + []) is list and type([] + parameters) is list  # noqa: RUF005
        assert parameters[0] is next(iter(parameters)) is next(reversed(parameters[:1]))
        optimizer.load_state_dict(optimizer.state_dict())
        assert type(optimizer.state_dict()["param_groups"][0]["params"]) is list
        kept.append(optimizer)

    run_ranks(1, body, core=core)
    assert type(kept[0].param_groups[0]["params"]) is list


# ---- awkward tensors


class Views(nn.Module):
    """Two parameters that are views of one tensor, one that overlaps none, in two groups."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(6)
        self.low = nn.Parameter(flat[:4])
        self.alone = nn.Parameter(torch.randn(4))
        self.high = nn.Parameter(flat[2:])

    def forward(self, values: Tensor) -> Tensor:
        return (self.low * values).square() + self.alone * values + self.high.exp()


@pytest.mark.usefixtures("each_gradient_alone")
def test_parameters_that_share_storage() -> None:
    core = HeldCore()

    def body(session: Any) -> list[Tensor]:
        model: Any = seeded(Views)
        groups: list[Any] = [
            {"params": [model.high, model.alone]},
            {"params": [model.low], "lr": 0.02},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.1)
        session.prepare(model, optimizer)
        for step in range(STEPS):
            model(batch((3, 4), session.rank, step)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            # One of the two is read first: the other one is updated with it.
            assert model.low.numel() == 4
        return snapshot(model)

    assert_equals_the_reference(body, core=core)
    assert (0, 2) in {call[3] for call in core.calls if call[1] == "wait"}


class Strange(nn.Module):
    """Complex, f64, sparse, scalar, empty and transposed parameters; inputs (N, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.complex = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.exact = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.table = nn.Embedding(7, 3, sparse=True)
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0))
        self.transposed = nn.Parameter(torch.randn(4, 3).t())
        self.strided = nn.Parameter(torch.randn(6)[::2])

    def forward(self, values: Tensor) -> Tensor:
        turned: Tensor = (values.to(torch.complex64) @ self.complex).abs().sum()
        phase = (self.wide.conj() * values.to(torch.complex128)).real.sum()
        rows = self.table(values.abs().mul(2).long().clamp(max=6)).sum()
        plain = (values @ self.transposed).square().sum() * self.scalar + self.empty.sum()
        total: Tensor = (
            turned
            + phase
            + rows
            + plain
            + (self.strided * values).sum()
            + (self.exact * values).square().sum()
        )
        return total


@pytest.mark.parametrize("accumulates", [False, True])
def test_strange_tensors(accumulates: bool) -> None:
    def body(session: Any) -> list[Tensor]:
        model = seeded(Strange)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        for step in range(STEPS):
            if accumulates:
                with session.no_sync():
                    model(batch((2, 3), session.rank, 50 + step)).backward()
                model(batch((2, 3), session.rank, 90 + step)).backward()
            model(batch((2, 3), session.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model)

    assert_equals_the_reference(body, 3)


# ---- models that change


def test_freezing_and_unfreezing_with_prepare_again() -> None:
    def body(session: Any) -> list[Tensor]:
        model: Any = seeded(SmallCnn)
        model.body.requires_grad_(False)
        optimizer = torch.optim.SGD(model.head.parameters(), lr=0.05, momentum=0.9)
        session.prepare(model, optimizer)
        for step in range(9):
            if step == 3:
                model.body.requires_grad_(True)
                optimizer.add_param_group({"params": list(model.body.parameters())})
                session.prepare(model, optimizer)
            if step == 6:
                model.head.requires_grad_(False)
                session.prepare(model, optimizer)
            cnn_loss(model, session.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model)

    expected = run_reference(2, body)
    for parameters in run_ranks(2, body):
        assert same_bits(parameters, expected[0])


def test_prepare_again_in_the_middle_of_a_step() -> None:
    def body(session: Any) -> None:
        model, optimizer = prepare(session, Attention)
        attention_loss(model, 0, 1).backward()
        with pytest.raises(gradlane.UsageError, match="in the middle of step 1"):
            session.prepare(model, optimizer)

    run_ranks(1, body)
