"""Every optimizer and scheduler of torch, in parts and late, against the same loop without us.

One rank: all gradients of a step are held back until the step, the scheduler's step and `zero_grad`
are over; then they become ready in two parts.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR

from gradlane.training.model.deferred_update import DeferredUpdate
from gradlane.training.model.optimizers import OPTIMIZER_SUPPORT, steps_per_parameter
from tests.paths import ROOT
from tests.training.model import optimizer_cases
from tests.training.model.held_core import HeldCore
from tests.training.model.models import seeded
from tests.training.model.optimizer_cases import REFUSED_OPTIONS, Case
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import same_bits
from tests.training.model.test_training import batch

STEPS = 6
CASES = optimizer_cases.cases()
CUDA_CASES = {**CASES, **optimizer_cases.capturable_cases()}


pytestmark = pytest.mark.usefixtures("each_gradient_alone")


class Several(nn.Module):
    """Matrices of unlike shapes, which is what Muon takes; the last two are used in turns."""

    def __init__(self) -> None:
        super().__init__()
        for index, shape in enumerate([(5, 7), (8, 3), (1, 4), (33, 17), (2, 2), (6, 6)]):
            self.register_parameter(f"p{index}", nn.Parameter(torch.randn(shape)))

    def loss(self, step: int) -> Tensor:
        """A loss whose gradients have no pattern; `p4` and `p5` take part in some steps only."""
        names = [name for name in self._parameters if name != f"p{4 + step % 2}"]
        total = torch.zeros(())
        for index, name in enumerate(names):
            value = getattr(self, name)
            drawn = batch(value.shape, index, step).to(value.device)
            total = total + (value * drawn).sum().cpu() + value.square().mean().cpu()
        return total


def train(
    model: Several,
    optimizer: Optimizer,
    scheduler: Any,
    scheduler_first: bool = False,
    after: Callable[[int], None] = lambda step: None,
    closure: bool = False,
) -> None:
    """A user's loop, with a place to let gradients go that were held back."""
    for step in range(1, STEPS + 1):
        if not closure:
            model.loss(step).backward()  # type: ignore[no-untyped-call]
        if scheduler is not None and scheduler_first:
            scheduler.step()
        if closure:

            def evaluate(step: int = step) -> float:
                optimizer.zero_grad()
                loss = model.loss(step)
                loss.backward()  # type: ignore[no-untyped-call]
                return loss.item()

            assert isinstance(optimizer.step(evaluate), float)
        else:
            optimizer.step()
        if scheduler is not None and not scheduler_first:
            scheduler.step()
        optimizer.zero_grad()
        after(step)


def assert_equals_torch(
    make_optimizer: Callable[[Several], Optimizer],
    make_scheduler: Callable[[Optimizer], Any] = lambda optimizer: None,
    *,
    in_parts: bool = True,
    device: str = "cpu",
    **how: Any,
) -> None:
    """Assert that parameters and optimizer state have the bits of the loop without gradlane."""
    plain: Any = seeded(Several).to(device)
    plain_optimizer = make_optimizer(plain)
    train(plain, plain_optimizer, make_scheduler(plain_optimizer), **how)
    core = HeldCore()
    parts: list[int] = []
    apply = DeferredUpdate.apply

    def counted(self: DeferredUpdate, arrived: Any) -> None:
        arrived = list(arrived)
        parts.append(len(arrived))
        apply(self, arrived)

    def body(session: Any) -> tuple[list[Tensor], dict[str, Any]]:
        model: Any = seeded(Several).to(device)
        names = list(model._parameters)
        optimizer = make_optimizer(model)
        session.prepare(model, optimizer)

        def hold() -> None:
            core.held = set(range(len(names))) if in_parts else set()

        def let_go(step: int) -> None:
            for turn in (0, 1):
                some = [index for index in range(len(names)) if (index // 2 + step) % 2 == turn]
                core.channels[0].arrive(some)
                core.release(*some)
                for index in some:
                    getattr(model, names[index])
            hold()

        hold()
        train(model, optimizer, make_scheduler(optimizer), after=let_go, **how)
        state = copy.deepcopy(optimizer.state_dict())
        return [one.detach().clone() for one in model.parameters()], state

    with patch.object(DeferredUpdate, "apply", counted):
        ((parameters, state),) = run_ranks(1, body, core=core)
    assert same_bits(parameters, [one.detach() for one in plain.parameters()])
    assert_same_state(state, plain_optimizer.state_dict())
    if in_parts and device == "cpu":
        assert len(parts) == 2 * STEPS and set(parts) == {2, 3}, parts
    elif in_parts:
        # What is let go together may return from the device's copies one by one.
        assert sum(parts) == 5 * STEPS and set(parts) <= {1, 2, 3}, parts
    else:
        assert parts == []


def assert_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["state"].keys() == expected["state"].keys()
    for key, values in expected["state"].items():
        mine = found["state"][key]
        assert mine.keys() == values.keys()
        for name, value in values.items():
            if isinstance(value, Tensor):
                assert same_bits([mine[name]], [value]), (key, name)
            else:
                assert mine[name] == value, (key, name)


def test_the_table_knows_every_optimizer_of_torch() -> None:
    assert set(optimizer_cases.torch_optimizers()) <= set(OPTIMIZER_SUPPORT)


@pytest.mark.skipif(
    optimizer_cases.torch_optimizers() != sorted(OPTIMIZER_SUPPORT),
    reason="the page has newer optimizers",
)
def test_the_page_is_up_to_date() -> None:
    page = ROOT / "docs" / "optimizers.md"
    assert page.read_text(encoding="utf-8") == optimizer_cases.page(), (
        "write it again: python -m tests.training.model.optimizer_cases > docs/optimizers.md"
    )


@pytest.mark.parametrize("name", list(CASES))
def test_every_optimizer_in_parts_gives_torchs_bits(name: str) -> None:
    case = CASES[name]
    in_parts = OPTIMIZER_SUPPORT[case.kind].in_parts
    assert_equals_torch(lambda model: case.make(model.parameters()), in_parts=in_parts)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("name", list(CUDA_CASES))
def test_every_optimizer_in_parts_gives_torchs_bits_on_cuda(name: str) -> None:
    case = CUDA_CASES[name]
    try:
        case.make([nn.Parameter(torch.zeros(2, 2, device="cuda"))])
    except RuntimeError as error:
        pytest.skip(f"torch refuses it on CUDA: {error}")
    assert_equals_torch(lambda model: case.make(model.parameters()), device="cuda")


@pytest.mark.parametrize("kind", optimizer_cases.driven())
def test_every_optimizer_with_a_closure_and_groups(kind: str) -> None:
    def make_optimizer(model: Several) -> Optimizer:
        parameters = list(model.parameters())
        groups = [{"params": parameters[1::2], "lr": 0.02}, {"params": parameters[::2]}]
        made: Optimizer = getattr(torch.optim, kind)(groups, lr=0.01)
        return made

    assert_equals_torch(make_optimizer, closure=True)


@pytest.mark.parametrize("kind", optimizer_cases.driven())
def test_every_optimizer_is_seen_whole_by_step_hooks(kind: str) -> None:
    seen: list[int] = []

    def make_optimizer(model: Several) -> Optimizer:
        made = Case(kind).make(model.parameters())

        def look(optimizer: Optimizer, *_: Any) -> None:
            held = [one for group in optimizer.param_groups for one in group["params"]]
            seen.append(sum(one.grad is not None for one in held))

        made.register_step_pre_hook(look)
        return made

    assert_equals_torch(make_optimizer, in_parts=False)
    assert seen == [5] * 2 * STEPS


@pytest.mark.parametrize("option", list(REFUSED_OPTIONS))
@pytest.mark.parametrize("kind", optimizer_cases.driven())
def test_options_that_cannot_be_are_refused_by_name(kind: str, option: str) -> None:
    if option not in inspect.signature(getattr(torch.optim, kind)).parameters:
        assert kind in ("Adafactor", "Adagrad", "Muon", "SGD"), "the option is spelled otherwise"
        return

    def body(session: Any) -> None:
        model: Any = seeded(Several)
        groups = [{"params": [model.p0]}, {"params": list(model.parameters())[1:], option: True}]
        optimizer = getattr(torch.optim, kind)(groups)
        with pytest.raises(ValueError, match=f"group 1 of the optimizer has {option}=True"):
            session.prepare(model, optimizer)

    run_ranks(1, body)


def test_a_step_that_somebody_has_replaced_is_not_torchs() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    lr_scheduler.StepLR(optimizer, 1)
    assert steps_per_parameter(optimizer)
    original = optimizer.step

    def step(*arguments: Any) -> Any:
        return original(*arguments)

    optimizer.__dict__["step"] = step
    assert not steps_per_parameter(optimizer)


# ---- schedulers


class WithMetric:
    """Feeds a scheduler that goes by a metric; its loss stops falling."""

    def __init__(self, scheduler: lr_scheduler.ReduceLROnPlateau) -> None:
        self.scheduler = scheduler
        self.losses = iter([3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])

    def step(self) -> None:
        self.scheduler.step(next(self.losses))


def warm_up(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)


def changes_momentum(optimizer: Optimizer) -> bool:
    return any(group.get("momentum") or "betas" in group for group in optimizer.param_groups)


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.7),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": warm_up,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [warm_up(o), lr_scheduler.CosineAnnealingLR(o, 4)], [2]
    ),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [warm_up(o), lr_scheduler.ExponentialLR(o, 0.8)]
    ),
    "ReduceLROnPlateau": lambda o: WithMetric(lr_scheduler.ReduceLROnPlateau(o, patience=1)),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(
        o, 0.001, 0.1, step_size_up=2, cycle_momentum=changes_momentum(o)
    ),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(
        o, 0.1, total_steps=STEPS + 2, cycle_momentum=changes_momentum(o)
    ),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, STEPS),
    "SWALR": lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=3),
}

SCHEDULED: dict[str, Callable[[Any], Optimizer]] = {
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
    "adam-tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.05)),
}


def test_every_scheduler_of_torch_is_tried() -> None:
    of_torch = {
        name
        for name, value in vars(lr_scheduler).items()
        if inspect.isclass(value)
        and issubclass(value, lr_scheduler.LRScheduler)
        and name not in ("LRScheduler", "_LRScheduler")
    }
    assert of_torch == set(SCHEDULERS) - {"SWALR"}


@pytest.mark.parametrize("optimizer", list(SCHEDULED))
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_every_scheduler_gives_torchs_bits(name: str, first: bool, optimizer: str) -> None:
    with warnings.catch_warnings():
        # That the scheduler goes first is the point; it warns about itself, too, when chained.
        warnings.simplefilter("ignore", UserWarning)
        assert_equals_torch(
            lambda model: SCHEDULED[optimizer](model.parameters()),
            SCHEDULERS[name],
            scheduler_first=first,
        )


def test_tensors_that_are_changed_in_place_after_step_do_not_matter() -> None:
    """A learning rate and betas as tensors, which the user overwrites while the update is due."""

    class Overwriting:
        def __init__(self, optimizer: Optimizer) -> None:
            self.group = optimizer.param_groups[0]

        def step(self) -> None:
            self.group["lr"].mul_(0.7)
            for beta in self.group["betas"]:
                beta.mul_(0.95)

    def make_optimizer(model: Several) -> Optimizer:
        return torch.optim.Adam(
            model.parameters(),
            lr=torch.tensor(0.05),
            betas=(torch.tensor(0.9), torch.tensor(0.99)),
        )

    assert_equals_torch(make_optimizer, Overwriting)


# ---- state between steps


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in ("SGD-momentum", "AdamW", "Adagrad", "NAdam", "ASGD", "Adafactor")
        if name in CASES
    ],
)
def test_saving_and_loading_while_an_update_is_due(name: str) -> None:
    case = CASES[name]

    class Loading:
        """Stands in for a scheduler: saves and loads right after each step."""

        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer = optimizer
            self.state = copy.deepcopy(optimizer.state_dict())
            self.steps = 0

        def step(self) -> None:
            self.steps += 1
            if self.steps == 4:
                self.optimizer.load_state_dict(self.state)
            else:
                self.state = copy.deepcopy(self.optimizer.state_dict())

    def make_optimizer(model: Several) -> Optimizer:
        return case.make(model.parameters())

    plain: Any = seeded(Several)
    plain_optimizer = make_optimizer(plain)
    train(plain, plain_optimizer, Loading(plain_optimizer))

    def body(session: Any) -> tuple[list[Tensor], dict[str, Any]]:
        model: Any = seeded(Several)
        optimizer = make_optimizer(model)
        session.prepare(model, optimizer)
        train(model, optimizer, Loading(optimizer))
        state = copy.deepcopy(optimizer.state_dict())
        return [one.detach().clone() for one in model.parameters()], state

    for parameters, state in run_ranks(2, body):
        assert same_bits(parameters, [one.detach() for one in plain.parameters()])
        assert_same_state(state, plain_optimizer.state_dict())
