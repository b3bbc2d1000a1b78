"""The state of a session as its live page reads it, from numbers that are known."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from gradlane.formats.live_state import LiveState, read_state
from gradlane.formats.serialization.strict_json import FormatError, dumps
from gradlane.training.log import log
from gradlane.training.monitoring.live import EVENTS_MAX
from gradlane.training.monitoring.step_timer import HISTORY_ROWS, RECENT_STEPS, StepTimer
from tests.training.monitoring.live_source import HOSTILE, FakeSource


@pytest.fixture
def source() -> Iterator[FakeSource]:
    one = FakeSource(steps=20)
    yield one
    one.view.forget()


def read(source: FakeSource) -> LiveState:
    """The state as a reader has it, checked against its schema."""
    return read_state(dumps(source.view.state()))


def test_the_state_has_steps_waits_ranks_and_codecs(source: FakeSource) -> None:
    source.norms = {(1, f"{HOSTILE}.weight"): 3.0, (1, "fc.bias"): 4.0}
    state = read(source)
    assert (state["rank"], state["world_size"], state["step"]) == (0, 2, 20)
    assert state["steps"]["median_s"] == 1.0 and state["steps"]["wait_share"] == 0.25
    assert [row["recent_share"] for row in state["layers"]] == pytest.approx([0.8, 0.2])
    assert state["layers"][1]["name"] == "fc"
    self_row, other = state["ranks"]
    assert (self_row["role"], other["role"]) == ("self", "trains")
    assert other["last_share"] == other["recent_last_share"] == 0.9
    assert other["recent_late_s_mean"] == pytest.approx(0.1)
    # A reader who comes first has the whole run, of 20 seconds.
    assert other["tx_bytes_per_s"] == pytest.approx(1e6)
    assert state["codecs"] == [
        {"codec": "topk:ratio=0.01", "tensors": 1, "residual_norm": 3.0},
        {"codec": "raw", "tensors": 1, "residual_norm": 4.0},
    ]
    assert [row["norm"] for row in state["residuals"]] == [4.0, 3.0]
    assert state["wait"] is None and state["ending"] == ""


def test_rates_are_those_of_the_last_seconds(source: FakeSource) -> None:
    read(source)
    for _ in range(15):
        source.train(2, step_s=0.5, wait_s=0.4)
        state = read(source)
    assert state["window"]["length_s"] == pytest.approx(10.0)
    assert state["window"]["steps"] == 20
    assert state["window"]["wait_share"] == pytest.approx(0.8)
    assert state["ranks"][1]["tx_bytes_per_s"] == pytest.approx(2e6)
    assert state["steps"]["wait_share"] < 0.6


def test_a_training_without_news_is_stalled_and_says_what_it_waits_for(source: FakeSource) -> None:
    source.pass_time(8.5)
    assert not read(source)["is_stalled"]
    source.pass_time(1.0)
    source.wait = {"step": 21, "tensors": ["fc.weight"], "tensor_count": 1}
    state = read(source)
    assert state["is_stalled"] and state["quiet_s"] == pytest.approx(10.5)
    assert state["wait"] == source.wait
    source.train(1)
    assert not read(source)["is_stalled"]
    source.pass_time(100.0)
    source.view.end("closed")
    assert not read(source)["is_stalled"]


def test_events_are_what_the_session_says_and_how_it_ends(source: FakeSource) -> None:
    source.pass_time(5.0)
    log.warning("rank %d is \x1b[31mlate", 1)
    source.view.end("given up: ValueError: no\nmore")
    log.info("said after the end")
    state = read(source)
    assert [(event["level"], event["text"]) for event in state["events"]] == [
        ("warning", r"rank 1 is \x1b[31mlate"),
        ("error", r"session given up: ValueError: no\nmore"),
    ]
    assert state["events"][0]["at_s"] == pytest.approx(25.0)
    assert state["ending"] == r"given up: ValueError: no\nmore"
    assert not [one for one in log.handlers if type(one).__name__ == "_EventHandler"]


def test_refused_connections_are_events_once(source: FakeSource) -> None:
    source.refusals += [{"address": "10.0.0.9:1", "reason": "another job"}] * 2
    read(source)
    read(source)
    source.refusals.append({"address": "10.0.0.7:2", "reason": "\x1b[2J"})
    assert [event["text"] for event in read(source)["events"]] == [
        "connections refused: 2; the last one from 10.0.0.9:1: another job",
        r"connections refused: 1; the last one from 10.0.0.7:2: \x1b[2J",
    ]


def test_names_and_events_are_bounded_and_printable(source: FakeSource) -> None:
    for number in range(3 * EVENTS_MAX):
        source.view.add_event(f"{number} " + "x" * 10_000)
    text = json.dumps(source.view.state(), ensure_ascii=False)
    assert text.isprintable()
    state = read(source)
    assert len(state["events"]) == EVENTS_MAX
    assert len(text) < EVENTS_MAX * 1000
    # A page sets it as text: the markup need not be taken apart here.
    assert any(row["name"].startswith("<script>") for row in state["layers"])


def test_the_history_of_a_long_run_is_bounded_and_loses_no_step() -> None:
    now_ns = 0
    timer = StepTimer(lambda: now_ns, keeps_history=True)
    for step in range(10_001):
        timer.step_begins()
        now_ns += 2_000_000 if step != 5000 else 9_000_000
    rows = timer.history_rows(0)
    assert len(rows) <= HISTORY_ROWS
    assert sum(row["steps"] for row in rows) == rows[-1]["last"] == 10_000
    assert len({row["steps"] for row in rows[:-1]}) == 1
    assert sum(row["steps"] * row["mean_s"] for row in rows) == pytest.approx(20.007, rel=1e-4)
    assert max(row["max_s"] for row in rows) == 0.009
    assert [row["end_s"] for row in rows] == sorted(row["end_s"] for row in rows)
    recent = timer.recent_rows(0)
    assert len(recent) == RECENT_STEPS and recent[-1] == {
        **rows[-1],
        "steps": 1,
        "mean_s": 0.002,
        "max_s": 0.002,
    }
    assert StepTimer().history_rows(0) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "no state of a session"),
        ({"version": 2}, "version 2, and this gradlane reads version 1"),
        ({"version": "1" * 1000}, "version 1{20},"),
        ({"step": 1.5}, "state.step is no int"),
        ({"step": True}, "state.step is no int"),
        ({"is_stalled": 1}, "state.is_stalled is no bool"),
        ({"layers": {}}, "state.layers is no list"),
        ({"layers": [{"model": 1}]}, r"state.layers\[0\] lacks 'name'"),
        ({"ranks": ["0"]}, r"state.ranks\[0\] is no object"),
        ({"wait": 3}, "state.wait is no object"),
        ({"ending": None}, "state.ending is no str"),
    ],
)
def test_what_is_no_state_is_refused_by_name(
    source: FakeSource, change: dict[str, object], message: str
) -> None:
    state: dict[str, object] = {**source.view.state()}
    assert read_state(dumps({**state, "more": 1}))["step"] == 20
    with pytest.raises(FormatError, match=message):
        read_state(dumps({**state, **change}))


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"{}", b"[" * 100_000, b"\xff", b"NaN"])
def test_what_is_no_json_object_is_refused(content: bytes) -> None:
    with pytest.raises(FormatError):
        read_state(content)
