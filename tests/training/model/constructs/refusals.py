"""Constructs that are refused: what would be silently wrong, or cannot be done."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.training.model.constructs import Construct
from tests.training.model.constructs.comparison import Small, values_of
from tests.training.model.late_core import LateCore
from tests.training.model.ranks import run_ranks


def prepare_only(build: Callable[[], nn.Module]) -> Callable[[bool | None], None]:
    """Check that preparing a model is refused."""

    def check(defer: bool | None) -> None:
        def body(session: Any) -> None:
            model = build()
            optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
            session.prepare(model, optimizer, defer=defer)

        run_ranks(1, body, core=LateCore())

    return check


def changed(change: Callable[[Any], Any]) -> Callable[[bool | None], None]:
    """Check that changing a prepared model between steps is refused, at the latest at `step()`."""

    def check(defer: bool | None) -> None:
        def body(session: Any) -> None:
            model = Small()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            session.prepare(model, optimizer, defer=defer)
            for step in range(2):
                values = values_of(step, (3, 4)).to(model.last.weight.dtype)
                model(values).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        change(model)

        run_ranks(1, body, core=LateCore())

    return check


def swapped_under_the_server(defer: bool | None) -> None:
    """Swap a parameter's memory while a server's update is on its way into it."""

    def body(session: Any) -> None:
        model: Any = Small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        model(values_of(0, (3, 4))).square().mean().backward()
        model.first.weight.data = torch.zeros(4, 4)
        optimizer.step()

    run_ranks(1, body, update="server")


class Wraps(nn.Module):
    """A model with something inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class Quantized(nn.Module):
    """A model with a quantized constant."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            constant = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
        self.register_buffer("constant", constant)


def nested() -> nn.Module:
    """A model with a nested constant."""
    model = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        constant = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    model.register_buffer("constant", constant)
    return model


def wrapped_by_ddp() -> nn.Module:
    """A module of the class that torch's DDP is, without a process group."""
    inner = nn.Linear(2, 2)
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = inner
    return wrapped


def replace_weight(model: Any) -> None:
    """Put another parameter in a parameter's place."""
    model.first.weight = nn.Parameter(torch.ones(4, 4))


def prepare_part(session_model: Any) -> None:
    """Prepare a part of a prepared model in a session of its own."""

    def body(session: Any) -> None:
        part = session_model.first
        session.prepare(part, torch.optim.SGD(part.parameters(), lr=0.1))

    run_ranks(1, body, core=LateCore())


def share_with(model: Any) -> None:
    """Build a list over the parameters of two prepared models."""

    def body(session: Any) -> None:
        other = nn.Linear(2, 2)
        session.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
        nn.ParameterList([model.scale, other.weight])

    run_ranks(1, body, core=LateCore())


MODELS = "Models that cannot be prepared"
CHANGES = "Changing a prepared model"
PREPARE = {
    "a model wrapped in `DistributedDataParallel`, or with one inside": (
        lambda: Wraps(wrapped_by_ddp()),
        "module 'inner' of the model is wrapped in DistributedDataParallel",
    ),
    "`nn.DataParallel`": (
        lambda: nn.DataParallel(nn.Linear(2, 2)),
        "the model is wrapped in DataParallel, which computes on copies",
    ),
    "lazy modules that have no shape yet": (
        lambda: nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d()),
        "has no shape yet: run one forward through the lazy modules before prepare()",
    ),
    "parameters on the meta device": (
        lambda: nn.Linear(2, 2, device="meta"),
        "is on device meta",
    ),
    "quantized tensors": (Quantized, "tensor 'constant' is quantized"),
    "nested tensors": (nested, "tensor 'constant' is nested; only dense ones can be sent"),
}
CHANGED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "`load_state_dict(assign=True)`": (
        lambda model: model.load_state_dict(model.state_dict(), assign=True),
        "load_state_dict(assign=True) would replace the parameters",
    ),
    "`model.half()`, `.double()`, `.to(dtype)`": (
        lambda model: model.double(),
        "convert or change the model before prepare()",
    ),
    "a parameter replaced by another": (
        replace_weight,
        "the model was changed after prepare(): replaced 'first.weight'",
    ),
    "a layer added": (
        lambda model: model.add_module("more", nn.Linear(4, 4)),
        "the model was changed after prepare(): added 'more.weight'",
    ),
    "`weight_norm`, `spectral_norm`, parametrizations added": (
        lambda model: nn.utils.parametrizations.weight_norm(model.first),
        "the model was changed after prepare(): added",
    ),
    "preparing a part of a prepared model again": (
        prepare_part,
        "has parameters of a model that is already prepared",
    ),
    "`DistributedDataParallel`, `DataParallel` around a prepared model": (
        nn.DataParallel,
        "DataParallel was given a model that gradlane has prepared",
    ),
    "one module for parameters of two prepared models": (
        share_with,
        "belongs to another prepared model",
    ),
}

CONSTRUCTS = [
    *(
        Construct(MODELS, name, prepare_only(build), refused=words)
        for name, (build, words) in PREPARE.items()
    ),
    *(
        Construct(CHANGES, name, changed(change), refused=words)
        for name, (change, words) in CHANGED.items()
    ),
    Construct(
        CHANGES,
        '`module.weight.data = ...` between `backward()` and `step()` with `update="server"`',
        swapped_under_the_server,
        refused="its update has already begun",
        note='right with `update="worker"`',
        defers=(None,),
    ),
]
