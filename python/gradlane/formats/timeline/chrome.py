"""The file format: trace events that Perfetto and chrome://tracing open.

A rank is a process (number rank + 1: viewers take process 0 for the idle one). A lane is a thread,
or several if its spans overlap, since viewers want spans of a thread to nest. Times are
microseconds since `origin_ns`. Counters hold the traffic of each rank's port. Facts about the whole
file are under `otherData`.
"""

from __future__ import annotations

import gzip
import heapq
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gradlane.formats.timeline.checks import check_events
from gradlane.formats.timeline.spans import LANES, RECEIVED, SENT, Span, Timeline
from gradlane.formats.timeline.throughput import bits_per_second, interval_ns_for

FORMAT = "gradlane-timeline"
VERSION = 1
ROWS_PER_LANE = 1000
"""Thread numbers of a lane."""
Event = dict[str, Any]


def to_chrome(timeline: Timeline) -> dict[str, Any]:
    """Return the file's content.

    Raises:
        ValueError: a span's lane is none of `LANES`.
    """
    spans = sorted(timeline.spans, key=lambda it: (it.begin_ns, -it.end_ns, it.rank))
    origin_ns = spans[0].begin_ns if spans else 0
    end_ns = max((span.end_ns for span in spans), default=0)
    by_rank: dict[int, list[Span]] = {}
    for span in spans:
        if span.lane not in LANES:
            raise ValueError(f"lane {span.lane!r} is none of {', '.join(LANES)}")
        by_rank.setdefault(span.rank, []).append(span)
    names: list[Event] = []
    events: list[Event] = []
    for rank in sorted(by_rank):
        rows = _rows(by_rank[rank])
        names += _names(rank, sorted(set(rows)))
        for span, row in zip(by_rank[rank], rows, strict=True):
            events.append(
                {
                    "name": span.name,
                    "cat": span.lane,
                    "ph": "X",
                    "pid": rank + 1,
                    "tid": row,
                    "ts": (span.begin_ns - origin_ns) / 1e3,
                    "dur": (span.end_ns - span.begin_ns) / 1e3,
                    "args": span.arguments,
                }
            )
        events += _counters(rank, by_rank[rank], origin_ns, end_ns, timeline.rate_bps)
    events.sort(key=lambda it: (it["ts"], -it.get("dur", 0.0)))
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "format": FORMAT,
            "version": VERSION,
            "source": timeline.source,
            "dropped_spans": timeline.dropped,
            "rate_bps": timeline.rate_bps,
            "notes": list(timeline.notes),
            "facts": timeline.facts,
            "machines": {str(rank): name for rank, name in timeline.machines.items()},
            "origin_ns": origin_ns,
        },
        "traceEvents": [*names, *events],
    }


def write_chrome(timeline: Timeline, path: Path) -> None:
    """Write a file, compressed if its name ends in `.gz`, which viewers open, too."""
    text = json.dumps(to_chrome(timeline), separators=(",", ":"))
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")


def read_chrome(path: Path) -> Timeline:
    """Read a file of `write_chrome`.

    Raises:
        ValueError: the file cannot be read, or is no timeline; the text names the cause.
    """
    try:
        raw = path.read_bytes()
        content = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, EOFError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    about = content.get("otherData") if isinstance(content, dict) else None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError(f"{path} is no timeline of gradlane's")
    if about.get("version") != VERSION:
        raise ValueError(
            f"{path} is of version {about.get('version')}; this gradlane reads version {VERSION}"
        )
    try:
        check_events(content)
        origin_ns = int(about["origin_ns"])
        spans = [_span(event, origin_ns) for event in content["traceEvents"] if event["ph"] == "X"]
        return Timeline(
            spans=spans,
            source=str(about["source"]),
            dropped=int(about["dropped_spans"]),
            rate_bps=about["rate_bps"],
            facts=dict(about["facts"]),
            notes=tuple(about["notes"]),
            machines={int(rank): str(name) for rank, name in about["machines"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no whole timeline: {error}") from error


def _span(event: Event, origin_ns: int) -> Span:
    begin_ns = origin_ns + round(event["ts"] * 1e3)
    return Span(
        rank=event["pid"] - 1,
        lane=event["cat"],
        name=event["name"],
        begin_ns=begin_ns,
        end_ns=begin_ns + round(event["dur"] * 1e3),
        arguments=event["args"],
    )


def _rows(spans: Sequence[Span]) -> list[int]:
    """Return a thread for each span, in order of begin, so that no spans of a thread overlap."""
    free_rows: dict[str, list[int]] = {}
    busy_rows: dict[str, list[tuple[int, int]]] = {}
    used: dict[str, int] = {}
    rows: list[int] = []
    for span in spans:
        free, busy = free_rows.setdefault(span.lane, []), busy_rows.setdefault(span.lane, [])
        while busy and busy[0][0] <= span.begin_ns:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            row = heapq.heappop(free)
        else:
            # Spans beyond the last row are drawn over it.
            row = min(used.get(span.lane, 0), ROWS_PER_LANE - 1)
            used[span.lane] = used.get(span.lane, 0) + 1
        heapq.heappush(busy, (span.end_ns, row))
        rows.append(1 + LANES.index(span.lane) * ROWS_PER_LANE + row)
    return rows


def _names(rank: int, rows: Sequence[int]) -> Iterator[Event]:
    def named(kind: str, tid: int, arguments: dict[str, Any]) -> Event:
        return {"name": kind, "ph": "M", "pid": rank + 1, "tid": tid, "args": arguments}

    yield named("process_name", 0, {"name": f"rank {rank}"})
    yield named("process_sort_index", 0, {"sort_index": rank})
    for row in rows:
        lane, number = divmod(row - 1, ROWS_PER_LANE)
        name = LANES[lane] if number == 0 else f"{LANES[lane]} ({number + 1})"
        yield named("thread_name", row, {"name": name})
        yield named("thread_sort_index", row, {"sort_index": row})


def _counters(
    rank: int, spans: Sequence[Span], origin_ns: int, end_ns: int, rate_bps: float | None
) -> Iterator[Event]:
    """Yield the traffic of the port and, if its rate is known, its share."""
    interval_ns = interval_ns_for(end_ns - origin_ns)
    ways = {
        way: bits_per_second(
            (span for span in spans if span.lane in lanes), origin_ns, end_ns, interval_ns
        )
        for way, lanes in (("out", SENT), ("in", RECEIVED))
    }
    for index, (out_bps, in_bps) in enumerate(zip(ways["out"], ways["in"], strict=True)):
        common = {"cat": "port", "ph": "C", "pid": rank + 1, "ts": index * interval_ns / 1e3}
        yield {
            **common,
            "name": "port, Mbit/s",
            "args": {"out": round(out_bps / 1e6, 3), "in": round(in_bps / 1e6, 3)},
        }
        if rate_bps:
            shares = {"out": out_bps / rate_bps, "in": in_bps / rate_bps}
            yield {
                **common,
                "name": "port, %",
                "args": {way: round(100.0 * share, 2) for way, share in shares.items()},
            }
