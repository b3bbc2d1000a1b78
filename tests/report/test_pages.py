"""Tests of HTML reports: escaping, self-containment, and a page drawn in a real browser."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gradlane.lab.runs.display import print_tables
from gradlane.lab.runs.page import report_from_results, sections_from_results
from gradlane.lab.runs.rows import Row, rows_of, summarize
from gradlane.report import (
    Measurement,
    Paragraph,
    Section,
    Table,
    bar_plot,
    line_plot,
    measured_here,
    utilization_plot,
    write_report,
)
from tests.browser import needs_browser, probe

EVIL = '</script><script>alert("x")</script><b>&'


def content(strategy: str, step_s: float, **fields: Any) -> dict[str, Any]:
    """A result row as the lab writes it, with the fields that matter here."""
    return {
        "workload": "char-transformer",
        "strategy": strategy,
        "workers": 4,
        "rate_bps": 150_000_000,
        "dilation": 1.0,
        "steps": 3,
        "repeat": 0,
        "seed": 7,
        "samples_per_s": 16 / step_s,
        "step_s_median": step_s,
        "bound_step_s": 0.3,
        "link_utilization": 0.5,
        "cpu_share": 0.4,
        "loss": [3.0, 2.5, 2.0],
        "step_s": [step_s] * 3,
        "params_equal": True,
        "param_digest": "0123456789abcdef" * 4,
        "utilization_over_time": {
            "time_s": [0.0, 0.01],
            "transmit": [0.2, 0.9],
            "receive": [0.1, 0.8],
        },
        **fields,
    }


def row(strategy: str, step_s: float, **fields: Any) -> Row:
    return Row.from_json(content(strategy, step_s, **fields))


def rows() -> list[Row]:
    return [row("none", 0.25), row("ddp-gloo:25", 0.5), row("ddp-gloo:1", 0.4), row("p3", 0.32)]


class Structure(HTMLParser):
    """Checks that elements nest, and collects what a page loads from elsewhere."""

    VOID = frozenset({"meta", "link", "br", "img", "hr", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href") and value:
                self.links.append(value)
        self.scripts += tag == "script"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"unexpected end of {tag}"


def structure_of(path: Path) -> Structure:
    parser = Structure()
    parser.feed(path.read_text(encoding="utf-8"))
    assert parser.open == []
    return parser


def plots_of(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="plots">(.*?)</script>', text)
    assert found is not None
    plots: list[dict[str, Any]] = json.loads(found.group(1))
    return plots


def evil_page(path: Path) -> None:
    write_report(
        path,
        EVIL,
        [
            Section(
                EVIL,
                [
                    Paragraph(EVIL),
                    Table([EVIL, "n"], [[EVIL, 1], [None, 2.5]], EVIL),
                    line_plot(
                        EVIL, {EVIL: ([0, 1], [1.0, float("nan")])}, x_label=EVIL, y_label=EVIL
                    ),
                    Measurement(EVIL, {EVIL: EVIL}),
                ],
            )
        ],
        summary=EVIL,
    )


def test_all_inserted_text_is_escaped(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    evil_page(path)
    page = path.read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert "<b>" not in re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    # The plots' JSON, the plotting library and the page's own script; nothing that was inserted.
    assert structure_of(path).scripts == 3
    trace = plots_of(path)[0]["traces"][0]
    assert trace["name"] == EVIL
    assert trace["y"] == [1.0, None]


def test_page_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    report_from_results(rows(), path)
    assert structure_of(path).links == ["data:,"]
    assert not re.search(r"@import|url\(", (path.read_text("utf-8")).split("</style>")[0])


def test_page_without_plots_is_small(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_report(path, "small", [Section("one", [Paragraph("text")])])
    assert path.stat().st_size < 20_000
    assert list(tmp_path.iterdir()) == [path]


def test_overview_shows_ratios_within_a_repeat() -> None:
    twice = [
        *rows(),
        row("ddp-gloo:25", 1.0, repeat=1),
        row("ddp-gloo:1", 0.8, repeat=1),
        row("p3", 0.4, repeat=1),
    ]
    table = sections_from_results(twice)[0].blocks[0]
    assert isinstance(table, Table)
    column = list(table.columns).index("\N{MULTIPLICATION SIGN} DDP")
    strategy = list(table.columns).index("strategy")
    by_strategy = {line[strategy]: line for line in table.rows}
    # 0.4 / 0.32 = 1.25 and 0.8 / 0.4 = 2 against the best DDP of each repeat: median 1.625.
    assert by_strategy["p3"][column] == pytest.approx(1.625)
    assert by_strategy["ddp-gloo:1"][column] == pytest.approx(1.0)
    assert [table.rows[index][strategy] for index in table.highlight] == ["p3"]


def test_raw_and_encoded_steps_stand_in_tables_of_their_own() -> None:
    """On the page and on a terminal; each is still compared with the best DDP, which is raw."""
    encoded = [row("p3", 0.1, codec="qsgd:bits=8"), row("ddp-gloo+fp16", 0.2)]
    first, second, third = (
        block for block in sections_from_results([*rows(), *encoded])[0].blocks[:3]
    )
    for table, words, strategies in (
        (first, "Gradients: raw. ", ["none", "ddp-gloo:25", "ddp-gloo:1", "p3"]),
        (second, "Gradients: qsgd:bits=8. ", ["p3 qsgd:bits=8"]),
        (third, "Gradients: fp16. ", ["ddp-gloo+fp16"]),
    ):
        assert isinstance(table, Table) and table.caption.startswith(words)
        column = list(table.columns).index("strategy")
        assert sorted(str(line[column]) for line in table.rows) == sorted(strategies)
    assert isinstance(second, Table)
    ratio = second.rows[0][list(second.columns).index("\N{MULTIPLICATION SIGN} DDP")]
    assert ratio == pytest.approx(0.4 / 0.1)
    console = Console(file=StringIO(), width=110)
    print_tables(console, summarize([*rows(), *encoded]))
    raw, eight, half = console.file.getvalue().split("char-transformer at ")[1:]  # type: ignore[attr-defined]
    assert "gradients in" not in raw and raw.count("p3") == 1
    assert "gradients in qsgd:bits=8" in eight and "gradients in fp16" in half


def test_rows_over_several_rates_show_throughput_against_bandwidth(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    report_from_results([*rows(), row("p3", 0.3, rate_bps=300_000_000)], path)
    page = path.read_text(encoding="utf-8")
    assert "Throughput against bandwidth" in page
    assert plots_of(path)[0]["traces"][-1]["x"] == [0.15, 0.3]


def test_rows_with_required_fields_only_make_a_page(tmp_path: Path) -> None:
    keys = ("workload", "strategy", "rate_bps", "step_s_median")
    path = tmp_path / "page.html"
    report_from_results([Row.from_json({key: content("p3", 0.3)[key] for key in keys})], path)
    assert len(plots_of(path)) == 1


def test_recorded_versions_replace_those_of_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    report_from_results([row("p3", 0.3, versions={"torch": "0.0.test"})], path, command="run me")
    page = path.read_text(encoding="utf-8")
    assert "0.0.test" in page
    assert "<pre>run me</pre>" in page


def test_rows_without_what_a_page_needs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no result rows"):
        report_from_results([], tmp_path / "page.html")
    with pytest.raises(ValueError, match="row 1 has no 'strategy'"):
        rows_of([content("p3", 0.3), {"workload": "x"}])
    assert list(tmp_path.iterdir()) == []


def test_values_that_do_not_pair_up_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="series 'a' has 2"):
        line_plot("t", {"a": ([0, 1], [1.0])}, x_label="x", y_label="y")
    with pytest.raises(ValueError, match="series 'a' has 1"):
        bar_plot("t", ["one"], {"a": [1.0, 2.0]}, y_label="y")
    with pytest.raises(ValueError, match="not one cell"):
        write_report(tmp_path / "p.html", "t", [Section("s", [Table(["a"], [[1, 2]])])])


def test_utilization_is_in_percent_and_can_be_hidden() -> None:
    plot = utilization_plot("t", {"a": ([0.0], [0.5]), "b": ([0.0], [1.0])}, hidden=["b"])
    assert plot.traces[0]["y"] == [50.0]
    assert [trace.get("visible") for trace in plot.traces] == [None, "legendonly"]


def test_measured_here_names_command_and_versions() -> None:
    measurement = measured_here("make demo")
    assert measurement.command == "make demo"
    assert {"when", "python", "system", "processors"} <= set(measurement.facts)


def test_measured_here_names_the_program_of_python_m(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/lib/gradlane/__main__.py", "demo", "--html", "a b.html"])
    assert measured_here().command == "gradlane demo --html 'a b.html'"


@needs_browser
def test_browser_draws_all_plots_and_sorts(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    report_from_results(rows(), path)
    script = """
      const table = document.querySelector("table");
      const click = (name) => [...table.querySelectorAll("th button")]
        .find((button) => button.textContent === name).click();
      const order = () => [...table.tBodies[0].rows].map((r) => r.cells[0].textContent).join();
      click("step, s"); const up = order(); click("step, s"); const down = order();
      say({
        up, down, problems,
        plots: document.querySelectorAll(".plot").length,
        filled: document.querySelectorAll(".plot:has(svg)").length,
        wide: document.documentElement.scrollWidth > document.documentElement.clientWidth,
      });
    """
    result = probe(path, tmp_path, script)
    assert result["problems"] == []
    assert result["plots"] == result["filled"] == len(plots_of(path))
    assert result["up"] == "none,p3,ddp-gloo:1,ddp-gloo:25"
    assert result["down"] == "ddp-gloo:25,ddp-gloo:1,p3,none"
    assert result["wide"] is False


@needs_browser
def test_browser_runs_no_inserted_script(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    evil_page(path)
    assert probe(path, tmp_path, "say(document.title);") == EVIL


def test_no_label_stands_between_two_steps() -> None:
    """Few whole numbers are labelled one by one; times are not."""
    steps = line_plot("Steps", {"a": (range(3), [1.0, 2.0, 3.0])}, x_label="step", y_label="s")
    times = line_plot("Times", {"a": ([0.0, 2.0], [1.0, 2.0])}, x_label="s", y_label="loss")
    assert steps.layout["xaxis"]["dtick"] == 1
    assert "dtick" not in times.layout["xaxis"]
