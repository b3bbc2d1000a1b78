"""How constructs that read parameters are compared with a plain model.

Each is trained for some steps twice: alone, and prepared on a core that delivers a result only when
it is waited for. A read that does not wait sees the values of the step before, and differs.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.training.model.constructs import Construct
from tests.training.model.late_core import LateCore
from tests.training.model.models import seeded
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import same_bits

STEPS = 4

Use = Callable[[Any, Tensor], Tensor]


class Small(nn.Module):
    """Two layers and a parameter of its own; inputs (N, 4), outputs (N, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, values: Tensor) -> Tensor:
        return self.last(self.first(values).tanh()) * self.scale  # type: ignore[no-any-return]


def call(model: Any, values: Tensor) -> Tensor:
    """Call the model."""
    result: Tensor = model(values)
    return result


def values_of(step: int, shape: tuple[int, ...]) -> Tensor:
    """The inputs of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(shape, generator=generator)


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    forward: Use,
    use: Use,
    shape: tuple[int, ...],
) -> list[Tensor]:
    """Train some steps; return what the construct saw after each, and the parameters."""
    seen = []
    for step in range(STEPS):
        values = values_of(step, shape)
        forward(model, values).square().mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        seen.append(use(model, values).detach().clone())
    return seen + [parameter.detach().clone() for parameter in model.parameters()]


def compare(
    defer: bool | None,
    *,
    build: Callable[[], nn.Module],
    forward: Use = call,
    use: Use = call,
    arrange: Callable[[Any, Tensor], tuple[Use, Use]] | None = None,
    shape: tuple[int, ...] = (3, 4),
) -> None:
    """Assert that a construct sees the same bits in a prepared model as in a plain one.

    Args:
        defer: as in `prepare`.
        build: makes the model, the same each time.
        forward: the training forward.
        use: the construct; its result is compared after each step.
        arrange: called once the model is prepared, instead of giving the two above.
        shape: of the inputs.
    """

    def run(session: Any) -> list[Tensor]:
        torch.manual_seed(5)
        model = seeded(build)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        if session is not None:
            session.prepare(model, optimizer, defer=defer)
        uses = arrange(model, values_of(0, shape)) if arrange else (forward, use)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return train(model, optimizer, *uses, shape)

    plain = run(None)
    (late,) = run_ranks(1, run, core=LateCore())
    assert same_bits(plain, late), [
        torch.equal(one, other) for one, other in zip(plain, late, strict=True)
    ]
    seen = plain[1:STEPS]
    assert not all(torch.equal(plain[0], one) for one in seen), "it sees nothing of the training"


def reads(
    name: str,
    use: Use = call,
    *,
    build: Callable[[], nn.Module] = Small,
    section: str = "Modules that use parameters without calling their owner",
    note: str = "",
    refused: str | None = None,
    defers: tuple[bool | None, ...] = (None, False),
    newer_than: str = "",
    **settings: Any,
) -> Construct:
    """Describe a construct by what it does with a model; see `compare`."""
    check = functools.partial(compare, build=build, use=use, **settings)
    return Construct(
        section,
        name,
        check,
        refused=refused,
        note=note,
        defers=defers,
        newer_than=newer_than,
    )
