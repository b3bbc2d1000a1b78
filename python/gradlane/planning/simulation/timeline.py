"""Timelines of simulated runs, from the trace that the compiled core returns."""

from __future__ import annotations

from typing import Any

from gradlane.formats.timeline.spans import Span, Timeline

_FIELDS = ("slice", "kind", "peer", "bytes", "priority")


def simulated_timeline(
    trace: dict[str, Any],
    *,
    rate_bps: float,
    compression: float = 1.0,
    facts: dict[str, Any] | None = None,
) -> Timeline:
    """Return the timeline of a simulated run.

    Args:
        trace: `columns`, `lanes`, `tensors`, `spans` and `dropped`, as the core returns them.
        rate_bps: rate of every port.
        compression: bytes of a gradient over bytes that travel; the core simulates all bytes over
            a link that is faster by as much.
        facts: what belongs to the file.
    """
    columns = {name: number for number, name in enumerate(trace["columns"])}
    lanes, tensors = trace["lanes"], trace["tensors"]
    spans = []
    for row in trace["spans"]:
        step = row[columns["step"]]
        arguments: dict[str, Any] = {"step": step}
        name = f"step {step}"
        tensor = row[columns["tensor"]]
        if tensor is not None:
            name = arguments["tensor"] = tensors[tensor]
        for field in _FIELDS:
            value = row[columns[field]]
            if value is not None:
                arguments[field] = value
        lane = lanes[row[columns["lane"]]]
        if "bytes" in arguments and "kind" in arguments:
            arguments["bytes"] = round(arguments["bytes"] / compression)
        spans.append(
            Span(
                rank=row[columns["rank"]],
                lane=lane,
                name=name,
                begin_ns=row[columns["begin_ns"]],
                end_ns=row[columns["end_ns"]],
                arguments=arguments,
            )
        )
    notes = ["simulated: a frame's span is the time in which it occupies the port"]
    if trace["dropped"]:
        notes.append(f"{trace['dropped']} spans at the end were not kept, there were too many")
    return Timeline(
        spans=spans,
        source="simulated",
        dropped=trace["dropped"],
        rate_bps=rate_bps,
        facts=facts or {},
        notes=notes,
    )
