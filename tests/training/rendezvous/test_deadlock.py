"""Ranks that wait for each other are told so; ranks that only wait long are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gradlane
from gradlane.training.rendezvous.deadlock import find_cycle
from tests.training.model.ranks import run_ranks

Word = dict[str, Any]


def report(
    waits: str, needed: list[int] | None, number: int = 1, **held: tuple[int, list[int]]
) -> Word:
    models = {name: list(one) for name, one in held.items()}
    return {"number": number, "count": 0, "waits": [waits, 1, needed], "models": models}


def samples(*reports: Word) -> list[dict[int, Word]]:
    return [
        {rank: {**one, "count": turn + 1} for rank, one in enumerate(reports)} for turn in range(3)
    ]


FIRST = report("a", None, a=(1, []), b=(1, [2]))
SECOND = report("b", None, a=(1, [0, 1]), b=(1, []))


def test_a_cycle_is_found_by_each_of_its_ranks() -> None:
    for own in range(2):
        cycle = find_cycle(samples(FIRST, SECOND), own)
        assert cycle is not None
        assert set(cycle) == {0, 1}


def test_a_cycle_over_three_ranks_excludes_the_fourth() -> None:
    reports = [
        report("a", None, a=(1, []), b=(1, [0]), c=(1, [])),
        report("b", None, a=(1, []), b=(1, []), c=(1, [0])),
        report("c", None, a=(1, [0]), b=(1, []), c=(1, [])),
        report("a", None, a=(1, []), b=(1, []), c=(1, [])),
    ]
    assert set(find_cycle(samples(*reports), 1) or {}) == {0, 1, 2}
    assert find_cycle(samples(*reports), 3) is None


def test_a_rank_that_has_submitted_the_needed_tensors_blocks_no_other() -> None:
    """The network may be slow: this must never be taken for a circle."""
    assert find_cycle(samples(report("a", [5], a=(1, []), b=(1, [2])), SECOND), 0) is None


def test_a_rank_that_has_not_begun_the_step_is_waited_for() -> None:
    late = report("b", None, a=(0, []), b=(1, []))
    assert find_cycle(samples(FIRST, late), 0) is not None


@pytest.mark.parametrize("turn", [0, 1])
def test_waits_of_different_moments_make_no_cycle(turn: int) -> None:
    moved = samples(FIRST, SECOND)
    moved[turn][1] = {**moved[turn][1], "number": 2}
    assert find_cycle(moved, 0) is None


def test_a_report_that_is_not_repeated_makes_no_cycle() -> None:
    old = samples(FIRST, SECOND)
    old[2][1] = old[1][1]
    assert find_cycle(old, 0) is None


def test_both_ranks_raise_the_deadlock() -> None:
    def body(session: Any) -> None:
        models = [nn.Linear(3, 3), nn.Linear(3, 3)]
        for model in models:
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        models[1](models[0](torch.ones(2, 3))).sum().backward()
        torch.nn.utils.clip_grad_norm_(models[session.rank].parameters(), 1.0)

    errors = run_ranks(2, body, expect_errors=True)
    assert all(isinstance(error, gradlane.SessionFailedError) for error in errors)
    for error in errors:
        assert "rank 0 waits for the gradients of model 1" in str(error)
        assert "rank 1 waits for the gradients of model 2" in str(error)
