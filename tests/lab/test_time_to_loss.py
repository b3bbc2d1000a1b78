"""The page of times to a loss has what was measured, and finds times between its points."""

from __future__ import annotations

import json
from typing import Any

import pytest
from benchmarks import compared_with, time_to_loss
from benchmarks.time_to_loss import Point
from benchmarks.time_to_loss_chart import draw_curves

from tests.paths import ROOT

CONTENT: dict[str, Any] = json.loads(
    (ROOT / "docs/research/time-to-loss.json").read_text(encoding="utf-8")
)


def content(losses: dict[str, list[float]]) -> dict[str, Any]:
    """Return measured content with turns of 10 s and 32 steps."""
    rows = [
        {
            "way": name,
            "bytes": 1e6,
            "cpu_s": 0.05,
            "points": [
                {"steps": 32 * turn, "seconds": 10.0 * turn, "loss": loss, "load": 1.0}
                for turn, loss in enumerate(losses.get(name, [4.0, 3.0, 2.0]))
            ],
        }
        for name in time_to_loss.COURSES
    ]
    return CONTENT | {"rows": rows}


@pytest.mark.parametrize("path", time_to_loss.rendered(CONTENT, ROOT), ids=lambda path: path.name)
def test_pages_and_picture_are_of_the_measured_rows(path: Any) -> None:
    assert path.read_text(encoding="utf-8") == time_to_loss.rendered(CONTENT, ROOT)[path], (
        "run: python -m benchmarks.time_to_loss --render"
    )


def test_every_way_was_measured() -> None:
    assert [row["way"] for row in CONTENT["rows"]] == list(time_to_loss.COURSES)
    assert all(row["points"][-1]["steps"] > 0 for row in CONTENT["rows"])


def test_a_time_is_on_the_line_between_two_points() -> None:
    points = [Point(0, 0.0, 4.0, 1.0), Point(32, 10.0, 3.0, 1.0), Point(64, 20.0, 2.5, 1.0)]
    assert time_to_loss.seconds_to(points, 3.5) == pytest.approx(5.0)
    assert time_to_loss.seconds_to(points, 3.0) == pytest.approx(10.0)
    assert time_to_loss.seconds_to(points, 2.6) == pytest.approx(18.0)
    assert time_to_loss.seconds_to(points, 2.4) is None


def test_the_given_loss_is_the_lowest_tenth_of_exact_training() -> None:
    assert time_to_loss.given_loss(content({time_to_loss.EXACT: [4.0, 3.0, 2.31]})) == 2.4
    assert time_to_loss.given_loss(content({time_to_loss.EXACT: [4.0, 2.4, 2.5]})) == 2.4


def test_what_loses_is_said() -> None:
    found = content({"DDP": [4.0, 3.5, 2.5], time_to_loss.DILOCO: [4.0, 1.9, 1.8]})
    table, sentence = time_to_loss.table(found), time_to_loss.sentence(found)
    assert f"To a loss of 2.0, the fastest first: {time_to_loss.DILOCO}, 10 s; " in table
    assert "gradlane, exact, 20 s (2.10 times)" in table
    assert "; not reached: DDP." in table
    assert "DDP +25.0 %" in table
    assert "DDP not within 20 s" in sentence and "in 20 s with exact sums" in sentence


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="measured: end"):
        compared_with.between("text <!-- measured: begin -->", time_to_loss.MARKS, "table")


def test_each_way_is_drawn_over_seconds_and_over_steps() -> None:
    series = {
        name: [(0, 0.0, 4.0), (32, 10.0, 2.9), (64, 20.0, 2.5)] for name in time_to_loss.COURSES
    }
    drawn = draw_curves(series)
    assert all(f">{name}<" in drawn for name in series)
    # Points above the highest loss that is drawn are left out.
    assert drawn.count("<circle") == 2 * 2 * len(series)
