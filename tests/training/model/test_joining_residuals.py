"""Ranks join where codecs keep residuals: what was held back is in later means, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.built import needs_core
from tests.forked_programs import ForkedPrograms
from tests.training.model.going_rank import Model
from tests.training.model.test_going_on_residuals import CODECS, HeldBack
from tests.training.model.test_joining_processes import JOINING, Run

pytestmark = needs_core

RESIDUALS = "gradlane.training.model.residual_state:ResidualState"
STEPS_AFTER = 10


@pytest.mark.parametrize("codec", CODECS)
def test_ranks_join_and_all_have_the_bits_of_one_process(
    tmp_path: Path, programs: ForkedPrograms, codec: str
) -> None:
    run = Run(programs, tmp_path, joiners=2, world_size=2, codec={"*.weight": codec})
    run.check_alike()
    names = [name for name, _ in Model().named_parameters()]
    codecs = {name: codec if name.endswith(".weight") else "raw" for name in names}
    run.check_reference(HeldBack(codecs, {name: [0] for name in names}, 2))
    assert [count for _, count, _ in run.results["0"]["rows"]][-1] == 4


@pytest.mark.parametrize(
    "place",
    [
        f"{JOINING}:Joins._answer",
        f"{RESIDUALS}.for_more_ranks",
        f"{RESIDUALS}._step",
        "gradlane.training.model.prepared:PreparedModel.close",
        f"{RESIDUALS}.take_over",
    ],
)
def test_a_member_is_killed_while_residuals_move(
    tmp_path: Path, programs: ForkedPrograms, place: str
) -> None:
    run = Run(programs, tmp_path, fatal={"1": place}, codec={"*.weight": "onebit"})
    run.check_alike()
    assert len(run.results["joiner-0"]["metrics"]["members"]) == 3


@pytest.mark.parametrize(
    ("differs", "difference"),
    [
        ({"refused": {"codec": "bf16"}}, "has codec="),
        ({"refused": {}, "other_optimizer": True}, "has optimizer='AdamW', rank 3 has 'SGD'"),
    ],
    ids=["codec", "optimizer"],
)
def test_a_rank_that_differs_is_turned_away(
    tmp_path: Path, programs: ForkedPrograms, differs: dict[str, Any], difference: str
) -> None:
    rows = tmp_path / "rows-0"
    steps_at_end = 0

    def have_trained_on() -> bool:
        # Asked once the rank that came later has ended.
        nonlocal steps_at_end
        steps = rows.read_text().count("\n")
        steps_at_end = steps_at_end or steps
        return steps >= steps_at_end + STEPS_AFTER

    run = Run(
        programs,
        tmp_path,
        codec={"*.weight": "topk:ratio=0.05"},
        kill_all_when=have_trained_on,
        **differs,
    )
    error = run.errors["joiner-0"]
    assert "RanksDifferError" in error and difference in error
    members = [run.rows_of(str(rank)) for rank in range(3)]
    for row in zip(*members, strict=False):
        assert row[0] == row[1] == row[2] and row[0][1] == 3
    assert len(members[0]) >= steps_at_end + STEPS_AFTER
