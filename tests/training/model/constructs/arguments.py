"""What `prepare` may be given by mistake, and codecs that do not go with an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradlane.training.core import load_core
from tests.training.model.constructs import Construct
from tests.training.model.ranks import run_ranks

Make = Callable[[nn.Module, Optimizer], tuple[Any, Any]]
sgd = torch.optim.SGD


class Wrapper:
    """An optimizer as other packages wrap it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer


class Derived(Optimizer):
    """An optimizer as other packages wrap it, and a subclass."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """Those of the optimizer inside."""
        return self.optimizer.param_groups


class Adds(nn.Module):
    """A module without parameters."""


def plan_on_one_rank(defer: bool | None) -> None:
    """Give one rank what is no plan."""

    def body(session: Any) -> None:
        model = nn.Linear(2, 2)
        plan: Any = 42 if session.rank == 1 else None
        session.prepare(model, sgd(model.parameters(), lr=0.1), defer=defer, plan=plan)

    other, own = run_ranks(2, body, expect_errors=True)
    assert f"rank 1 cannot take part: {own}" in str(other)
    raise own


def given_to_one_rank(make: Make) -> Callable[[bool | None], None]:
    """Check that a mistake of one rank is told to the others, and let its error through."""

    def check(defer: bool | None) -> None:
        def body(session: Any) -> None:
            model = nn.Linear(2, 2)
            model, optimizer = model, sgd(model.parameters(), lr=0.1)
            if session.rank == 1:
                model, optimizer = make(model, optimizer)
            session.prepare(model, optimizer, defer=defer)

        other, own = run_ranks(2, body, expect_errors=True)
        assert f"rank 1 cannot take part: {own}" in str(other)
        raise own

    return check


def momentum(
    make: Callable[[nn.Module], Optimizer],
    change: Callable[[Optimizer], Any] = lambda optimizer: None,
    codec: Any = "dgc:ratio=0.5",
    **options: Any,
) -> Callable[[bool | None], None]:
    """Train with a codec that keeps momentum."""

    def check(defer: bool | None) -> None:
        def body(session: Any) -> None:
            model = nn.Linear(64, 64)
            optimizer = make(model)
            session.prepare(model, optimizer, defer=defer)
            for _ in range(2):
                model(torch.ones(1, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                change(optimizer)

        core: Any = load_core()
        first, second = run_ranks(
            2, body, core=core, codec=codec, expect_errors=True, summary=False, **options
        )
        for error in (first, second):
            if error is not None:
                raise error

    return check


class OtherSgd(torch.optim.SGD):
    """SGD that may step otherwise."""


def stepped_before(model: nn.Module) -> Optimizer:
    """Return an optimizer that has momentum from a step before it was prepared."""
    optimizer = sgd(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def biased(model: Any) -> list[dict[str, Any]]:
    """Return groups of which the bias's has momentum."""
    return [{"params": [model.weight]}, {"params": [model.bias], "momentum": 0.9}]


def cycled(optimizer: Optimizer) -> None:
    """Have a scheduler give momentum, as it does by default."""
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)


MISTAKES: dict[str, tuple[Make, str]] = {
    "a set of optimizers": (
        lambda model, optimizer: (model, {optimizer}),
        "prepare() was given a set of 1 (SGD) as the optimizer: give one torch.optim.Optimizer, or",
    ),
    "two optimizers that have a parameter in common": (
        lambda model, optimizer: (model, [optimizer, sgd(model.parameters(), lr=0.1)]),
        "is in two of the optimizers (SGD and SGD): give each parameter to one",
    ),
    "no optimizer": (
        lambda model, optimizer: (model, None),
        "prepare() was given None as the optimizer: give one of torch.optim",
    ),
    "an optimizer's class": (
        lambda model, optimizer: (model, sgd),
        "prepare() was given the class SGD as the optimizer: give an instance",
    ),
    "a scheduler": (
        lambda model, optimizer: (model, torch.optim.lr_scheduler.StepLR(optimizer, 1)),
        "give the scheduler's optimizer (scheduler.optimizer)",
    ),
    "an optimizer that another package has wrapped": (
        lambda model, optimizer: (model, Wrapper(optimizer)),
        "give a torch.optim.Optimizer; where this is a wrapper of another package, the optimizer",
    ),
    "one whose wrapper is an `Optimizer`": (
        lambda model, optimizer: (model, Derived(optimizer)),
        "prepare the torch.optim optimizer inside, before anything wraps it",
    ),
    "the optimizer before the model": (
        lambda model, optimizer: (optimizer, model),
        "was given the optimizer (SGD) before the model (Linear): call prepare(model, optimizer)",
    ),
    "a list of models": (
        lambda model, optimizer: ([model, model], optimizer),
        "prepare() was given a list of 2 (Linear) as the model: give one nn.Module that holds",
    ),
    "a dictionary of models": (
        lambda model, optimizer: ({"a": model}, optimizer),
        "prepare() was given a dict of 1 (Linear) as the model: give one nn.Module that holds",
    ),
    "`model.parameters()`, a function": (
        lambda model, optimizer: (model.parameters(), optimizer),
        "of class generator as the model: give the nn.Module itself, not its parameters",
    ),
    "a model's class": (
        lambda model, optimizer: (nn.Linear, optimizer),
        "prepare() was given the class Linear as the model: give an instance",
    ),
    "a model without a trained parameter": (
        lambda model, optimizer: (Adds(), optimizer),
        "the model has no trained parameter (requires_grad=True), so that there is nothing to",
    ),
    "an optimizer of another model's parameters": (
        lambda model, optimizer: (model, sgd(nn.Linear(3, 3).parameters(), lr=0.1)),
        "group 0 of the optimizer holds a parameter of shape (3, 3) that the model does not have",
    ),
}
MOMENTUM: dict[str, tuple[Callable[[bool | None], None], str | None]] = {
    "`SGD` without momentum": (
        momentum(lambda model: sgd(model.parameters(), lr=0.1)),
        "group 0 of the optimizer (SGD), which has momentum=0, with codec 'dgc:",
    ),
    '`SGD` without momentum and `update="server"`': (
        momentum(lambda model: sgd(model.parameters(), lr=0.1), update="server"),
        None,
    ),
    "`SGD` with the codec's momentum, 0.9": (
        momentum(lambda model: sgd(model.parameters(), lr=0.1, momentum=0.9)),
        None,
    ),
    "`SGD` with another momentum": (
        momentum(lambda model: sgd(model.parameters(), lr=0.1, momentum=0.8)),
        "both need one value all the time: set momentum=0.9 in the group",
    ),
    "`SGD` with Nesterov's momentum": (
        momentum(lambda model: sgd(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)),
        "it cannot take over nesterov=True: leave that out, or the codec",
    ),
    "a subclass of `SGD` with momentum": (
        momentum(lambda model: OtherSgd(model.parameters(), lr=0.1, momentum=0.9)),
        "use torch.optim.SGD, whose momentum it takes over, or momentum=0 in the codec",
    ),
    "`SGD` that has stepped with momentum before": (
        momentum(stepped_before),
        "the optimizer has momentum already, from steps without it: begin with a new optimizer",
    ),
    '`SGD` with momentum and `update="server"`': (
        momentum(lambda model: sgd(model.parameters(), lr=0.1, momentum=0.9), update="server"),
        "group 0 of the optimizer (SGD), which has momentum=0.9, with codec 'dgc:",
    ),
    "`SGD` with momentum, for some tensors": (
        momentum(
            lambda model: sgd(model.parameters(), lr=0.1, momentum=0.9),
            codec={"weight": "dgc", "*": "raw"},
        ),
        None,
    ),
    "`SGD` with momentum, for none of its tensors": (
        momentum(
            lambda model: sgd(biased(model), lr=0.1, momentum=0.9),
            codec={"weight": "dgc", "*": "raw"},
        ),
        None,
    ),
    "`OneCycleLR`, which gives `SGD` momentum later": (
        momentum(lambda model: sgd(model.parameters(), lr=0.1, momentum=0.9), cycled),
        "group 0 of the optimizer (SGD), which has momentum=0.95, with codec 'dgc:",
    ),
    'the same with `update="server"`': (
        momentum(lambda model: sgd(model.parameters(), lr=0.1), cycled, update="server"),
        "group 0 of the optimizer (SGD), which has momentum=0.95, with codec 'dgc:",
    ),
    "`AdamW`": (
        momentum(lambda model: torch.optim.AdamW(model.parameters())),
        "group 0 of the optimizer (AdamW), which has betas=(0.9, 0.999), with codec 'dgc:",
    ),
    "`AdamW` with `dgc:momentum=0`": (
        momentum(
            lambda model: torch.optim.AdamW(model.parameters()), codec="dgc:momentum=0,ratio=0.5"
        ),
        None,
    ),
    "`RMSprop`, `Adagrad`": (
        momentum(lambda model: torch.optim.RMSprop(model.parameters())),
        "group 0 of the optimizer (RMSprop), which is not stepped by SGD, with codec 'dgc:",
    ),
}

CONSTRUCTS = [
    *(
        Construct("Arguments of `prepare`", name, given_to_one_rank(make), refused=words)
        for name, (make, words) in MISTAKES.items()
    ),
    Construct(
        "Arguments of `prepare`",
        "`plan=` with something else",
        plan_on_one_rank,
        refused="prepare() was given plan=42: give a Plan, the path of a plan file",
    ),
    *(
        Construct("Optimizers under the codec `dgc`", name, check, refused=words)
        for name, (check, words) in MOMENTUM.items()
    ),
]
