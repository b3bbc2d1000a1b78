"""The interactive page of a what-if: what it holds, and what it does in a real browser."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gradlane.cli.whatif import run_whatif
from gradlane.planning.advice.page import report_from_whatif
from gradlane.planning.simulation.lists import Grid
from gradlane.planning.simulation.profiles import synthetic_profile
from gradlane.planning.simulation.scenarios import Cluster
from tests.browser import needs_browser, probe
from tests.command_line import run

WORKERS = [2, 4]
RATES = [1e9, 4e9, 10e9]
STRATEGIES = ["wfbp", "p3", "ring-fused"]
COMPRESSIONS = [1.0, 4.0]


@functools.cache
def page_text() -> str:
    """A page as the command makes it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        run_whatif(
            synthetic_profile("resnet50"),
            Grid(
                workers=WORKERS, rates_bps=RATES, strategies=STRATEGIES, compressions=COMPRESSIONS
            ),
            Cluster(workers=1, rate_bps=0.0),
            console=Console(quiet=True),
            html_path=path,
        )
        return path.read_text(encoding="utf-8")


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.html"
    path.write_text(page_text(), encoding="utf-8")
    return path


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'id="explorer-data">(.*?)</script>', text)
    assert found is not None
    data: dict[str, Any] = json.loads(found.group(1))
    return data


def row(**changes: Any) -> dict[str, Any]:
    return {
        "model": "small",
        "strategy": "p3",
        "workers": 4,
        "rate_bps": 1e9,
        "compression": 1.0,
        "scaling_factor": 0.5,
        "step_s": 0.6,
        "bound_scaling_factor": 0.9,
        "compute_s": 0.3,
        "samples_per_s": 100.0,
        **changes,
    }


def test_the_page_holds_the_grid_and_nothing_from_elsewhere() -> None:
    text = page_text()
    data = data_of(text)
    assert data["values"] == {
        "workers": WORKERS,
        "ranks_per_node": [1],
        "rate_bps": RATES,
        "compression": COMPRESSIONS,
    }
    assert len(data["rows"]) == 2 * 3 * 3 * 2
    assert data["series"] == STRATEGIES and data["baseline"] == "wfbp"
    # One step of every cluster of the engine; a formula has none.
    assert len(data["pictures"]) == 2 * 3 * 2 * 2
    assert "src=" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"@import|url\(", text.split("</style>")[0])
    # The answers stand in the page without any script, too.
    assert text.count("<li>") == len(data["answers"]) == 6


def test_the_page_begins_where_another_order_brings_most(tmp_path: Path) -> None:
    rows = [
        row(strategy=strategy, rate_bps=rate, scaling_factor=share)
        for rate, wfbp, p3 in ((1e9, 0.2, 0.25), (2e9, 0.5, 0.8), (4e9, 0.97, 0.98))
        for strategy, share in (("wfbp", wfbp), ("p3", p3), ("ring-fused", min(1.0, rate / 1e9)))
    ]
    path = tmp_path / "page.html"
    report_from_whatif({"rows": rows}, path)
    assert data_of(path.read_text(encoding="utf-8"))["start"] == {
        "workers": 0,
        "ranks_per_node": 0,
        "rate_bps": 1,
        "compression": 0,
    }


def test_rows_alone_make_a_page(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    report_from_whatif({"rows": [row(), row(rate_bps=2e9)]}, path)
    assert "small" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([], "no rows"),
        ([row(), 7], "row 1"),
        ([row(step_s=None)], "step_s"),
        ([row(), row()], "twice"),
    ],
)
def test_rows_that_make_no_page_are_refused(tmp_path: Path, rows: list[Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        report_from_whatif({"rows": rows}, tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_inserted_names_are_text(tmp_path: Path) -> None:
    evil = '</script><script>alert("x")</script><b>&'
    path = tmp_path / "page.html"
    content = {
        "profile": {"model": evil},
        "rows": [row(strategy=evil)],
        "answers": [
            {
                "workers": 4,
                "rate_bps": 1e9,
                "bottleneck": "none",
                "text": evil,
                "baseline": evil,
                "baseline_scaling_factor": 1.0,
            }
        ],
        "tensors": [evil],
    }
    report_from_whatif(content, path)
    text = path.read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert "<b>" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def test_the_report_command_takes_the_file_of_a_what_if(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    written, page, again = tmp_path / "a.json", tmp_path / "a.html", tmp_path / "b.html"
    arguments = ["--workers", "2", "--rate", "1gbit,4gbit", "--strategy", "ddp,wfbp,p3"]
    arguments += ["--json", str(written)]
    status, _, _ = run(monkeypatch, capsys, "whatif", "resnet50", *arguments, "--html", str(page))
    assert status == 0
    status, out, _ = run(monkeypatch, capsys, "report", str(written), "--html", str(again))
    assert status == 0 and str(again) in out
    first, second = data_of(page.read_text("utf-8")), data_of(again.read_text("utf-8"))
    # A formula has none.
    assert len(first["pictures"]) == 4 and second["pictures"] == []
    assert second["rows"] == first["rows"]


@needs_browser
def test_sliders_change_everything_and_nothing_leaves_the_page(page: Path, tmp_path: Path) -> None:
    script = """
      const slide = (name, value) => {
        const input = document.getElementById(`control-${name}`);
        input.value = value;
        input.dispatchEvent(new Event("input"));
      };
      const view = () => ({
        heading: document.getElementById("here").textContent,
        state: document.getElementById("state").textContent,
        answer: document.getElementById("answer").textContent,
        bars: [...document.querySelectorAll("#bars .share")].map((it) => it.textContent),
        workers: document.getElementById("against-workers").data.map((it) => it.y),
        rates: document.getElementById("against-rate_bps").data.map((it) => it.y),
        steps: [...document.querySelectorAll(".picture figcaption")].map((it) => it.textContent),
        ends: [...document.querySelectorAll(".picture .plot")]
          .map((it) => it.data.map((lane) => lane.name)),
        said: document.getElementById("control-rate_bps").getAttribute("aria-valuetext"),
      });
      const first = view();
      slide("workers", 0); slide("rate_bps", 0);
      const slow = view();
      slide("rate_bps", 2); slide("compression", 1);
      const fast = view();
      const select = document.querySelector(".picture select");
      select.value = "p3"; select.dispatchEvent(new Event("change"));
      say({
        first, slow, fast, changed: view(), problems,
        requests: performance.getEntriesByType("resource").map((it) => it.name)
          .filter((it) => !it.startsWith("data:")),
        labelled: [...document.querySelectorAll("input, select")]
          .every((it) => it.labels.length === 1 && it.tabIndex === 0),
        described: [...document.querySelectorAll(".plot")]
          .every((it) => (it.getAttribute("aria-label") || "").length > 20),
        drawn: [...document.querySelectorAll(".plot")].every((it) => it.querySelector("svg")),
      });
    """
    result = probe(page, tmp_path, script)
    assert result["problems"] == []
    assert result["requests"] == []
    assert result["labelled"] and result["described"] and result["drawn"]
    data = data_of(page.read_text(encoding="utf-8"))
    rows = [dict(zip(data["columns"], cells, strict=True)) for cells in data["rows"]]

    def shares(workers: int, rate_bps: float, compression: float) -> list[str]:
        found = (
            it["scaling_factor"]
            for it in rows
            if (it["workers"], it["rate_bps"], it["compression"])
            == (workers, rate_bps, compression)
        )
        return [f"{100 * share:.{0 if share > 0.9995 else 1}f} %" for share in found]

    first, slow, fast = result["first"], result["slow"], result["fast"]
    assert first["heading"] == "4 workers at 4 Gbit/s"
    assert first["bars"] == shares(4, 4e9, 1.0)
    assert slow["heading"] == "2 workers at 1 Gbit/s"
    assert slow["bars"] == shares(2, 1e9, 1.0)
    assert slow["said"] == "1 Gbit/s"
    assert fast["heading"] == "2 workers at 10 Gbit/s, 4 times fewer bytes"
    assert fast["bars"] == shares(2, 10e9, 4.0)
    assert "costs" in slow["state"] and "not the bottleneck" in fast["state"]
    assert slow["answer"].startswith("2 workers at 1 Gbit/s")
    assert slow["workers"] != fast["workers"] and slow["rates"] != fast["rates"]
    assert len(first["steps"]) == 2
    assert slow["steps"] != first["steps"]
    for lanes in first["ends"]:
        assert {"backward", "forward", "push", "broadcast", "waiting"} <= set(lanes)
    # Both pictures are of the same strategy now.
    assert len(set(result["changed"]["steps"])) == 1


@needs_browser
def test_a_phone_shows_all_without_scrolling_sideways(page: Path, tmp_path: Path) -> None:
    script = """
      const root = document.documentElement;
      const outside = [...document.querySelectorAll("main *")].filter((it) =>
        !it.closest(".scroll") && it.getBoundingClientRect().right > root.clientWidth + 1);
      say({
        width: root.clientWidth, needed: root.scrollWidth, problems,
        outside: outside.map((it) => it.tagName + "." + it.className).slice(0, 5),
        slider: document.querySelector("input[type=range]").getBoundingClientRect().height,
      });
    """
    result = probe(page, tmp_path, script, width=390)
    assert result["problems"] == []
    assert result["width"] <= 390
    assert result["needed"] <= result["width"]
    assert result["outside"] == []
    assert result["slider"] >= 24
