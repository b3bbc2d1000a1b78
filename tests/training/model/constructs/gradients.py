"""Constructs by which gradients come about, are changed and are used."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.training.model.constructs import Construct
from tests.training.model.constructs.comparison import Small, values_of
from tests.training.model.models import seeded
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import (
    ReferenceSession,
    average,
    run_reference,
    same_bits,
    snapshot,
)

STEPS = 4
Step = Callable[[Any, Any, Any, int], None]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss(model: Any, session: Any, step: int) -> Any:
    """The loss of a rank's own batch."""
    return model(values_of(10 * step + session.rank, (3, 4))).square().mean()


def equal(take_step: Step, build: type[nn.Module] = Small) -> Callable[[bool | None], None]:
    """Check that a loop of such steps gives what averaging at `optimizer.step()` gives."""

    def check(defer: bool | None) -> None:
        def body(session: Any) -> list[Tensor]:
            model = seeded(build)
            optimizer = make_optimizer(model)
            session.prepare(model, optimizer, defer=defer)
            for step in range(STEPS):
                take_step(session, model, optimizer, step)
            return snapshot(model)

        expected = run_reference(2, body)
        for rank, parameters in enumerate(run_ranks(2, body)):
            assert same_bits(parameters, expected[rank])

    return check


def alone(take_step: Step, build: type[nn.Module] = Small) -> Callable[[bool | None], None]:
    """Check what a loop of such steps is refused for, on one rank."""

    def check(defer: bool | None) -> None:
        def body(session: Any) -> None:
            model = seeded(build)
            optimizer = make_optimizer(model)
            session.prepare(model, optimizer, defer=defer)
            for step in range(STEPS):
                take_step(session, model, optimizer, step)

        run_ranks(1, body)

    return check


def finish(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def accumulates(session: Any, model: Any, optimizer: Any, step: int) -> None:
    with session.no_sync():
        loss(model, session, 2 * step).backward()
    loss(model, session, 2 * step + 1).backward()
    finish(optimizer)


def several_backwards(session: Any, model: Any, optimizer: Any, step: int) -> None:
    for part in range(3):
        loss(model, session, 3 * step + part).backward()
    finish(optimizer)


def one_backward_more(session: Any, model: Any, optimizer: Any, step: int) -> None:
    for part in range(1 + step):
        loss(model, session, part).backward()
    finish(optimizer)


def clips_the_norm(session: Any, model: Any, optimizer: Any, step: int) -> None:
    loss(model, session, step).backward()
    average(session, model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    finish(optimizer)


def clips_by_the_session(session: Any, model: Any, optimizer: Any, step: int) -> None:
    loss(model, session, step).backward()
    session.clip_grad_norm_(0.01, model=model)
    finish(optimizer)


def weighs(session: Any, model: Any, optimizer: Any, step: int) -> None:
    session.weight(1 + (5 * session.rank + step) % 7)
    loss(model, session, step).backward()
    finish(optimizer)


def clips_values(session: Any, model: Any, optimizer: Any, step: int) -> None:
    loss(model, session, step).backward()
    average(session, model)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    finish(optimizer)


def penalizes(session: Any, model: Any, optimizer: Any, step: int) -> None:
    value = loss(model, session, step)
    gradients = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
    (value + sum(one.square().sum() for one in gradients)).backward()
    finish(optimizer)


def keeps_the_graph(session: Any, model: Any, optimizer: Any, step: int) -> None:
    loss(model, session, step).backward(create_graph=True)
    finish(optimizer)


def scales(session: Any, model: Any, optimizer: Any, step: int) -> None:
    scaler = optimizer.__dict__.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=8.0))
    value = loss(model, session, step)
    if step == 1 and session.rank == 1:
        value = value * float("inf")
    scaler.scale(value).backward()
    average(session, model)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if isinstance(session, ReferenceSession):
        session.forget()


def casts(session: Any, model: Any, optimizer: Any, step: int) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(model, session, step)
    value.backward()
    finish(optimizer)


def skips(session: Any, model: Any, optimizer: Any, step: int) -> None:
    loss(model, session, step).backward()
    if step % 2:
        optimizer.zero_grad()
    else:
        finish(optimizer)


def closes(session: Any, model: Any, optimizer: Any, step: int) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        value = loss(model, session, step)
        value.backward()
        return value

    if isinstance(session, ReferenceSession):
        closure()
        optimizer.step()
    else:
        optimizer.step(closure)


def freezes(session: Any, model: Any, optimizer: Any, step: int) -> None:
    model.first.weight.requires_grad_(step < 2)
    loss(model, session, step).backward()
    finish(optimizer)


def adds_a_group(session: Any, model: Any, optimizer: Any, step: int) -> None:
    loss(model, session, step).backward()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    finish(optimizer)


def steps_without_a_gradient(session: Any, model: Any, optimizer: Any, step: int) -> None:
    finish(optimizer)


def checkpoints(reentrant: bool) -> Step:
    def take_step(session: Any, model: Any, optimizer: Any, step: int) -> None:
        values = values_of(10 * step + session.rank, (3, 4)).requires_grad_()
        output: Any = checkpoint(model, values, use_reentrant=reentrant, preserve_rng_state=False)
        output.square().mean().backward()
        finish(optimizer)

    return take_step


class Separate(nn.Module):
    """Has parameters of all kinds, one for rank 0 alone and one for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, sparse=True)
        self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.fine = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.ones(0))
        self.unused = nn.Parameter(torch.ones(3))
        self.sometimes = nn.Parameter(torch.ones(4))
        memory = torch.arange(8.0)
        self.left, self.right = nn.Parameter(memory[:6]), nn.Parameter(memory[2:])
        self.uses_sometimes = False


def uses(*names: str) -> Step:
    """A step whose loss is made of some parameters of `Separate`."""

    def take_step(session: Any, model: Any, optimizer: Any, step: int) -> None:
        total: Any = torch.zeros(())
        for name in names:
            if name == "table":
                term = model.table(torch.tensor([step % 5, session.rank])).square().sum()
            else:
                term = getattr(model, name).abs().square().sum().float()
            if name != "sometimes" or session.rank == 0:
                total = total + term * (1 + session.rank)
        total.backward()
        finish(optimizer)

    return take_step


class Counting(torch.optim.SGD):
    """Divides its rate by a count of its steps, which is in no state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.count = 0
        self.counted: list[int] = []
        self.total = torch.zeros(())

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        self.counted.append(self.count)
        self.total += 1
        self.param_groups[0]["lr"] = 0.1 / self.count
        super().step(closure)


def counts(defer: bool | None) -> None:
    """What an optimizer counts in attributes is alike on all ranks after uneven data."""

    def body(session: Any) -> tuple[list[Tensor], Any]:
        model = seeded(Small)
        optimizer = Counting(model.parameters())
        session.prepare(model, optimizer, defer=defer)
        with session.join():
            for step in range(2 + 2 * session.rank):
                loss(model, session, step).backward()
                finish(optimizer)
        loss(model, session, 5).backward()
        finish(optimizer)
        return snapshot(model), (optimizer.count, optimizer.counted, optimizer.total)

    with warnings.catch_warnings():
        # It is stepped whole, and says so.
        warnings.simplefilter("ignore")
        (first, counted), (second, other) = run_ranks(2, body)
    assert same_bits(first, second)
    assert counted == other == (5, [1, 2, 3, 4, 5], 5.0)


def uneven(defer: bool | None) -> None:
    """Ranks with unlike numbers of batches end with the same parameters, and all end."""

    def body(session: Any) -> list[Tensor]:
        model = seeded(Small)
        optimizer = make_optimizer(model)
        session.prepare(model, optimizer, defer=defer)
        with session.join():
            for step in range(2 + 2 * session.rank):
                loss(model, session, step).backward()
                finish(optimizer)
        return snapshot(model)

    def reference() -> list[Tensor]:
        """Rank 0 counts as zeros once it has no data."""
        model = seeded(Small)
        optimizer = make_optimizer(model)
        for step in range(4):
            total: list[Tensor] = []
            for rank in range(2):
                model.zero_grad()
                if rank == 1 or step < 2:
                    model(values_of(10 * step + rank, (3, 4))).square().mean().backward()
                now = [
                    torch.zeros_like(one) if one.grad is None else one.grad.clone()
                    for one in model.parameters()
                ]
                total = [a + b for a, b in zip(total, now, strict=True)] if total else now
            for parameter, gradient in zip(model.parameters(), total, strict=True):
                parameter.grad = gradient / 2
            optimizer.step()
        return snapshot(model)

    expected = reference()
    for parameters in run_ranks(2, body):
        assert same_bits(parameters, expected)


def differs(defer: bool | None) -> None:
    """One rank steps where another zeroes."""

    def body(session: Any) -> None:
        model = seeded(Small)
        optimizer = make_optimizer(model)
        session.prepare(model, optimizer, defer=defer)
        for step in range(STEPS):
            loss(model, session, step).backward()
            if step == 1 and session.rank == 1:
                optimizer.zero_grad()
            else:
                finish(optimizer)

    run_ranks(2, body)


_GRADIENTS = "Gradients"
_LOOPS = "Loops"
_TENSORS = "Kinds of parameters"

CONSTRUCTS = [
    Construct(_GRADIENTS, "accumulation with `session.no_sync()`", equal(accumulates)),
    Construct(
        _GRADIENTS,
        "several backwards in each step, without `no_sync()`; several losses",
        equal(several_backwards),
        note="the first step is sent at `step()`: gradlane learns how many there are",
    ),
    Construct(
        _GRADIENTS,
        "one backward more than in any step before",
        alone(one_backward_more),
        refused="session.no_sync()",
    ),
    Construct(
        _GRADIENTS,
        "`clip_grad_norm_(model.parameters(), ...)`",
        equal(clips_the_norm),
        note="waits for all means; `session.clip_grad_norm_` does not",
    ),
    Construct(
        _GRADIENTS,
        "`session.clip_grad_norm_(...)`",
        equal(clips_by_the_session),
        note="means are clipped as they arrive; the norm is rounded once",
    ),
    Construct(
        _GRADIENTS,
        "`session.weight(samples)` before `backward()`",
        equal(weighs),
        note="the mean over all ranks' samples, see [uneven-data.md](uneven-data.md)",
    ),
    Construct(_GRADIENTS, "`clip_grad_value_(model.parameters(), ...)`", equal(clips_values)),
    Construct(
        _GRADIENTS, "penalties with `torch.autograd.grad(create_graph=True)`", equal(penalizes)
    ),
    Construct(
        _GRADIENTS,
        "`loss.backward(create_graph=True)`",
        alone(keeps_the_graph),
        refused="use torch.autograd.grad",
    ),
    Construct(
        _GRADIENTS, "`GradScaler`, with an infinity on one rank", equal(scales), note="all skip"
    ),
    Construct(_GRADIENTS, "autocast", equal(casts)),
    Construct(_GRADIENTS, "reentrant checkpointing", equal(checkpoints(True))),
    Construct(_GRADIENTS, "checkpointing, not reentrant", equal(checkpoints(False))),
    Construct(_LOOPS, "`zero_grad()` instead of `step()`, on all ranks", equal(skips)),
    Construct(
        _LOOPS,
        "`zero_grad()` on one rank, `step()` on another",
        differs,
        refused="rank 0 called optimizer.step(); rank 1 forgot the gradients",
    ),
    Construct(_LOOPS, "`step(closure)`", equal(closes)),
    Construct(
        _LOOPS,
        "`step()` without any gradient",
        alone(steps_without_a_gradient),
        refused="optimizer.step() without any gradient",
    ),
    Construct(_LOOPS, "parameters frozen in mid-training", equal(freezes)),
    Construct(
        _LOOPS,
        "`add_param_group` with a parameter that the model did not have",
        alone(adds_a_group),
        refused="session.prepare(model, optimizer) again",
    ),
    Construct(
        _LOOPS,
        "uneven data in `session.join()`",
        uneven,
        note="a rank without data counts as zeros, see [uneven-data.md](uneven-data.md)",
    ),
    Construct(
        _LOOPS,
        "the same with an optimizer that counts in attributes of its own",
        counts,
        note="handed over, unless they hold parameters",
    ),
    Construct(_TENSORS, "used by one rank only", equal(uses("scale", "sometimes"), Separate)),
    Construct(_TENSORS, "used by no rank", equal(uses("scale"), Separate)),
    Construct(
        _TENSORS,
        "embeddings with sparse gradients",
        equal(uses("table"), Separate),
        note="sent as rows where that goes, see [sparse gradients](sparse.md)",
    ),
    Construct(_TENSORS, "complex", equal(uses("turn"), Separate)),
    Construct(_TENSORS, "float64", equal(uses("fine"), Separate)),
    Construct(
        _TENSORS,
        "scalars; parameters of no elements",
        equal(uses("scale", "nothing"), Separate),
    ),
    Construct(_TENSORS, "parameters that share memory", equal(uses("left", "right"), Separate)),
]
