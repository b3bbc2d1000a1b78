"""The live page in a real browser: what it shows, of a server's states and of hostile names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradlane.formats.live_state import LiveState
from gradlane.formats.serialization.strict_json import dumps
from gradlane.report.live_page import live_page
from gradlane.training.monitoring.dashboard import pages_of
from gradlane.training.monitoring.endpoint import Endpoint
from tests.browser import dump, needs_browser, probe
from tests.training.monitoring.live_source import HOSTILE, FakeSource


@pytest.fixture
def source() -> Iterator[FakeSource]:
    one = FakeSource(steps=600)
    one.norms = {(1, f"{HOSTILE}.weight"): 3.0}
    one.view.add_event(f"an event with {HOSTILE}", "warning")
    yield one
    one.view.forget()


def shown(folder: Path, script: str, states: list[LiveState], *, width: int = 1100) -> Any:
    """Open the page with these states, the last of them for ever; see `probe`."""
    # In a script, a name must not end it.
    values = dumps(states).decode().replace("<", "\\u003c")
    answers = (
        f"<script>const states = {values};"
        "window.fetch = (target) => new Promise((resolve) => setTimeout(() => resolve("
        "{ ok: true, json: async () => (states.length > 1 ? states.shift() : states[0]) }), 100));"
        "</script>"
    )
    page = folder / "live.html"
    text = live_page().content.decode()
    page.write_text(text.replace("<head>", f"<head>{answers}", 1), encoding="utf-8")
    return probe(page, folder, f"setTimeout(() => {{ {script} }}, 1500);", width=width)


@needs_browser
def test_a_served_page_shows_the_state_under_its_own_policy(
    source: FakeSource, tmp_path: Path
) -> None:
    source.view.end("closed")
    one = Endpoint("127.0.0.1", 0, pages_of(source.view))
    try:
        page = dump(f"http://127.0.0.1:{one.port}/", tmp_path)
    finally:
        one.close()
    assert "the session closed in order" in page
    assert "<dd>600</dd>" in page and "fc" in page and "topk:ratio=0.01" in page
    assert page.count('<path class="step"') == 1
    # The names came as text: only the page's own script stands there, and no image.
    assert page.count("<script") == 1 and "<img" not in page and "&lt;img src=x" in page


@needs_browser
@pytest.mark.parametrize("width", [360, 1100])
def test_names_are_text_and_nothing_is_wider_than_the_screen(
    source: FakeSource, tmp_path: Path, width: int
) -> None:
    state = source.view.state()
    found = shown(
        tmp_path,
        """
        const text = (id) => document.getElementById(id).textContent;
        say({
          problems,
          status: text("status"),
          layer: document.querySelector("#layers tbody td").textContent,
          markup: document.querySelectorAll("tbody *:not(tr, td, span), #events img").length,
          event: text("events"),
          width: document.documentElement.scrollWidth,
          paths: [...document.querySelectorAll("#steps-chart path")].map((one) => one.classList[0]),
          bar: document.querySelector("#layers .meter span").clientWidth,
        });
        """,
        [state],
        width=width,
    )
    assert found["problems"] == [] and found["status"] == "training"
    assert found["layer"] == state["layers"][0]["name"] and "<script>" in found["layer"]
    assert found["markup"] == 0 and "<img src=x" in found["event"]
    assert found["width"] <= width
    assert found["paths"] == ["max", "wait", "step"] and found["bar"] > 10


@needs_browser
def test_a_job_without_a_name_and_gradients_as_they_are_have_their_own_words(
    source: FakeSource, tmp_path: Path
) -> None:
    named = source.view.state()
    plain: Any = {**named, "job": "none", "raw_bytes": 80, "encoded_bytes": 80}
    say = """
      const text = (id) => document.getElementById(id).textContent;
      say([text("session"), text("codecs-note")]);
    """
    session, note = shown(tmp_path, say, [named])
    assert session.startswith("job a job, strategy p3") and "1/4.00 of their bytes" in note
    session, note = shown(tmp_path, say, [plain])
    assert session.startswith("strategy p3") and note.endswith(
        "took 80 B, none of them compressed."
    )


@needs_browser
def test_a_stall_an_end_and_another_version_are_said(source: FakeSource, tmp_path: Path) -> None:
    source.pass_time(100.0)
    source.wait = {"step": 601, "tensors": ["fc.weight"], "tensor_count": 1}
    stalled = source.view.state()
    source.view.end("given up: ValueError: no")
    ended = source.view.state()
    other: Any = {**ended, "version": 2}
    say = 'say(document.getElementById("status").textContent)'
    text = shown(tmp_path, say, [stalled])
    assert text.startswith("no news since 1 min 4") and "waits for fc.weight of step 601" in text
    assert (
        shown(tmp_path, say, [stalled, ended]) == "the session has ended: given up: ValueError: no"
    )
    assert "another version" in shown(tmp_path, say, [stalled, other])


@needs_browser
def test_pointing_at_the_chart_names_the_step(source: FakeSource, tmp_path: Path) -> None:
    script = """
        document.querySelector('[data-rows="recent"]').click();
        const svg = document.getElementById("steps-chart");
        const { right, top } = svg.getBoundingClientRect();
        const point = { clientX: right - 9, clientY: top + 9 };
        svg.dispatchEvent(new PointerEvent("pointermove", point));
        const readout = document.getElementById("steps-readout").textContent;
        const cursors = svg.querySelectorAll(".cursor").length;
        svg.dispatchEvent(new PointerEvent("pointerleave"));
        say([readout, cursors, svg.querySelectorAll(".cursor").length, problems]);
    """
    readout, during, after, problems = shown(tmp_path, script, [source.view.state()])
    assert readout == "step 599, 9 min 59 s after the start: 1.00 s, 250 ms of it waiting"
    assert (during, after, problems) == (1, 0, [])
