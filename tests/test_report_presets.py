"""Pages of the lab's presets: what they say, and how they look in a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gradlane.lab.cells import Cell, CellsProgress
from gradlane.lab.presets.completed import completed
from gradlane.lab.presets.preset import Preset
from gradlane.report.page import Figures
from gradlane.report.presets import report_from_preset
from tests.browser import needs_browser, probe
from tests.command_line import run
from tests.made_rows import Machine
from tests.test_report import plots_of, structure_of

GBIT = 10**9
LOOK = """
  const wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
  const plots = [...document.querySelectorAll(".plot")];
  const first = plots[0];
  const dots = first.data.findIndex((trace) => trace.mode.includes("markers"));
  Plotly.Fx.hover(first, [{ curveNumber: dots, pointNumber: 0 }]);
  const words = (parts) => [...parts].map((part) => part.textContent);
  const hover = words(first.querySelectorAll(".hoverlayer text")).join(" ");
  const shade = () => getComputedStyle(document.body).backgroundColor;
  const ink = () => first.layout.font.color;
  const before = [shade(), ink()];
  document.getElementById("theme").click();
  const after = [shade(), ink()];
  const table = document.querySelector("table");
  const order = () => [...table.tBodies[0].rows].map((r) => r.cells[1].textContent).join();
  const headings = [...table.querySelectorAll("th button")];
  const heading = headings.find((button) => button.textContent === "step, ms");
  heading.click();
  const up = order();
  heading.click();
  const right = document.documentElement.clientWidth;
  const parts = [...document.querySelectorAll("section, figure, .figures, aside")];
  say({
    problems, wide, hover, before, after, up, down: order(),
    plots: plots.length, drawn: plots.filter((plot) => plot.querySelector("svg")).length,
    small: plots.filter((plot) => plot.clientWidth < 250).length,
    outside: parts.filter((part) => part.getBoundingClientRect().right > right).length,
  });
"""
"""What a person sees first: plots, tooltips, both themes, sorted tables, nothing cut off."""


def measured(cells: list[Cell], steps_s: dict[str, float], name: str) -> list[dict[str, Any]]:
    """Rows of made-up runs of these cells, as a preset keeps them."""
    preset = Preset(name, cells, lambda rows: [])
    found: list[dict[str, Any]] = []
    for cell in cells:
        made: list[Any] = []
        machine = Machine(steps_s=steps_s)
        machine.run(cell.options(cell.strategies), progress=CellsProgress(), on_rows=made.extend)
        rows = [row for number, row in enumerate(made) if row not in made[:number]]
        found += [preset.describe(row) for row in rows]
    return completed(found)


def bandwidth_rows() -> list[dict[str, Any]]:
    steps_s = {"none": 0.3, "p3": 0.35, "slicing": 0.43, "ddp-gloo:25": 0.44, "ddp-gloo:4": 0.4}
    cells = [Cell("resnet50", rate * GBIT, tuple(steps_s), 6.7) for rate in (4, 6)]
    rows = measured(cells, steps_s, "bandwidth")
    predicted = [
        {**row, "source": "simulated", "step_s_median": row["step_s_median"] * 1.02}
        for row in rows
        if row["strategy"] in ("p3", "slicing")
    ]
    return rows + predicted


def test_the_bandwidth_page_says_what_was_found(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    report_from_preset(bandwidth_rows(), path)
    page = path.read_text(encoding="utf-8")
    text = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert structure_of(path).links == ["data:,"]
    assert "p3 trains up to 1.14 times as fast as the best DDP: resnet50 at 4 Gbit/s" in text
    assert "gradlane lab made" in text and "2.0.test" in text and "0.25" in text
    assert "10 measured, 4 simulated" in text
    plot = plots_of(path)[0]
    by_mode = {(trace["name"], trace["mode"]): trace for trace in plot["traces"]}
    assert by_mode["p3", "markers"]["meta"] == by_mode["p3", "lines"]["meta"]
    assert by_mode["best DDP", "lines+markers"]["y"] == [pytest.approx(128 / 0.4)] * 2
    assert by_mode["bound", "lines"]["line"]["dash"] == "dash"
    assert "1.14× ddp-gloo:4" in by_mode["p3", "markers"]["text"][0]
    # One entry in the legend for dots and line together.
    shown = [trace["name"] for trace in plot["traces"] if trace.get("showlegend", True)]
    assert sorted(shown) == sorted(set(shown))


def test_rows_of_several_presets_make_no_page(tmp_path: Path) -> None:
    rows = bandwidth_rows()
    with pytest.raises(ValueError, match="other"):
        report_from_preset([*rows, {**rows[0], "preset": "other"}], tmp_path / "report.html")
    with pytest.raises(ValueError, match="none"):
        report_from_preset([], tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_the_report_command_knows_presets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    results = tmp_path / "results.json"
    results.write_text(json.dumps(bandwidth_rows()))
    status, out, _ = run(monkeypatch, capsys, "report", str(results))
    assert status == 0 and "results.html" in out
    assert "Throughput against bandwidth" in results.with_suffix(".html").read_text("utf-8")


def look_at(page: Path, folder: Path, width: int) -> Any:
    seen = probe(page, folder, LOOK, width=width)
    assert seen["problems"] == []
    assert seen["plots"] == seen["drawn"] > 0
    assert (seen["wide"], seen["small"], seen["outside"]) == (False, 0, 0)
    assert seen["before"][0] != seen["after"][0] and seen["before"][1] != seen["after"][1]
    return seen


@needs_browser
@pytest.mark.parametrize("width", [1100, 390])
def test_the_bandwidth_page_at_desktop_and_phone_width(tmp_path: Path, width: int) -> None:
    path = tmp_path / "report.html"
    report_from_preset(bandwidth_rows(), path)
    seen = look_at(path, tmp_path, width)
    assert "p3, measured, 4 Gbit/s" in seen["hover"]
    assert seen["up"].startswith("none,none,p3") and seen["down"].endswith("p3,none,none")


def test_key_figures_are_told_as_good_or_bad() -> None:
    from gradlane.report.bandwidth import in_short

    figures = in_short(bandwidth_rows())[0]
    assert isinstance(figures, Figures)
    by_label = {it.label: it for it in figures.figures}
    assert by_label["p3 over the best DDP, at most"].value == "1.14×"
    near = by_label["clusters with p3 within 5 % of the bound"]
    assert (near.value, near.tone) == ("0 of 2", "bad")
