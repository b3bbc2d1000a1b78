"""The file format: what is written can be read, nests, and says how busy ports were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradlane.formats.timeline.checks import check_events
from gradlane.formats.timeline.chrome import read_chrome, to_chrome, write_chrome
from gradlane.formats.timeline.spans import LANES, Span, Timeline

FRAME = {"tensor": "w", "slice": 0, "bytes": 1000, "priority": 0, "peer": 1, "kind": "push"}


def span(lane: str, begin_ns: int, end_ns: int, rank: int = 0, **arguments: Any) -> Span:
    frame = FRAME if lane in ("push", "broadcast", "control", "receive") else {}
    return Span(rank, lane, "w", begin_ns, end_ns, {"step": 1, **frame, **arguments})


spans = st.builds(
    lambda lane, begin, length, rank: span(lane, begin, begin + length, rank),
    st.sampled_from(LANES),
    st.integers(0, 10_000),
    st.integers(0, 5_000),
    st.integers(0, 3),
)


@given(st.lists(spans, max_size=60))
def test_any_spans_make_a_file_that_viewers_open(found: list[Span]) -> None:
    content = to_chrome(Timeline(found, "simulated"))
    check_events(json.loads(json.dumps(content)))
    events = [event for event in content["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(found)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    timeline = Timeline(
        [span("push", 1_000_000_123, 1_000_002_456), span("forward", 1_000_000_000, 1_000_500_000)],
        "recorded",
        dropped=7,
        rate_bps=1e9,
        facts={"model": "small"},
        notes=("a note",),
        machines={0: "here"},
    )
    for name in ("trace.json", "trace.json.gz"):
        write_chrome(timeline, tmp_path / name)
        found = read_chrome(tmp_path / name)
        assert sorted(found.spans, key=lambda it: it.begin_ns) == sorted(
            timeline.spans, key=lambda it: it.begin_ns
        )
        assert (found.dropped, found.rate_bps, found.facts) == (7, 1e9, {"model": "small"})
        assert (found.notes, found.machines) == (("a note",), {0: "here"})


def test_overlapping_spans_of_a_lane_get_rows_of_their_own() -> None:
    content = to_chrome(
        Timeline([span("push", 0, 100), span("push", 50, 150), span("push", 100, 120)], "recorded")
    )
    events = {event["ts"]: event["tid"] for event in content["traceEvents"] if event["ph"] == "X"}
    assert events[0.0] == events[0.1] != events[0.05]
    names = {
        event["args"]["name"] for event in content["traceEvents"] if event["name"] == "thread_name"
    }
    assert names == {"push", "push (2)"}


def test_counters_have_all_bytes_and_the_share_of_the_port() -> None:
    # 1,000,000 bytes in 8 ms are 1 Gbit/s; received half as fast.
    timeline = Timeline(
        [
            span("push", 0, 8_000_000, bytes=1_000_000),
            span("receive", 0, 16_000_000, bytes=1_000_000),
        ],
        "simulated",
        rate_bps=2e9,
    )
    counters = [event for event in to_chrome(timeline)["traceEvents"] if event["ph"] == "C"]
    shares = [event["args"] for event in counters if event["name"] == "port, %"]
    assert {share["out"] for share in shares} == {50.0, 0.0}
    assert {share["in"] for share in shares} == {25.0}
    rates = [event["args"] for event in counters if event["name"] == "port, Mbit/s"]
    assert sum(rate["out"] for rate in rates) * 0.5e-3 / 8 == pytest.approx(1.0)
    without = to_chrome(Timeline(timeline.spans, "recorded"))["traceEvents"]
    assert not [event for event in without if event["name"] == "port, %"]


def test_stretched_times_and_rate_belong_together() -> None:
    timeline = Timeline([span("push", 100, 300)], "recorded", rate_bps=1e9).stretched(0.1)
    assert (timeline.spans[0].begin_ns, timeline.spans[0].end_ns) == (10, 30)
    assert timeline.rate_bps == pytest.approx(1e10)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ph": "B"}, "phase"),
        ({"ts": -1.0}, "ts"),
        ({"dur": None}, "dur"),
        ({"cat": "sideways"}, "sideways"),
        ({"tid": 77}, "thread"),
        ({"args": {"step": 1}}, "bytes"),
        ({"args": None}, "args"),
        ({"ts": 1e9}, "before"),
    ],
)
def test_files_that_viewers_would_not_open_are_found(change: dict[str, Any], named: str) -> None:
    content = to_chrome(Timeline([span("push", 0, 100), span("push", 50, 150)], "recorded"))
    check_events(content)
    first = next(event for event in content["traceEvents"] if event["ph"] == "X")
    first.update(change)
    with pytest.raises(ValueError, match=named):
        check_events(content)


def test_spans_that_do_not_nest_are_found() -> None:
    content = to_chrome(Timeline([span("push", 0, 100), span("push", 50, 150)], "recorded"))
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            event["tid"] = 1 + 1000 * LANES.index("push")
    with pytest.raises(ValueError, match="inside another"):
        check_events(content)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"otherData": {"format": "gradlane-timeline", "version": 9}}', "[" * 9],
)
def test_other_files_are_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json"):
        read_chrome(path)
    with pytest.raises(ValueError, match=r"absent\.json"):
        read_chrome(tmp_path / "absent.json")


def test_a_lane_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="sideways"):
        to_chrome(Timeline([span("sideways", 0, 1)], "recorded"))
