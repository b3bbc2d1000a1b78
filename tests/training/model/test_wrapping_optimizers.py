"""Optimizers that step another one, as look-aheads do, whichever of both is prepared.

torch wraps `step` of their class when it first sees an instance, often after `prepare`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlane
from tests.loop_fuzzing.look_ahead import look_ahead
from tests.training.model.loops import loss_of
from tests.training.model.models import Attention, seeded
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import ReferenceSession, run_reference, same_bits, snapshot

pytestmark = [
    pytest.mark.filterwarnings("ignore:Lookahead is not known to treat each parameter"),
    pytest.mark.filterwarnings("ignore:step.. of Lookahead writes"),
    pytest.mark.filterwarnings("ignore:Seems like `optimizer.step"),  # In the reference.
]


def train(session: Any, how: str, prepared: str, after: Callable[[Any], Any]) -> list[Tensor]:
    model = seeded(Attention)
    base = torch.optim.AdamW(model.parameters(), lr=0.05)
    outer = look_ahead(base, how)
    # The reference's step is one that schedulers cannot wrap.
    seen = after(outer) if isinstance(session, ReferenceSession) else None
    session.prepare(model, outer if prepared == "outer" else base)
    seen = after(outer) if seen is None else seen
    for step in range(1, 6):
        loss_of(model, session.rank, step).backward()
        outer.step()
        outer.zero_grad()
        if hasattr(seen, "step"):
            seen.step()
    return [*snapshot(model), torch.tensor(len(seen) if isinstance(seen, list) else 0)]


def hooked(outer: Any) -> list[Any]:
    seen: list[Any] = []
    outer.register_step_post_hook(lambda *_: seen.append(1))
    return seen


AFTER: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda outer: None,
    "scheduler": lambda outer: torch.optim.lr_scheduler.ExponentialLR(outer, 0.5),
    "scheduler of the base": lambda outer: torch.optim.lr_scheduler.ExponentialLR(outer.base, 0.5),
    "state": lambda outer: outer.load_state_dict(outer.state_dict()),
    "hook": hooked,
}


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize(
    ("how", "prepared"),
    [("timm", "outer"), ("torch", "outer"), ("timm", "base"), ("torch", "base"), ("bare", "base")],
)
def test_a_look_ahead_trains_as_without(how: str, prepared: str, after: str) -> None:
    if how == "bare" and after in ("state", "hook", "scheduler"):
        pytest.skip("torch cannot do that with such a class")
    if how == "timm" and after == "hook":
        pytest.skip("without gradlane, torch does not call the hook in the first step")

    def body(session: Any) -> list[Tensor]:
        return train(session, how, prepared, AFTER[after])

    for found, expected in zip(run_ranks(2, body), run_reference(2, body), strict=True):
        assert same_bits(found, expected)


def test_hooks_are_called_from_the_first_step_on() -> None:
    def body(session: Any) -> int:
        (*_, calls) = train(session, "timm", "outer", hooked)
        return int(calls)

    assert run_ranks(2, body) == [5, 5]


def test_a_class_of_another_optimizer_of_torch_is_refused() -> None:
    """torch would call its `step`, which is none that it has wrapped."""

    def body(session: Any) -> None:
        model = nn.Linear(1, 1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        session.prepare(model, optimizer)
        model(torch.ones(1, 1)).sum().backward()
        optimizer.__class__ = torch.optim.Adagrad
        with pytest.raises(gradlane.UsageError, match=r"Adagrad\.step is another function"):
            optimizer.step()

    run_ranks(1, body)
