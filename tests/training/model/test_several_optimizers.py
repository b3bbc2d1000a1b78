"""Several optimizers over one model: the bits of DDP, whatever order they are called in."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradlane
from gradlane.training.model.several_optimizers import SeveralOptimizers
from tests.training.model.held_step import TrainStep, check_norm_alone_is_waited_for
from tests.training.model.models import seeded
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import (
    ReferenceSession,
    run_reference,
    same_bits,
    snapshot,
)
from tests.training.model.test_optimizers import assert_same_state
from tests.training.model.test_training import batch

STEPS = 7
Loop = Callable[["Loops"], None]


class Net(nn.Module):
    """Two layers whose matrices and biases are stepped by different optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.second(torch.tanh(self.first(inputs)))
        return outputs


def of_net(model: nn.Module, **settings: Any) -> list[Optimizer]:
    """Muon for matrices where torch has it, else SGD, beside AdamW for the rest."""
    matrices = [one for one in model.parameters() if one.ndim == 2]
    others = [one for one in model.parameters() if one.ndim != 2]
    kind: Any = getattr(torch.optim, "Muon", torch.optim.SGD)
    return [kind(matrices, lr=0.05), torch.optim.AdamW(others, lr=0.02, **settings)]


class Both(Optimizer):
    """A program's own optimizer that steps two others, with all groups."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        groups = [group for one in optimizers for group in one.param_groups]
        super().__init__([one for group in groups for one in group["params"]], {})
        self.optimizers = optimizers

    def step(self, closure: Any = None) -> Any:
        for one in self.optimizers:
            one.step()


class Bag:
    """No optimizer, but an object with several in attributes."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self.muon, self.adam = optimizers


class Loops:
    """What a loop of a test trains: with gradlane, or by the reference."""

    def __init__(self, session: Any, given: str = "list", **settings: Any) -> None:
        self.session = session
        self.model: Any = seeded(Net)
        self.a, self.b = self.optimizers = of_net(self.model, **settings)
        forms: dict[str, Callable[[list[Optimizer]], Any]] = {
            "list": list,
            "tuple": tuple,
            "both": Both,
            "bag": Bag,
            "dict": lambda ones: dict(enumerate(ones)),
        }
        self.given = forms[given](self.optimizers)
        returned = session.prepare(self.model, self.given)
        if not isinstance(session, ReferenceSession):
            assert returned[1] is self.given

    def backward(self, step: int, scaler: Any = None, is_infinite: bool = False) -> None:
        loss = self.model(batch((3, 6), step, self.session.rank)).pow(2).mean()
        if is_infinite:
            # Of one optimizer alone: the other one steps.
            loss = loss + self.model.first.bias.sum() * float("inf")
        (loss if scaler is None else scaler.scale(loss)).backward()

    def average(self) -> None:
        """Take the means, where it is the reference that trains."""
        if isinstance(self.session, ReferenceSession):
            self.session.average(self.model)

    def forget(self) -> None:
        if isinstance(self.session, ReferenceSession):
            self.session.forget()

    def zero(self, *optimizers: Optimizer) -> None:
        for one in optimizers or self.optimizers:
            one.zero_grad()
        self.forget()

    def bits(self) -> list[Tensor]:
        return [
            *snapshot(self.model),
            *(
                value.detach().clone()
                for optimizer in self.optimizers
                for state in optimizer.state.values()
                for _, value in sorted(state.items())
                if isinstance(value, Tensor)
            ),
        ]


def in_order(loops: Loops) -> None:
    for step in range(STEPS):
        loops.backward(step)
        loops.average()
        loops.a.step()
        loops.b.step()
        loops.zero()


def in_turns(loops: Loops) -> None:
    """In another order in every second step, with schedulers and `zero_grad` in between."""
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in loops.optimizers]
    for step in range(STEPS):
        loops.backward(step)
        loops.average()
        for number in (0, 1) if step % 2 else (1, 0):
            loops.optimizers[number].step()
            schedulers[number].step()
            loops.optimizers[number].zero_grad()
        loops.forget()


def one_rests(loops: Loops) -> None:
    """One optimizer steps in every third step alone; its gradients are reset in between."""
    for step in range(STEPS):
        loops.backward(step)
        loops.average()
        loops.a.step()
        if step % 3 == 0:
            loops.b.step()
        loops.model.zero_grad()
        loops.forget()


def one_adds_up(loops: Loops) -> None:
    """One optimizer steps in every second step, on gradients that add up until then."""
    for step in range(STEPS + 1):
        loops.backward(step)
        loops.average()
        loops.a.step()
        loops.a.zero_grad()
        if step % 2:
            loops.zero(loops.b)


def looks_between(loops: Loops) -> None:
    """Reads parameters and changes gradients between the two steps."""
    for step in range(STEPS):
        loops.backward(step)
        loops.average()
        loops.b.step()
        with torch.no_grad():
            loops.model.first.bias.add_(loops.model.first.weight.sum() * 1e-3)
            loops.model.second.weight.grad.mul_(0.5)
            if step == 2:
                loops.model.first.weight.grad = None
        loops.a.step()
        loops.zero()


def clips_one(loops: Loops) -> None:
    for step in range(STEPS):
        loops.backward(step)
        loops.average()
        nn.utils.clip_grad_norm_(loops.a.param_groups[0]["params"], 0.01)
        loops.a.step()
        loops.b.step()
        loops.zero()


def clips(loops: Loops) -> None:
    for step in range(STEPS):
        loops.backward(step)
        loops.average()
        loops.session.clip_grad_norm_(0.05, model=loops.model)
        loops.a.step()
        loops.b.step()
        loops.zero()


def skips(loops: Loops) -> None:
    """Resets one optimizer's gradients, or all, in place of a step."""
    for step in range(STEPS):
        loops.backward(step)
        loops.average()
        if step % 3 == 1:
            loops.a.zero_grad()
        elif step % 3 == 0:
            loops.a.step()
        if step % 3 != 2:
            loops.b.step()
        loops.zero()


def with_closures(loops: Loops) -> None:
    for step in range(STEPS):
        for number, optimizer in enumerate(loops.optimizers):

            def evaluate(step: int = 2 * step + number) -> None:
                loops.zero()
                loops.backward(step)
                loops.average()

            optimizer.step(evaluate)  # type: ignore[arg-type]


def with_holder(loops: Loops) -> None:
    """Steps the object that was given, where it can step."""
    for step in range(STEPS):
        loops.backward(step)
        loops.average()
        getattr(loops.given, "step", lambda: [one.step() for one in loops.optimizers])()
        getattr(loops.given, "zero_grad", loops.zero)()
        loops.forget()


def scaled(loops: Loops, unscales: bool = False) -> None:
    """Has a scaler step each; one rank's infinity skips them."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(STEPS):
        loops.backward(step, scaler, step == 4 and loops.session.rank == 0)
        loops.average()
        if unscales:
            for one in loops.optimizers:
                scaler.unscale_(one)
            loops.session.clip_grad_norm_(0.05, model=loops.model)
        for one in loops.optimizers:
            scaler.step(one)
        scaler.update()
        loops.zero()


def scaled_and_clipped(loops: Loops) -> None:
    scaled(loops, unscales=True)


def str_of(loop: Any) -> str:
    return str(loop.__name__)


LOOPS = [
    in_order,
    in_turns,
    one_rests,
    one_adds_up,
    looks_between,
    clips_one,
    clips,
    skips,
    with_closures,
    scaled,
    scaled_and_clipped,
]


def check(loop: Loop, given: str = "list", core: Any = None, **settings: Any) -> None:
    def body(session: Any) -> list[Tensor]:
        loops = Loops(session, given, **settings)
        loop(loops)
        return loops.bits()

    options: Any = {} if core is None else {"core": core, "local": "off"}
    expected = run_reference(2, body)
    for rank, found in enumerate(run_ranks(2, body, **options)):
        assert same_bits(found, expected[rank])


@pytest.mark.parametrize("loop", LOOPS, ids=str_of)
def test_they_step_as_with_ddp(loop: Loop) -> None:
    check(loop)


@pytest.mark.parametrize("given", ["tuple", "both", "bag", "dict"])
def test_they_come_in_any_form(given: str) -> None:
    check(with_holder, given=given)


@pytest.mark.parametrize("loop", [in_order, scaled, scaled_and_clipped], ids=str_of)
def test_fused(loop: Loop) -> None:
    check(loop, fused=True)


def test_the_real_core() -> None:
    check(in_turns)
    check(scaled_and_clipped)


def test_each_is_stepped_in_parts() -> None:
    """No mean of the first layer is there when both have stepped."""

    def begin(session: Any, optimizers: list[Optimizer]) -> TrainStep:
        def train_step(loss: Tensor, after_backward: Callable[[], object]) -> Tensor:
            loss.backward()  # type: ignore[no-untyped-call]
            after_backward()
            for one in optimizers:
                one.step()
            return torch.ones(())

        return train_step

    def make(model: Any) -> list[Optimizer]:
        return of_net(model)

    check_norm_alone_is_waited_for(4, begin, make)


class Normed(torch.optim.SGD):
    """Mixes all its parameters."""

    def step(self, closure: Any = None) -> Any:
        norm = sum(one.detach().square().sum() for one in self.param_groups[0]["params"])
        for group in self.param_groups:
            group["lr"] = 0.1 / float(1 + norm)
        return super().step(closure)


def test_one_that_steps_whole_leaves_the_other_in_parts() -> None:
    def body(session: Any) -> list[Tensor]:
        model: Any = seeded(Net)
        a = torch.optim.SGD(model.first.parameters(), lr=0.1, momentum=0.9)
        b = Normed(model.second.parameters(), lr=0.1)
        if isinstance(session, ReferenceSession):
            session.prepare(model, [a, b])  # type: ignore[arg-type]
        else:
            with pytest.warns(UserWarning, match="^Normed is not known"):
                session.prepare(model, [a, b])
        for step in range(STEPS):
            model(batch((3, 6), step, session.rank)).pow(2).mean().backward()
            if isinstance(session, ReferenceSession):
                session.average(model)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for one in (a, b) if step % 2 else (b, a):
                    one.step()
                    one.zero_grad()
        return snapshot(model)

    expected = run_reference(1, body)
    assert same_bits(run_ranks(1, body)[0], expected[0])


def test_saved_state_is_of_one_optimizer_with_all_groups() -> None:
    def body(session: Any) -> Any:
        loops = Loops(session)
        in_order(loops)
        saved = SeveralOptimizers(loops.optimizers).state_dict()
        whole = [one.state_dict() for one in loops.optimizers]
        fresh = of_net(seeded(Net))
        SeveralOptimizers(fresh).load_state_dict(saved)
        return whole, [one.state_dict() for one in fresh], saved

    ((whole, loaded, saved),) = run_ranks(1, body)
    numbers: list[int] = []
    before = 0
    for one in whole:
        # Which parameters have a state depends on the release of torch.
        numbers += [before + number for number in one["state"]]
        before += sum(len(group["params"]) for group in one["param_groups"])
    assert sorted(saved["state"]) == numbers and numbers[-2:] == [2, 3]
    for one, other in zip(whole, loaded, strict=True):
        assert_same_state(one, other)


def test_checkpoints_hold_all(tmp_path: Path) -> None:
    def body(session: Any) -> Any:
        loops = Loops(session)
        step = session.restore() or 0 if session.rank >= 0 else 0
        steps.append(step)
        for _ in range(2):
            loops.backward(steps[0])
            for one in loops.optimizers:
                one.step()
            loops.zero()
        return loops.bits()

    steps: list[int] = []
    checkpoints: Any = {"checkpoints": gradlane.Checkpoints(tmp_path, every=2)}
    run_ranks(1, body, **checkpoints)
    (resumed,) = run_ranks(1, body, **checkpoints)

    def whole(session: Any) -> Any:
        loops = Loops(session)
        for _ in range(4):
            loops.backward(0)
            for one in loops.optimizers:
                one.step()
            loops.zero()
        return loops.bits()

    steps[:] = [0]
    (expected,) = run_ranks(1, whole)
    assert same_bits(resumed, expected)


def refused(make: Callable[[Net], Any], **options: Any) -> str:
    def body(session: Any) -> None:
        model = Net()
        session.prepare(model, make(model))

    (error,) = run_ranks(1, body, expect_errors=True, **options)
    return str(error)


def test_what_is_refused() -> None:
    def sgd(parameters: Iterable[Tensor]) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    twice = refused(lambda model: [sgd(model.parameters()), sgd(model.first.parameters())])
    assert "'first.weight' is in two of the optimizers (SGD and SGD)" in twice
    some = refused(lambda model: [sgd([model.first.weight]), sgd([model.first.bias])])
    assert "does not hold 'second.weight'" in some
    server = refused(of_net, update="server")
    assert "prepare() of several optimizers with update" in server
    assert "give one torch.optim.Optimizer, or a list" in refused(lambda model: [])


def test_clipping_between_two_steps_is_refused() -> None:
    def body(session: Any) -> None:
        loops = Loops(session)
        loops.backward(0)
        loops.a.step()
        session.clip_grad_norm_(1.0)

    (error,) = run_ranks(1, body, expect_errors=True)
    assert "clip before the first one steps" in str(error)


def test_a_rank_that_leaves_one_out_is_named() -> None:
    def body(session: Any) -> None:
        loops = Loops(session)
        for step in range(4):
            loops.backward(step)
            loops.a.step()
            if step != 1 or session.rank:
                loops.b.step()
            loops.zero()

    errors = run_ranks(2, body, expect_errors=True)
    assert all("step 2 differ between rank 0 and rank 1" in str(one) for one in errors)
    assert any("which of its optimizers step" in str(one) for one in errors), errors
