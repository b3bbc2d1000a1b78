"""A rank that comes with another codec ends by name; the members and what they hold back do not."""

from __future__ import annotations

from pathlib import Path

from tests.built import needs_core
from tests.forked_programs import ForkedPrograms
from tests.training.model.test_joining_processes import Run

pytestmark = needs_core

STEPS_AFTER = 10


def test_a_rank_without_the_codec_is_turned_away(tmp_path: Path, programs: ForkedPrograms) -> None:
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
        refused={"codec": "bf16"},
        kill_all_when=have_trained_on,
    )
    assert "RanksDifferError" in run.errors["joiner-0"] and "codec" in run.errors["joiner-0"]
    members = [run.rows_of(str(rank)) for rank in range(3)]
    for row in zip(*members, strict=False):
        assert row[0] == row[1] == row[2] and row[0][1] == 3
    assert len(members[0]) >= steps_at_end + STEPS_AFTER
