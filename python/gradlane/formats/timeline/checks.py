"""Checks of a timeline file: the structure of trace events, and gradlane's own fields."""

from __future__ import annotations

import math
from typing import Any

from gradlane.formats.timeline.spans import FRAME_ARGUMENTS, LANES, RECEIVED, SENT


def check_events(content: Any) -> None:
    """Check a file's content, from one simulated or one recorded run.

    Spans are complete events in a named lane, sorted by time, and nest within a thread; frames
    have all arguments.

    Raises:
        ValueError: an event is invalid; the text names it.
    """
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list):
        raise ValueError("traceEvents is missing or no list")
    lanes: dict[tuple[int, int], str] = {}
    open_until: dict[tuple[int, int], list[float]] = {}
    latest = -math.inf
    for number, event in enumerate(events):
        where = f"event {number}"
        if not isinstance(event, dict):
            raise ValueError(f"{where} is no object")
        _check_fields(event, where)
        thread = (event["pid"], event.get("tid", 0))
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                lanes[thread] = event["args"]["name"]
            continue
        if event["ts"] < latest:
            raise ValueError(f"{where} is before the one before it")
        latest = event["ts"]
        if event["ph"] == "X":
            _check_span(event, lanes.get(thread), where)
            _check_nesting(event, open_until.setdefault(thread, []), where)


def _check_fields(event: dict[str, Any], where: str) -> None:
    kinds = {"M": (), "X": ("ts", "dur", "tid"), "C": ("ts",)}
    if event.get("ph") not in kinds:
        raise ValueError(
            f"{where} has phase {event.get('ph')!r}; expected one of {', '.join(kinds)}"
        )
    for name in ("pid", *kinds[event["ph"]]):
        value = event.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{where} has no number {name!r}")
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{where} has {name} {value}")
    if not isinstance(event.get("name"), str) or not isinstance(event.get("args"), dict):
        raise ValueError(f"{where} lacks name or args")


def _check_span(event: dict[str, Any], thread_name: str | None, where: str) -> None:
    lane = event.get("cat")
    if lane not in LANES:
        raise ValueError(f"{where} is in lane {lane!r}; there are {', '.join(LANES)}")
    if thread_name is None or thread_name.split(" (")[0] != lane:
        raise ValueError(f"{where} of lane {lane!r} is in a thread named {thread_name!r}")
    wanted = FRAME_ARGUMENTS if lane in (*SENT, *RECEIVED) else {"step"}
    missing = sorted(wanted - set(event["args"]))
    if missing:
        raise ValueError(f"{where} in lane {lane!r} lacks the arguments {', '.join(missing)}")


def _check_nesting(event: dict[str, Any], ends: list[float], where: str) -> None:
    # A nanosecond, the resolution, is a thousandth here.
    begin, end = event["ts"], event["ts"] + event["dur"]
    while ends and ends[-1] <= begin + 5e-4:
        ends.pop()
    if ends and end > ends[-1] + 5e-4:
        raise ValueError(f"{where} begins inside another span of its thread and ends after it")
    ends.append(end)
