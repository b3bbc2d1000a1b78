"""The figure of a training that is killed and goes on, at a small size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser import needs_browser, probe
from tests.built import needs_core
from tests.paths import ROOT

pytestmark = needs_core


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the program; the folder has what it wrote."""
    folder = tmp_path_factory.mktemp("resume")
    program = str(ROOT / "benchmarks" / "resume_loss.py")
    sizes = ["--ranks", "2", "--steps", "8", "--every", "2", "--resume", "2,1"]
    files = ["--json", str(folder / "resume.json"), "--html", str(folder / "resume.html")]
    path = os.pathsep.join(part for part in sys.path if part)
    done = subprocess.run(
        [sys.executable, program, *sizes, *files],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_curve_goes_on_with_the_same_bits_or_to_rounding(made: Path) -> None:
    result = json.loads((made / "resume.json").read_text())
    assert 2 < result["killed_at"] < 6
    assert result["restored_at"] in (2, 4, 6)
    whole, killed, same, other = result["runs"]
    assert len(whole["losses"]) == 8 and len(killed["losses"]) >= result["killed_at"]
    assert same["begun"] == other["begun"] == result["restored_at"]
    assert same["digest"] == whole["digest"] != other["digest"]
    by_name = {row["name"]: row for row in result["comparisons"]}
    assert by_name["killed"]["same_bits"]
    assert by_name["resumed with 2"]["same_bits"]
    assert by_name["resumed with 2"]["largest_difference"] == 0.0
    # Sums of other parts of the batch, over a handful of steps.
    assert 0.0 < by_name["resumed with 1"]["largest_difference"] < 1e-4
    assert whole["losses"][-1] < whole["losses"][0]


@needs_browser
def test_the_page_lays_the_curves_over_each_other(made: Path, tmp_path: Path) -> None:
    names = probe(
        made / "resume.html",
        tmp_path,
        'say([...document.querySelectorAll(".js-plotly-plot")].map('
        "(plot) => plot.data.map((line) => line.name)));",
    )
    assert names[0] == ["killed", "resumed with 2", "resumed with 1", "uninterrupted"]
    assert names[1] == names[0][:-1]
