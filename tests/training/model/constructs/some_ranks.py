"""Constructs in which ranks do not all do the same between `backward()` and `optimizer.step()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.training.model.constructs import Construct
from tests.training.model.constructs.comparison import Small, values_of
from tests.training.model.constructs.gradients import equal, finish, loss
from tests.training.model.models import seeded
from tests.training.model.ranks import run_ranks

Body = Callable[[Any, bool | None], Any]


def on_two(body: Body) -> Callable[[bool | None], None]:
    """Run something on two ranks; an error of either comes through."""

    def check(defer: bool | None) -> None:
        run_ranks(2, lambda session: body(session, defer))

    return check


def saves_on_rank_0(session: Any, model: Any, optimizer: Any, step: int) -> None:
    loss(model, session, step).backward()
    if session.rank == 0:
        before = {name: one.clone() for name, one in model.state_dict().items()}
        assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())
    finish(optimizer)


def lists_other_models(session: Any, defer: bool | None) -> None:
    """Each rank asks for the averages of another model, and holds back those of the other."""
    models = [seeded(Small), seeded(Small)]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer, defer=defer)
    first, second = models
    second(first(values_of(session.rank, (3, 4)))).sum().backward()
    assert all(one.grad is not None for one in models[session.rank].parameters())


class Shared(nn.Module):
    """Calls one layer through reentrant checkpoints, as often as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layer = nn.Linear(4, 4)
        self.times = 1

    def forward(self, values: Tensor) -> Tensor:
        hidden: Any = self.first(values)
        for _ in range(self.times):
            hidden = checkpoint(self.layer, hidden, use_reentrant=True, preserve_rng_state=False)
        return hidden  # type: ignore[no-any-return]


def checkpointed_more_often(session: Any, defer: bool | None) -> None:
    model: Any = seeded(Shared)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer, defer=defer)
    for step in range(2):
        model.times = step + 1
        model(values_of(step, (3, 4))).square().mean().backward()
        finish(optimizer)


def laid_out_apart(session: Any, defer: bool | None) -> None:
    model: Any = seeded(lambda: nn.Conv2d(4, 4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer, defer=defer)
    if session.rank == 0:
        model.to(memory_format=torch.channels_last)
    model(values_of(0, (1, 4, 5, 5))).square().mean().backward()
    finish(optimizer)
    # Here at the latest: nothing of the step is ever seen.
    model.state_dict()
    raise AssertionError("parameters were read after a step with two memory formats")


_SECTION = "What only some ranks do, and what comes at times"
CONSTRUCTS = [
    Construct(
        _SECTION,
        "`state_dict()`, `copy.deepcopy` or `pickle` between `backward()` and `step()` on some "
        "ranks only",
        equal(saves_on_rank_0),
        note="they wait for nothing there; buffers are this rank's own",
    ),
    Construct(
        _SECTION,
        "gradients read between `backward()` and `step()`, of one model on some ranks and of "
        "another model on others",
        on_two(lists_other_models),
        refused="the ranks wait for each other",
        note="on all ranks, within seconds; of one model, or on all ranks alike, it is right",
    ),
    Construct(
        _SECTION,
        "a layer called by `checkpoint(use_reentrant=True)` more often than in any step before",
        on_two(checkpointed_more_often),
        refused="got another gradient in step 2 after its gradient had been sent",
        note="each recomputation is a backward of its own; right with `use_reentrant=False`",
    ),
    Construct(
        _SECTION,
        "`model.to(memory_format=...)` on some ranks only",
        on_two(laid_out_apart),
        refused="the memory formats of parameters differ between rank 0 and rank 1 in step 1",
        note="before its first update: norms and some optimizers add up in the order of the "
        "memory; right on all ranks",
    ),
]
