"""Joining of the ranks' timelines into one, with aligned clocks.

Ranks on one machine share its monotonic clock. Clocks of two machines are compared by frames: the
least delays in both directions are assumed to be equal, as in network time protocols. Of frames
that follow one another without a pause only the first one counts. Its begin is when it was chosen,
certainly before a byte of it left, while the end of a frame and the begin of the next are read
after the kernel took it, late if the thread lost its processor. So no delay is negative, and the
timeline's error figure is a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradlane.formats.timeline.spans import SENT, Span, Timeline

_Key = tuple[object, ...]


def merge(timelines: Sequence[Timeline]) -> Timeline:
    """Return one timeline of all ranks, in the time of the first rank's machine.

    Raises:
        ValueError: a rank is there twice, a timeline is simulated, or machines have no frames in
            common in both directions.
    """
    machines: dict[int, str] = {}
    spans: list[Span] = []
    notes: dict[str, None] = {}
    for timeline in timelines:
        if timeline.source != "recorded":
            raise ValueError(f"only recorded timelines are joined, and one is {timeline.source}")
        twice = sorted(set(machines) & set(timeline.machines))
        if twice:
            raise ValueError(f"rank {twice[0]} is in two of the timelines")
        machines.update(timeline.machines)
        spans += timeline.spans
        notes.update(dict.fromkeys(timeline.notes))
    if not machines:
        raise ValueError("there are no timelines to join")
    reference = machines[min(machines)]
    others = [name for name in dict.fromkeys(machines.values()) if name != reference]
    offsets_ns = {reference: 0}
    delays_ns = _least_delays_ns(timelines, machines) if others else {}
    for name in others:
        offsets_ns[name], within_ns = _offset(delays_ns, machines, reference, name)
        ranks = [rank for rank, machine in machines.items() if machine == name]
        text = f"clock of ranks {', '.join(map(str, ranks))} moved by {-offsets_ns[name] / 1e6:.3f}"
        notes[
            f"{text} ms, right within {within_ns / 1e6:.3f} ms, by the least delays of frames"
        ] = None
    if others:
        spans = [_shift(span, offsets_ns[machines[span.rank]]) for span in spans]
    else:
        notes["one clock: all ranks were on one machine"] = None
    first = timelines[0]
    return Timeline(
        spans=spans,
        source="recorded",
        dropped=sum(timeline.dropped for timeline in timelines),
        rate_bps=first.rate_bps,
        facts=first.facts,
        notes=tuple(notes),
        machines=machines,
    )


def _shift(span: Span, offset_ns: int) -> Span:
    return replace(span, begin_ns=span.begin_ns - offset_ns, end_ns=span.end_ns - offset_ns)


def _offset(
    delays_ns: dict[tuple[str, str], int], machines: dict[int, str], reference: str, other: str
) -> tuple[int, int]:
    """Return the lead of the other machine's clock, and the bound of its error."""
    there = delays_ns.get((reference, other))
    back = delays_ns.get((other, reference))
    if there is None or back is None:
        ranks = [
            min(rank for rank, machine in machines.items() if machine == name)
            for name in (reference, other)
        ]
        raise ValueError(
            f"the clocks of ranks {ranks[0]} and {ranks[1]} cannot be compared: their timelines "
            "have no frames in common in both directions; record the same steps on all ranks"
        )
    return (there - back) // 2, -(-(there + back) // 2)


def _least_delays_ns(
    timelines: Sequence[Timeline], machines: dict[int, str]
) -> dict[tuple[str, str], int]:
    """Return the least clock differences from before a frame's sending to its arrival.

    The keys are the machines of the sender and of the receiver.
    """
    began: dict[_Key, int] = {}
    seen: set[_Key] = set()
    for timeline in timelines:
        ends: dict[tuple[int, int], int] = {}
        sent = (span for span in timeline.spans if span.lane in SENT)
        for span in sorted(sent, key=lambda it: (it.begin_ns, it.end_ns)):
            path = (span.rank, span.arguments["peer"])
            # The predecessor of the first frame is unknown if spans were dropped.
            follows = timeline.dropped > 0 if path not in ends else span.begin_ns <= ends[path]
            key = _key(span, *path)
            if key in seen:
                # Arrivals of two equal frames cannot be distinguished.
                began.pop(key, None)
            elif not follows:
                began[key] = span.begin_ns
            seen.add(key)
            ends[path] = span.end_ns
    least: dict[tuple[str, str], int] = {}
    for span in (it for timeline in timelines for it in timeline.spans if it.lane == "receive"):
        sender, receiver = span.arguments["peer"], span.rank
        key = _key(span, sender, receiver)
        if key in began:
            ends_of = (machines[sender], machines[receiver])
            delay = span.end_ns - began[key]
            least[ends_of] = min(delay, least.get(ends_of, delay))
    return least


def _key(span: Span, sender: int, receiver: int) -> _Key:
    arguments = span.arguments
    slice_key = (arguments["step"], arguments["slice"], arguments.get("offset"))
    return (sender, receiver, arguments["kind"], *slice_key)
