"""The table of versions has the outcomes that were written, and those are of this tree's parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradlane.training import torch_internals
from tests import version_matrix

RUNS: list[dict[str, Any]] = json.loads(version_matrix.RESULTS.read_text())

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_is_right"/>
<testcase classname="tests.test_a" name="test_fails[x]"><failure>E</failure></testcase>
<testcase classname="tests.test_b" name="test_cannot_begin"><error>E</error></testcase>
<testcase classname="tests.test_b" name="s1"><skipped message="torch 2.4 cannot"/></testcase>
<testcase classname="tests.test_b" name="s2"><skipped message="torch 2.4 cannot"/></testcase>
</testsuite></testsuites>"""


def test_the_page_has_the_table_of_the_runs() -> None:
    page = version_matrix.PAGE.read_text()
    assert page == version_matrix.with_table(page, version_matrix.table(RUNS)), (
        "run: python -m tests.version_matrix --render"
    )


def test_runs_are_of_versions_that_the_command_runs() -> None:
    found = [f"{run['python'].rpartition('.')[0]}:{run['torch']}" for run in RUNS]
    assert found == [pair for pair in version_matrix.PAIRS if pair in found]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: str(run["torch"]))
def test_parts_of_torch_were_seen_in_the_releases_that_have_them(run: dict[str, Any]) -> None:
    torch_internals.look_up_all()
    release = version_matrix.release_of(run["torch"])
    for name, row in torch_internals.INTERNALS.items():
        assert (release in row.seen.split(", ")) == (name not in run["lost"]), name


def test_outcomes_are_counted(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert version_matrix.read_outcomes(report) == {
        "passed": 1,
        "failed": ["tests.test_a::test_fails[x]", "tests.test_b::test_cannot_begin"],
        "skipped": {"torch 2.4 cannot": 2},
    }


def test_a_failed_test_and_what_is_lost_are_named() -> None:
    run = {
        **RUNS[0],
        "failed": ["tests.test_a::test_fails[x]"],
        "lost": {"_C.gone": "it is slow", "_C.needed": None},
        "sends_gradients_uncopied": False,
        "skipped": {"torch 2.4 cannot": 2, "no accelerate": 3},
    }
    table = version_matrix.table([run])
    assert f"- torch {run['torch']}: `tests.test_a::test_fails[x]`" in table
    assert "no `torch._C.gone`: it is slow; no `torch._C.needed`: refused" in table
    assert "each gradient is copied" in table
    assert "not tested (2): torch 2.4 cannot |" in table and "accelerate" not in table


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="versions: end"):
        version_matrix.with_table(f"text\n{version_matrix.MARKS[0]}\n", "table")
