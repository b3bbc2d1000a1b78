"""Notes of `gradlane profile` on the number of steps, and the answer of `gradlane plan`."""

from __future__ import annotations

import pytest

from gradlane.cli.plan import answer_of
from gradlane.cli.profile import notes_on_steps
from gradlane.formats.profile import BatchTime


def test_one_number_of_steps_is_said_with_its_reason() -> None:
    even = BatchTime(20, 0.4, 0.39, 0.41)
    assert notes_on_steps(even, 20, 20) == []
    (note,) = notes_on_steps(even, 25, 30)
    assert note == (
        "times are of 20 steps in place of 30: the script ended after 25, 5 evaluated as well, or "
        "had no gradient"
    )
    (note,) = notes_on_steps(even, 30, 30)
    assert note.endswith("in place of 30: 10 evaluated as well, or had no gradient")


@pytest.mark.parametrize(("ddp_s", "stays"), [(0.3, True), (0.33, True), (0.4, False)])
def test_a_plan_that_ddp_equals_begins_with_ddp(ddp_s: float, stays: bool) -> None:
    text = answer_of({"ddp_step_s": ddp_s, "step_s": 0.33}, "The plan gives 330 ms.")
    assert text.startswith("For speed alone stay with DDP: it would take") == stays
    assert ("stay with DDP" in text) == stays
    assert "The plan gives 330 ms." in text
    assert answer_of({}, "One worker.") == "One worker."
