"""Updates on the servers: what is right, and what is refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlane
from tests.training.model.models import Awkward, seeded
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import same_bits, snapshot, train_reference
from tests.training.model.test_training import awkward_loss


def run_alone(body: Callable[[Any], Any], **options: Any) -> Any:
    return run_ranks(1, body, update="server", **options)[0]


def prepared(session: Any, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **settings)
    session.prepare(model, optimizer)
    return model, optimizer


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 3)).square().sum().backward()


RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.01),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1),
    "sgd-nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "sgd-maximize": lambda p: torch.optim.SGD(p, lr=1e-3, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam-l2": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, betas=(0.3, 0.9)),
    "adam-decoupled": lambda p: torch.optim.Adam(
        p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, eps=1e-6),
    "adamw-maximize": lambda p: torch.optim.AdamW(p, lr=1e-3, maximize=True),
}


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    """Changes the learning rate and the momentum, or the first of the betas, in each step."""
    cycles = any("momentum" in group or "betas" in group for group in optimizer.param_groups)
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.05, total_steps=20, cycle_momentum=cycles
    )


MARKS = {
    "adam-decoupled": pytest.mark.skipif(
        "decoupled_weight_decay" not in inspect.signature(torch.optim.Adam).parameters,
        reason="the Adam of this torch has no decoupled_weight_decay",
    )
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in RULES])
def test_the_adapter_asks_the_servers_for_torchs_own_steps(name: str) -> None:
    """Torch's kernels fuse operations that the servers round one by one."""

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return RULES[name](model.parameters())

    def body(session: Any) -> list[Tensor]:
        model = seeded(Awkward)
        optimizer = make_optimizer(model)
        session.prepare(model, optimizer)
        schedule = one_cycle(optimizer)
        for step in range(1, 11):
            awkward_loss(model, session.rank, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return snapshot(model)

    (expected, *_) = train_reference(
        2,
        10,
        lambda: seeded(Awkward),
        make_optimizer,
        awkward_loss,
        make_scheduler=one_cycle,
    )
    first, second = run_ranks(2, body, update="server")
    torch.testing.assert_close(first, snapshot(expected), rtol=1e-5, atol=1e-6)
    assert same_bits(first, second)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_tensor_learning_rate_is_taken_as_its_number(kind: Any) -> None:
    """Torch computes with it in f32, the servers in f64 as with any number."""

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = kind(
            model.parameters(), lr=torch.tensor(0.05), weight_decay=0.01
        )
        return optimizer

    def body(session: Any) -> list[Tensor]:
        model = seeded(Awkward)
        optimizer = make_optimizer(model)
        session.prepare(model, optimizer)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(1, 6):
            awkward_loss(model, session.rank, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            # The step is the core's already: this changes the next one.
            schedule.step()
            optimizer.zero_grad()
        return snapshot(model)

    (expected, *_) = train_reference(
        2,
        5,
        lambda: seeded(Awkward),
        make_optimizer,
        awkward_loss,
        make_scheduler=lambda one: torch.optim.lr_scheduler.ExponentialLR(one, 0.9),
    )
    found = run_ranks(2, body, update="server")[0]
    torch.testing.assert_close(found, snapshot(expected), rtol=1e-5, atol=1e-6)


class Signed(torch.optim.SGD):
    """Steps by code of its own."""

    steps_per_parameter = True

    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError


REFUSED: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str]] = {
    "rmsprop": (torch.optim.RMSprop, r"RMSprop with .* run torch\.optim\.SGD, Adam and AdamW"),
    "subclass": (Signed, "Signed with"),
    "amsgrad": (lambda p: torch.optim.Adam(p, amsgrad=True), "group 0 .* amsgrad=True"),
    "infinite-lr": (lambda p: torch.optim.SGD(p, lr=float("inf")), "group 0 .* lr=inf"),
    "differentiable": (lambda p: torch.optim.Adam(p, differentiable=True), "differentiable=True"),
    "second-group": (
        lambda p: torch.optim.AdamW([{"params": []}, {"params": p, "eps": float("nan")}]),
        "group 1 .* eps=nan",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_the_servers_do_not_run_is_refused_by_name(name: str) -> None:
    make_optimizer, words = REFUSED[name]

    def body(session: Any) -> None:
        model = nn.Linear(2, 2)
        with pytest.raises((ValueError, gradlane.UsageError), match=words):
            session.prepare(model, make_optimizer(list(model.parameters())))

    run_alone(body)


def test_step_hooks_are_refused_also_later() -> None:
    def body(session: Any) -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters())
        handle = optimizer.register_step_post_hook(lambda *_: None)
        with pytest.raises(gradlane.UsageError, match="step hooks"):
            session.prepare(model, optimizer)
        handle.remove()
        session.prepare(model, optimizer)
        optimizer.register_step_post_hook(lambda *_: None)
        with pytest.raises(gradlane.UsageError, match="step hooks"):
            backward(model)

    run_alone(body)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("lr", -0.1, "group 0 .* lr=-0.1"),
        ("momentum", float("nan"), "group 0 .* momentum=nan"),
        ("nesterov", True, "group 0 .* Nesterov momentum needs"),
    ],
)
def test_a_setting_that_goes_bad_is_named(key: str, value: Any, words: str) -> None:
    def body(session: Any) -> None:
        model, optimizer = prepared(session)
        good = optimizer.param_groups[0][key]
        optimizer.param_groups[0][key] = value
        with pytest.raises(ValueError, match=words):
            backward(model)
        model.zero_grad()
        optimizer.param_groups[0][key] = good
        backward(model)
        optimizer.step()

    run_alone(body)


def test_groups_may_not_gain_or_lose_parameters() -> None:
    def body(session: Any) -> None:
        model, optimizer = prepared(session)
        lost = optimizer.param_groups[0]["params"].pop()
        with pytest.raises(ValueError, match="holds 3 of 4 trained parameters"):
            backward(model)
        optimizer.param_groups[0]["params"].append(lost)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        with pytest.raises(ValueError, match=r"group 1 .* was not trained when"):
            backward(model)

    run_alone(body)


def test_learning_rate_changed_too_late() -> None:
    def body(session: Any) -> None:
        model, optimizer = prepared(session)
        backward(model)
        optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(
            gradlane.SessionFailedError, match="changed between the first gradient and"
        ):
            optimizer.step()
        with pytest.raises(gradlane.SessionFailedError):
            model.state_dict()

    (error,) = run_ranks(1, body, update="server", expect_errors=True)
    assert isinstance(error, gradlane.SessionFailedError)


def test_forward_before_step() -> None:
    def body(session: Any) -> None:
        model, optimizer = prepared(session)
        backward(model)
        with torch.no_grad(), pytest.raises(gradlane.UsageError, match="update has already begun"):
            model(torch.ones(2, 3))
        with pytest.raises(gradlane.UsageError, match="a forward after backward"):
            model(torch.ones(2, 3))
        optimizer.step()
        model(torch.ones(2, 3))

    run_alone(body)


def test_gradients_cannot_be_read_or_forgotten() -> None:
    def body(session: Any) -> None:
        model, optimizer = prepared(session)
        backward(model)
        for parameter in list(model.parameters()):
            with pytest.raises(gradlane.UsageError, match="stay on the servers"):
                _ = parameter.grad
            with pytest.raises(gradlane.UsageError, match="stay on the servers"):
                parameter.grad = None
        with pytest.raises(gradlane.UsageError, match="the update has already begun"):
            optimizer.zero_grad()
        optimizer.step()
        with pytest.raises(gradlane.UsageError, match="stay on the servers"):
            nn.utils.clip_grad_norm_(list(model.parameters()), 1.0)
        optimizer.zero_grad()
        assert next(model.parameters()).grad is None

    run_alone(body)


def test_state_is_not_read_in_the_middle_of_an_update() -> None:
    def body(session: Any) -> None:
        model, optimizer = prepared(session, momentum=0.9)
        backward(model)
        with pytest.raises(gradlane.UsageError, match=r"between backward\(\) and optimizer.step"):
            optimizer.state_dict()
        optimizer.step()
        assert len(optimizer.state_dict()["state"]) == 4

    run_alone(body)


def test_state_is_not_read_through_a_parameter_that_was_converted() -> None:
    """The core would read past the end of its memory."""

    def body(session: gradlane.Session) -> None:
        model = nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        session.prepare(model, optimizer)
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        session.synchronize()
        model.half()
        with pytest.raises(gradlane.UsageError, match="'weight' was converted after prepare"):
            optimizer.state_dict()

    run_ranks(2, body, update="server")
