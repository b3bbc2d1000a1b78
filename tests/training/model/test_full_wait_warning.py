"""The hint names the program's own line, and advises only what would help."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch
from torch import nn

from tests.training.model.ranks import run_ranks
from tests.training.model.test_training import batch

LIBRARY = """
def clip_by_norm(parameters):
    return torch.nn.utils.clip_grad_norm_(parameters, 1.0)

def clip_by_value(parameters):
    return torch.nn.utils.clip_grad_value_(parameters, 1.0)

def look(parameters):
    return [one.grad for one in parameters]
"""
PATH = "/usr/lib/python3/site-packages/trainers/trainer.py"


def library() -> dict[str, Any]:
    """Functions of an installed package that look at gradients for a program."""
    names: dict[str, Any] = {"torch": torch}
    exec(compile(textwrap.dedent(LIBRARY), PATH, "exec"), names)
    return names


def hint_of(look: Any, caplog: pytest.LogCaptureFixture, *, clips: bool = False) -> str:
    def body(session: Any) -> None:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        for step in range(5):
            model(batch((3, 4), session.rank, step)).sum().backward()
            if clips:
                session.clip_grad_norm_(1.0)
            look(list(model.parameters()))
            optimizer.step()
            optimizer.zero_grad()

    with caplog.at_level("INFO", logger="gradlane"):
        run_ranks(1, body)
    (hint,) = (one for one in caplog.messages if one.startswith("each step waits"))
    return hint


def test_a_library_is_named_after_the_line_that_called_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hint = hint_of(library()["clip_by_norm"], caplog)
    assert "any: test_full_wait_warning.py:" in hint
    assert ", in trainer.py:3, looks at .grad" in hint
    assert "session.clip_grad_norm_()" in hint


def test_a_line_of_the_program_is_named_alone(caplog: pytest.LogCaptureFixture) -> None:
    hint = hint_of(lambda parameters: [one.grad for one in parameters], caplog)
    assert "test_full_wait_warning.py:" in hint and ", in " not in hint


@pytest.mark.parametrize(
    "look", [library()["clip_by_value"], lambda ones: nn.utils.clip_grad_value_(ones, 1.0)]
)
def test_clipping_by_value_gets_no_advice_for_norms(
    look: Any, caplog: pytest.LogCaptureFixture
) -> None:
    hint = hint_of(look, caplog)
    assert "clips by value, which needs all of them (said once)" in hint


def test_who_clips_by_the_session_is_not_told_to(caplog: pytest.LogCaptureFixture) -> None:
    hint = hint_of(library()["look"], caplog, clips=True)
    assert hint.endswith("looks at .grad between backward() and optimizer.step() (said once)")
