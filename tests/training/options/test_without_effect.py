"""Options that would have no effect are refused, and those that are accepted have theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradlane
from gradlane.training.options.options import Options
from tests.training.model.late_core import LateCore
from tests.training.model.ranks import run_ranks


@pytest.mark.parametrize("given", [{"every": 5}, {"keep": 7}, {"every": 5, "keep": 7}])
def test_checkpoints_without_a_folder_are_refused(given: dict[str, int], tmp_path: Path) -> None:
    words = ", ".join(f"{name}={value}" for name, value in given.items())
    asked = gradlane.Checkpoints(**given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"checkpoints has {words} and no folder"):
        Options.of(checkpoints=asked)
    variables = {f"GRADLANE_CHECKPOINT_{name.upper()}": str(value) for name, value in given.items()}
    with pytest.raises(ValueError, match=f"{words} and no folder"):
        Options.of(environment=variables)
    folder = {"GRADLANE_CHECKPOINT_FOLDER": str(tmp_path)}
    assert Options.of(checkpoints=asked, environment=folder).checkpoints.folder == tmp_path
    assert Options.of(environment={**variables, **folder}).checkpoints.folder == tmp_path


def test_steps_ahead_of_nobody_are_refused() -> None:
    with pytest.raises(ValueError, match='ahead_steps is 2 with stragglers="wait": nobody is'):
        gradlane.Stragglers(ahead_steps=2)
    assert gradlane.Stragglers("backup=1", ahead_steps=2).ahead_steps == 2


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"update": "server"},
        {"update": "server", "strategy": "asgd"},
        {"strategy": "deferred-pull"},
        {"codec": "qsgd:bits=8"},
        {"going_on": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("defer", [False, None])
def test_an_update_that_is_not_to_be_deferred_is_done_in_step(
    options: dict[str, Any], defer: bool | None
) -> None:
    """Memory that parameters share with what is none of the model's waits for nothing else."""

    def body(session: Any) -> list[float]:
        model = nn.Linear(2, 2, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        session.prepare(model, optimizer, defer=defer)
        shared = model.weight.detach()
        seen = []
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(shared[0, 0].item())
        return seen

    (seen,) = run_ranks(1, body, core=LateCore(), **options)
    assert seen == ([-1.0, -2.0, -3.0] if defer is False else [0.0, -1.0, -2.0])
