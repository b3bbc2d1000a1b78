"""The page of other ways has the rows that were measured."""

from __future__ import annotations

import json

import pytest
from benchmarks import compared_with

from tests.paths import ROOT

CONTENT = json.loads((ROOT / "docs/compared-with.json").read_text(encoding="utf-8"))


def test_the_page_has_the_table_of_its_rows() -> None:
    page = (ROOT / "docs/compared-with.md").read_text(encoding="utf-8")
    assert page == compared_with.with_table(page, compared_with.table(CONTENT)), (
        "run: python -m benchmarks.compared_with --render --json docs/compared-with.json "
        "--markdown docs/compared-with.md"
    )


def test_every_way_was_measured_as_often() -> None:
    named = [row["way"] for row in CONTENT["rows"]]
    seeds = {row["seed"] for row in CONTENT["rows"]}
    assert {way: named.count(way) for way in named} == {
        way.name: len(seeds) for way in compared_with.WAYS
    }


def test_a_way_that_is_not_installed_has_a_row() -> None:
    ours = [row for row in CONTENT["rows"] if "torchft" not in row["way"]]
    table = compared_with.table(CONTENT | {"rows": ours})
    assert "| torchft, `DiLoCo(sync_every=32)` | not installed |" in table


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="measured: end"):
        compared_with.with_table(f"text\n{compared_with.MARKS[0]}\n", "table")
