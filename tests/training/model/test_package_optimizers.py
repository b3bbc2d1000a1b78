"""Optimizers of other packages that are known to step per parameter."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gradlane.training.model.deferred_update import DeferredUpdate
from gradlane.training.model.optimizers import OF_PACKAGES, steps_per_parameter
from tests.training.model.models import seeded
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import run_reference, same_bits, snapshot
from tests.training.model.test_optimizers import STEPS, Several

LISTED = [(module, name) for module, names in OF_PACKAGES.items() for name in names]


def make_step(module: str) -> Any:
    """Return a `step` as that of a class in a module."""
    names: dict[str, Any] = {"__name__": module}
    exec("def step(self, closure=None):\n    pass\n", names)
    return names["step"]


def make_class(module: str, name: str) -> type[torch.optim.Optimizer]:
    return type(name, (torch.optim.Optimizer,), {"__module__": module, "step": make_step(module)})


@pytest.mark.parametrize(("module", "name"), LISTED)
def test_a_listed_class_is_known_and_nothing_like_it(module: str, name: str) -> None:
    parameters = [torch.nn.Parameter(torch.ones(2))]
    kind = make_class(module, name)
    assert steps_per_parameter(kind(parameters, {}))
    assert not steps_per_parameter(type(name, (kind,), {})(parameters, {}))
    elsewhere = make_class("mine", name)
    assert not steps_per_parameter(elsewhere(parameters, {}))
    replaced = kind(parameters, {})
    replaced.step = lambda closure=None: None  # type: ignore[assignment, method-assign]
    assert not steps_per_parameter(replaced)
    patched = make_class(module, name)
    patched.step = make_step("mine")  # type: ignore[method-assign]
    assert not steps_per_parameter(patched(parameters, {}))


@pytest.mark.parametrize(("module", "name"), LISTED)
def test_it_has_the_bits_of_one_process(module: str, name: str) -> None:
    kind = getattr(pytest.importorskip(module), name)
    given = {"lr": 0.01}
    if module == "transformers.optimization":
        given |= {"relative_step": False}
    applied = []

    def body(session: Any) -> list[Tensor]:
        model: Any = seeded(Several)
        optimizer = kind(model.parameters(), **given)
        session.prepare(model, optimizer)
        for step in range(STEPS):
            model.loss(step).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = [value for one in optimizer.state.values() for value in one.values()]
        return [*snapshot(model), *(one for one in state if isinstance(one, Tensor))]

    def counted(self: DeferredUpdate, arrived: Any) -> None:
        applied.append(len(arrived := list(arrived)))
        apply(self, arrived)

    apply = DeferredUpdate.apply
    (expected,) = run_reference(1, body)
    with patch.object(DeferredUpdate, "apply", counted):
        (found,) = run_ranks(1, body)
    assert same_bits(found, expected)
    # The first step is whole, to see that it writes nothing but parameters and their state.
    assert sum(applied) == 5 * (STEPS - 1)
