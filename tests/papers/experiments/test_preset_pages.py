"""Pages of the lab's presets: what they say, and how they look in a browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradlane.lab.runs.cells import Cell, CellsProgress
from gradlane.lab.runs.rows import Row
from gradlane.lab.runs.traffic import Activity
from gradlane_papers.experiments.findings import Findings, completed
from gradlane_papers.experiments.presets import PRESETS, report_from_preset
from tests.browser import needs_browser, probe
from tests.command_line import run
from tests.lab.fake_runs import FakeMachine
from tests.report.test_pages import plots_of, structure_of

GBIT = 10**9
LOOK = """
  const wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
  const plots = [...document.querySelectorAll(".plot")];
  const first = plots[0];
  const dots = first.data.findIndex((trace) => trace.mode.includes("markers"));
  Plotly.Fx.hover(first, [{ curveNumber: Math.max(dots, 0), pointNumber: 0 }]);
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


def measured(cells: list[Cell], steps_s: dict[str, float], name: str) -> list[Row]:
    """Rows of made-up runs of these cells, as a preset keeps them."""
    found: list[Row] = []
    for cell in cells:
        made: list[Any] = []
        machine = FakeMachine(steps_s=steps_s)
        machine.run(cell.options(cell.strategies), progress=CellsProgress(), on_rows=made.extend)
        rows = [row for number, row in enumerate(made) if row not in made[:number]]
        found += map(PRESETS[name].describe, rows)
    return completed(found)


def bandwidth_rows() -> list[Row]:
    steps_s = {"none": 0.3, "p3": 0.35, "slicing": 0.43, "ddp-gloo:25": 0.44, "ddp-gloo:4": 0.4}
    cells = [Cell("resnet50", rate * GBIT, tuple(steps_s), 6.7) for rate in (4, 6)]
    rows = measured(cells, steps_s, "bandwidth")
    predicted = [
        replace(row, source="simulated", step_s_median=row.step_s_median * 1.02)
        for row in rows
        if row.strategy in ("p3", "slicing")
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
        report_from_preset([*rows, replace(rows[0], preset="other")], tmp_path / "report.html")
    with pytest.raises(ValueError, match="none"):
        report_from_preset([], tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_the_report_command_knows_presets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    results = tmp_path / "results.json"
    results.write_text(json.dumps([row.to_json() for row in bandwidth_rows()]))
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


def slices_rows() -> list[Row]:
    rows: list[Row] = []
    for size, step_s in ((1_000, 0.5), (50_000, 0.34), (200_000, 0.335), (1_000_000, 0.4)):
        strategies = ("none", "p3") if size == 1_000 else ("p3",)
        cell = Cell("resnet50", 4 * GBIT, strategies, 6.7, slice_elems=size)
        rows += measured([cell], {"p3": step_s}, "slices")
    rows = [replace(row, planned_slice_elems=50_000) for row in completed(rows)]
    predicted = [
        replace(row, source="simulated", step_s_median=row.step_s_median * 0.99)
        for row in rows
        if row.strategy == "p3"
    ]
    return rows + predicted


def scaling_rows() -> list[Row]:
    steps_s = {"none": 0.3, "p3": 0.31, "kvstore": 0.4, "ddp-gloo:25": 0.35}
    cells = [
        Cell("resnet50", 10 * GBIT, tuple(steps_s), 16.7, workers=count) for count in (2, 4, 8)
    ]
    rows = measured(cells, steps_s, "scaling")
    predicted = [
        replace(
            next(row for row in rows if row.strategy == "p3"),
            source="simulated",
            strategy=name,
            workers=count,
            dilation=1.0,
            samples_per_s=32 * count / 0.32,
            step_s_median=0.32,
        )
        for name in ("p3", "kvstore", "ring-fused")
        for count in (2, 16, 1024)
    ]
    return rows + predicted


def utilization_rows() -> list[Row]:
    steps_s = {"none": 0.3, "p3": 0.35, "kvstore": 0.44}
    cell = Cell("resnet50", 4 * GBIT, tuple(steps_s), 6.7)
    carriable = 0.956 * 4 * GBIT / 6.7 / 8 * 0.01
    found = []
    for row in measured([cell], steps_s, "utilization"):
        busy = {"none": 0.0, "p3": 0.97, "kvstore": 0.6}[row.strategy]
        moved = [
            round(carriable * (0.98 if number % 50 < 50 * busy else 0)) for number in range(400)
        ]
        activity = Activity(
            wall_interval_s=0.01,
            wall_sample_gap_s_median=0.01,
            wall_sample_gap_s_max=0.012,
            step_starts_s=[0.0, 0.3, 0.6],
            received_bytes=[moved] * 4,
            sent_bytes=[moved] * 4,
            rank_cpu_s=[[0.001] * 400] * 4,
        )
        found.append(replace(row, activity=activity))
    return found


def test_the_utilization_page_tells_idle_ports(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    report_from_preset(utilization_rows(), path)
    text = path.read_text("utf-8")
    assert "Idle time of the busiest port where communication is the limit" in text
    assert "2.0% with p3, 40.0% with kvstore" in text
    plots = plots_of(path)
    assert len(plots) == 2 * 2, "ports and processors, for each strategy that communicates"
    shown = [trace["name"] for trace in plots[0]["traces"] if "visible" not in trace]
    assert shown == ["node 0 out", "node 0 in", "goodput"]
    starts = [shape["x0"] for shape in plots[0]["layout"]["shapes"]]
    assert starts == [0.0, 0.3], "where the steps that are shown begin"


def test_the_slices_page_points_out_best_and_plan(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    report_from_preset(slices_rows(), path)
    text = path.read_text("utf-8")
    assert "resnet50 is fastest with 200,000 elements (the planner takes 50,000, +1.5%)" in text
    stars = {trace["name"]: trace["x"] for trace in plots_of(path)[0]["traces"]}
    assert stars["best measured"] == [200_000] and stars["planner's choice"] == [50_000]


def test_the_scaling_page_goes_on_where_measuring_ends(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    report_from_preset(scaling_rows(), path)
    assert "resnet50 97% on 8 workers" in path.read_text("utf-8")
    traces = {(trace["name"], trace["mode"]): trace for trace in plots_of(path)[0]["traces"]}
    assert traces["p3", "markers"]["x"] == [2, 4, 8]
    assert traces["p3", "lines"]["x"] == [2, 16, 1024]
    assert traces["p3", "lines"]["y"] == [pytest.approx(0.3 / 0.32)] * 3
    assert traces["fused ring (model of DDP)", "lines"]["showlegend"] is True


@needs_browser
@pytest.mark.parametrize("name", ["slices", "scaling", "utilization"])
def test_the_other_pages_at_phone_width(tmp_path: Path, name: str) -> None:
    path = tmp_path / "report.html"
    rows = {"slices": slices_rows, "scaling": scaling_rows, "utilization": utilization_rows}
    report_from_preset(rows[name](), path)
    seen = look_at(path, tmp_path, 390)
    assert {"slices": "1,000 elements", "scaling": "2 workers"}.get(name, "") in seen["hover"]


def test_key_figures_are_told_as_good_or_bad() -> None:
    figures = PRESETS["bandwidth"].figures(Findings(bandwidth_rows()))
    by_label = {it.label: it for it in figures}
    assert by_label["p3 over the best DDP, at most"].value == "1.14×"
    near = by_label["clusters with p3 within 5 % of the bound"]
    assert (near.value, near.tone) == ("0 of 2", "bad")
