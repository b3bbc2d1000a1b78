"""A step of one rank, reduced for a page: indistinguishable spans become one bar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradlane.formats.timeline.spans import LANES, Span, Timeline

WIDTHS = 600
"""Approximate width of a step on a page, in points; narrower spans cannot be seen."""


@dataclass(frozen=True)
class Bar:
    """Spans that are drawn as one."""

    begin_s: float
    """Since the begin of the step."""
    length_s: float
    tensor: int | None
    """Number of the tensor with the largest part."""
    size_bytes: int
    """Of all its frames."""
    spans: int
    """Number of its spans."""
    covered: float
    """Share of its length with activity, above 0 to 1."""


@dataclass(frozen=True)
class StepView:
    """A step: from the begin of backward to the end of the next forward."""

    step: int
    length_s: float
    resolution_s: float
    """Spans closer than this are drawn as one."""
    lanes: Mapping[str, Sequence[Bar]]
    """Bars in the order of time, for lanes that have any."""
    shares: Mapping[str, float]
    """Share of the step with activity in a lane; the port's own is `port`."""


def view_of_step(timeline: Timeline, rank: int, tensors: Mapping[str, int]) -> StepView | None:
    """Return a rank's last whole step.

    Args:
        timeline: a run of two steps or more, step 1 the first.
        rank: of the step.
        tensors: their numbers by name.

    Returns:
        The step, or None if the timeline has no whole step.
    """
    own = [span for span in timeline.spans if span.rank == rank]
    ends: dict[int, int] = {}
    for span in own:
        if span.lane == "forward":
            step = span.arguments["step"]
            ends[step] = max(ends.get(step, 0), span.end_ns)
    # The forward that follows the last step belongs to it, and what it sends may be cut off.
    whole = [step for step in ends if step + 1 in ends and step + 2 in ends] or [
        step for step in ends if step + 1 in ends
    ]
    if not whole:
        return None
    step = max(whole)
    begin_ns, end_ns = ends[step], ends[step + 1]
    resolution_ns = max(1, (end_ns - begin_ns) // WIDTHS)
    lanes, shares = {}, {}
    for lane in LANES:
        inside = _inside([span for span in own if span.lane == lane], begin_ns, end_ns)
        if inside:
            lanes[lane] = _bars(inside, begin_ns, resolution_ns, tensors)
            shares[lane] = _covered_ns(inside) / (end_ns - begin_ns)
    port = [span for span in own if span.lane in ("push", "broadcast", "control")]
    shares["port"] = _covered_ns(_inside(port, begin_ns, end_ns)) / (end_ns - begin_ns)
    return StepView(step, (end_ns - begin_ns) / 1e9, resolution_ns / 1e9, lanes, shares)


def _inside(spans: Sequence[Span], begin_ns: int, end_ns: int) -> list[tuple[int, int, Span]]:
    """Return what of the spans is between two times, in order."""
    cut = [(max(it.begin_ns, begin_ns), min(it.end_ns, end_ns), it) for it in spans]
    return sorted((it for it in cut if it[1] > it[0]), key=lambda it: it[:2])


def _covered_ns(inside: Sequence[tuple[int, int, Span]]) -> int:
    covered, until = 0, 0
    for begin_ns, end_ns, _ in inside:
        covered += max(0, end_ns - max(begin_ns, until))
        until = max(until, end_ns)
    return covered


def _bars(
    inside: Sequence[tuple[int, int, Span]],
    origin_ns: int,
    resolution_ns: int,
    tensors: Mapping[str, int],
) -> list[Bar]:
    bars: list[Bar] = []
    group: list[tuple[int, int, Span]] = []
    for piece in inside:
        if group and not _is_joined(group, piece, resolution_ns):
            bars.append(_bar(group, origin_ns, tensors))
            group = []
        group.append(piece)
    return [*bars, _bar(group, origin_ns, tensors)]


def _is_joined(
    group: Sequence[tuple[int, int, Span]], piece: tuple[int, int, Span], resolution_ns: int
) -> bool:
    """Return whether a span is drawn as one with the previous ones."""
    begin_ns, end_ns, span = piece
    last_end_ns, last = group[-1][1], group[-1][2]
    if begin_ns - last_end_ns > resolution_ns:
        return False
    same = span.arguments.get("tensor") == last.arguments.get("tensor")
    # Of several tensors only while all of them together are too narrow to be seen.
    return same or end_ns - group[0][0] <= resolution_ns


def _bar(group: Sequence[tuple[int, int, Span]], origin_ns: int, tensors: Mapping[str, int]) -> Bar:
    lengths: dict[str | None, int] = {}
    for begin_ns, end_ns, span in group:
        name = span.arguments.get("tensor")
        lengths[name] = lengths.get(name, 0) + end_ns - begin_ns
    longest = max(lengths, key=lambda name: lengths[name])
    begin_ns, end_ns = group[0][0], max(end_ns for _, end_ns, _ in group)
    return Bar(
        begin_s=(begin_ns - origin_ns) / 1e9,
        length_s=(end_ns - begin_ns) / 1e9,
        tensor=None if longest is None else tensors.get(longest),
        size_bytes=sum(span.arguments.get("bytes", 0) for _, _, span in group),
        spans=len(group),
        covered=min(1.0, _covered_ns(group) / max(1, end_ns - begin_ns)),
    )
