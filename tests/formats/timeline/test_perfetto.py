"""Timelines in Perfetto: no import errors, and every span in its lane."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from gradlane.formats.timeline.chrome import to_chrome, write_chrome
from gradlane.formats.timeline.merge import merge
from gradlane.formats.timeline.spans import SENT, Timeline
from gradlane.planning.simulation.scenarios import Cluster
from tests.formats.timeline.perfetto import ask_perfetto, needs_perfetto
from tests.formats.timeline.test_chrome import span
from tests.formats.timeline.test_recorded import recorded
from tests.formats.timeline.test_simulated import simulated

COMPLAINTS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
SPANS = (
    "select process.name, thread.name, count(*), sum(dur) from slice "
    "join thread_track on slice.track_id = thread_track.id join thread using (utid) "
    "join process using (upid) group by process.name, thread.name"
)
MISPLACED = "select count(*) from slice where depth > 0"
BYTES_SENT = (
    "select sum(extract_arg(arg_set_id, 'args.bytes')) from slice "
    f"where category in ({', '.join(repr(lane) for lane in SENT)})"
)
COUNTERS = (
    "select process_counter_track.name, max(value) from counter "
    "join process_counter_track on counter.track_id = process_counter_track.id "
    "group by process_counter_track.name"
)
OVERLAPS = (
    "select count(*) from slice as encoding join slice as sending "
    "on encoding.ts < sending.ts + sending.dur and sending.ts < encoding.ts + encoding.dur "
    "where encoding.category = 'encode' and sending.category = 'push' "
    "and extract_arg(encoding.arg_set_id, 'args.slice') "
    "!= extract_arg(sending.arg_set_id, 'args.slice')"
)
SORTED = "select process.name from process where upid > 0 and name like 'rank %' order by pid"


def expected_spans(timeline: Timeline) -> tuple[Counter[tuple[str, str]], int]:
    """Return the number of spans and their total ns, by rank and lane."""
    events = to_chrome(timeline)["traceEvents"]
    names = {
        (one["pid"], one["tid"]): one["args"]["name"]
        for one in events
        if one["name"] == "thread_name"
    }
    spans = [one for one in events if one["ph"] == "X"]
    found = Counter((f"rank {one['pid'] - 1}", names[one["pid"], one["tid"]]) for one in spans)
    return found, sum(round(one["dur"] * 1e3) for one in spans)


@needs_perfetto
@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("simulated", "trace.json"),
        ("simulated", "trace.json.gz"),
        ("encoded", "trace.json"),
        ("recorded", "trace.json"),
        ("overlapping", "trace.json"),
    ],
)
def test_perfetto_opens_a_timeline(source: str, name: str, tmp_path: Path) -> None:
    if source == "simulated":
        timeline, _ = simulated(Cluster(3, 1e9, "p3"))
    elif source == "encoded":
        timeline, _ = simulated(Cluster(3, 1e9, "p3", codec="qsgd:bits=8", slice_elems=25_000))
    elif source == "overlapping":
        timeline = Timeline([span("push", 1000 * at, 1000 * at + 2500) for at in range(9)], "made")
    else:
        timeline = merge(recorded(tmp_path))
    write_chrome(timeline, tmp_path / name)
    queries = [COMPLAINTS, SPANS, MISPLACED, BYTES_SENT, COUNTERS, SORTED, OVERLAPS]
    complaints, spans, misplaced, sent, counters, ranks, overlaps = ask_perfetto(
        tmp_path / name, queries, tmp_path
    )
    assert complaints == []
    expected, length_ns = expected_spans(timeline)
    assert {(rank, lane): count for rank, lane, count, _ in spans} == dict(expected)
    assert sum(lasting for *_, lasting in spans) == length_ns
    # Spans that overlap stand in lanes of their own, so none hangs below another.
    assert misplaced == [[0]]
    bytes_sent = sum(span.arguments["bytes"] for span in timeline.spans if span.lane in SENT)
    assert sent == [[bytes_sent]]
    assert max(value for _, value in counters) > 0
    assert {counter.partition(",")[0] for counter, _ in counters} == {"port"}
    # Double buffering, as a viewer shows it: a slice is encoded while another one is sent.
    assert (overlaps[0][0] > 0) == (source == "encoded")
    assert ranks == [[f"rank {rank}"] for rank in sorted({span.rank for span in timeline.spans})]
