"""The chart of the README, drawn from the committed rows."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmarks.front_chart import LAYOUTS, THEMES, panel_of, write_charts

from gradlane.lab.runs.rows import read_rows
from tests.paths import ROOT

RESULTS = ROOT / "docs" / "predictions.json"
IMAGES = ROOT / "docs" / "images"


def test_the_committed_charts_are_those_of_the_rows(tmp_path: Path) -> None:
    drawn = write_charts(RESULTS, tmp_path)
    assert {path.name for path in drawn} == {path.name for path in IMAGES.iterdir()}
    for path in drawn:
        assert path.read_text() == (IMAGES / path.name).read_text(), (
            "run: python -m benchmarks.front_chart docs/predictions.json docs/images"
        )
        root = ElementTree.parse(path).getroot()
        assert "10 Gbit/s DDP 944, gradlane 756" in root.attrib["aria-label"]


@pytest.mark.parametrize(("name", "column_px"), [("steps-narrow", 358), ("steps", 800)])
def test_text_is_readable_where_the_chart_is_shown(name: str, column_px: int) -> None:
    """A phone of 390 pixels has a column of 358; a wider chart is shown from 600 on."""
    layout = LAYOUTS[name]
    assert layout.font_px * column_px / layout.width >= 14
    for page in ("README.md", "docs/README.md"):
        text = (ROOT / page).read_text()
        for theme in THEMES:
            assert f"images/{name}-{theme}.svg" in text


def test_a_panel_has_the_fastest_of_each_and_rates_with_all() -> None:
    rows = read_rows(RESULTS)
    panel = panel_of(rows, "vgg19", "VGG-19")
    assert list(panel.rates) == [5, 7.5, 10, 15, 30]
    ddp = [
        row.step_s_median * 1e3
        for row in rows
        if row.workload == "vgg19" and row.strategy.startswith("ddp") and row.rate_bps == 10e9
    ]
    assert len(ddp) > 1 and panel.lines["DDP, best buckets"][2] == min(ddp)
    for ours, bound in zip(panel.lines["gradlane"], panel.lines["bound"], strict=True):
        assert ours > bound
    with pytest.raises(ValueError, match="no row of gpt2_small"):
        panel_of(rows, "gpt2_small", "GPT-2")
