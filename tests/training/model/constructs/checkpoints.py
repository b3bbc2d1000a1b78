"""Constructs that save and load a training in the middle of it."""

from __future__ import annotations

import decimal
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from tests.torch_versions import NO_DIST
from tests.training.model.constructs import Construct
from tests.training.model.constructs.comparison import Small, values_of
from tests.training.model.late_core import LateCore
from tests.training.model.models import seeded
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import same_bits, snapshot

dcp: Any = torch.distributed.checkpoint
Save = Callable[[Any, torch.optim.Optimizer, str], Any]
Load = Callable[[Any, torch.optim.Optimizer, str, Any], None]


def steps(model: Any, optimizer: torch.optim.Optimizer, count: int) -> None:
    """Train some steps."""
    for step in range(count):
        model(values_of(step, (3, 4))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def resumed(save: Save, load: Load) -> Callable[[bool | None], None]:
    """Check that a training that is saved, goes astray and is loaded continues as it would have."""

    def check(defer: bool | None) -> None:
        def body(session: Any) -> list[list[Tensor]]:
            model = seeded(Small)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            session.prepare(model, optimizer, defer=defer)
            results = []
            with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                steps(model, optimizer, 2)
                saved = save(model, optimizer, folder)
                for _ in range(2):
                    steps(model, optimizer, 3)
                    results.append(snapshot(model))
                    load(model, optimizer, folder, saved)
            return results

        (results,) = run_ranks(1, body, core=LateCore())
        assert same_bits(results[0], results[1])

    return check


def save_states(model: Any, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Save with torch.distributed.checkpoint."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder, **NO_DIST)


def load_states(model: Any, optimizer: torch.optim.Optimizer, folder: str, _: Any) -> None:
    """Load in place, as torch.distributed.checkpoint does, and hand the result over."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder, **NO_DIST)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def save_named(model: Any, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Save with the names that torch.distributed.checkpoint gives."""
    states, optimizer_states = get_state_dict(model, optimizer)
    dcp.save({"model": states, "optimizer": optimizer_states}, checkpoint_id=folder, **NO_DIST)


def load_named(model: Any, optimizer: torch.optim.Optimizer, folder: str, _: Any) -> None:
    """Load with those names."""
    states, optimizer_states = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": states, "optimizer": optimizer_states}
    dcp.load(state, checkpoint_id=folder, **NO_DIST)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


def save_file(model: Any, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Save with torch.save."""
    torch.save({"m": model.state_dict(), "o": optimizer.state_dict()}, f"{folder}/file")


def load_file(model: Any, optimizer: torch.optim.Optimizer, folder: str, _: Any) -> None:
    """Load with torch.load."""
    state = torch.load(f"{folder}/file", weights_only=True)
    model.load_state_dict(state["m"])
    optimizer.load_state_dict(state["o"])


def too_early(defer: bool | None) -> None:
    """Ask for the optimizer's state by name while it has none: torch steps it with zeros then."""
    plain: Any = seeded(Small)
    _, wanted = get_state_dict(plain, torch.optim.AdamW(plain.parameters(), lr=0.1))

    def body(session: Any) -> None:
        model: Any = seeded(Small)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        session.prepare(model, optimizer, defer=defer)
        assert len(get_model_state_dict(model)) == 5
        _, found = get_state_dict(model, optimizer)
        assert str(found) == str(wanted)
        assert same_bits(snapshot(model), snapshot(plain))

    run_ranks(1, body, core=LateCore())


def restarted(setting: Any, restores: bool = True) -> Callable[[bool | None], None]:
    """Check that a training under `checkpoints=` goes on with its bits after a restart."""

    def check(defer: bool | None) -> None:
        def body(session: Any, count: int, restores: bool) -> list[Tensor]:
            model = seeded(Small)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            optimizer.param_groups[0].update(setting)
            session.prepare(model, optimizer, defer=defer)
            steps(model, optimizer, count - (session.restore() if restores else 0))
            return snapshot(model)

        def run(folder: str, count: int, restores: bool = True) -> list[Tensor]:
            (result,) = run_ranks(
                1,
                lambda session: body(session, count, restores),
                core=LateCore(),
                checkpoint_folder=folder,
                checkpoint_every=2,
                summary=False,
            )
            assert isinstance(result, list)
            return result

        with tempfile.TemporaryDirectory() as folder:
            first = run(folder, 2)
            assert same_bits(first, run(folder, 2, restores))

    return check


SECTION = "Checkpoints"

CONSTRUCTS = [
    Construct(
        SECTION,
        "`torch.save` and `torch.load` of the states of model and optimizer",
        resumed(save_file, load_file),
    ),
    Construct(
        SECTION,
        "`torch.distributed.checkpoint.save` and `load`",
        resumed(save_states, load_states),
        note="on rank 0 with `no_dist=True`, or on all ranks with torch.distributed initialized",
    ),
    Construct(
        SECTION,
        "`get_state_dict`, `set_state_dict` of `torch.distributed.checkpoint`",
        resumed(save_named, load_named),
    ),
    Construct(
        SECTION,
        "the same before the first step, where they step the optimizer to make its state",
        too_early,
        note="a step of its own, which all ranks take",
    ),
    Construct(
        SECTION,
        "`checkpoints=`, and NumPy's scalars in the optimizer's settings (`lr=numpy.float64(0.1)`)",
        restarted({"lr": np.float64(0.1), "note": np.int64(3)}),
        note="Python's own after `session.restore()`",
    ),
    Construct(
        SECTION,
        "`checkpoints=`, and a value that no file gives back: `Decimal`, an enum, a function",
        restarted({"note": decimal.Decimal("0.1")}),
        refused="optimizer['param_groups'][0]['note'] is a decimal.Decimal",
        note="[which values](checkpoints.md#values)",
    ),
    Construct(
        SECTION,
        "`checkpoints=` with a folder that has checkpoints, without `session.restore()`",
        restarted({}, restores=False),
        refused="checkpoints of another run",
    ),
]
