"""Urgency in traces of frames: how soon an urgent slice left, and what left before it.

Pure arithmetic on rows of `session.monitoring.take_trace`. Only order is compared within one rank's
trace; times of different ranks are compared where one machine's clock stamped them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TraceRow = tuple[int, str, int, int, int, int, int, int]
"""(time in ns, "tx" or "rx", kind, peer, step, tensor, slice, priority), as the core returns it."""

PUSH = 1
BROADCAST = 2
_SATURATED_NS = 5_000_000
_NS_PER_MS = 1e6


@dataclass(frozen=True)
class UrgentSlice:
    """One urgent slice on its way from one rank to one other.

    Attributes:
        direction: `push` (a gradient to its server) or `reply` (the server's mean to a worker).
        step: the step.
        tensor: number of the urgent tensor.
        rank: who sent it.
        peer: to whom.
        frames: of the slice.
        first_left_ms: from ready to the first frame in the kernel's hands.
        last_left_ms: from ready to the last one in the kernel's hands.
        received_ms: from ready to the last one checked on the other side; None if not traced.
        less_urgent_same_peer: less urgent frames to the same rank between ready and first frame.
        less_urgent_any_peer: the same for frames to any rank.
        less_urgent_within: less urgent frames to the same rank between first and last frame.
        less_urgent_until_last: less urgent frames to any rank between ready and last frame; those
            to other ranks may go while the urgent one's own connection takes no more.
        saturated: whether less urgent frames left shortly before ready and after the last frame.
    """

    direction: str
    step: int
    tensor: int
    rank: int
    peer: int
    frames: int
    first_left_ms: float
    last_left_ms: float
    received_ms: float | None
    less_urgent_same_peer: int
    less_urgent_any_peer: int
    less_urgent_within: int
    less_urgent_until_last: int
    saturated: bool


def urgent_slices(
    traces: Sequence[Sequence[TraceRow]], ready_ns: Sequence[Sequence[tuple[int, int, int, int]]]
) -> list[UrgentSlice]:
    """Find every urgent slice in the ranks' traces.

    Args:
        traces: one a rank, each in the order of its time.
        ready_ns: one a rank; rows (step, tensor, time before `gradient_ready`, time after it).

    Returns:
        Pushes (from before the call to the frames; the order is counted from after the call) and
        replies (from the last push at the server, which the reduction follows).
    """
    found: list[UrgentSlice] = []
    for rank, rows in enumerate(ready_ns):
        for step, tensor, before_ns, after_ns in rows:
            in_step = [[row for row in trace if row[4] == step] for trace in traces]
            own = in_step[rank]
            pushed = _frames(own, "tx", PUSH, tensor)
            gathered = _frames(own, "rx", PUSH, tensor)
            complete_ns = max([before_ns, *(times[-1] for times in gathered.values())])
            ways = [
                ("push", PUSH, pushed, before_ns, after_ns),
                (
                    "reply",
                    BROADCAST,
                    _frames(own, "tx", BROADCAST, tensor),
                    complete_ns,
                    complete_ns,
                ),
            ]
            for direction, kind, frames, start_ns, ordered_ns in ways:
                for peer in frames:
                    arrived = _frames(in_step[peer], "rx", kind, tensor).get(rank)
                    found.append(
                        _slice(
                            direction,
                            kind,
                            (step, tensor, rank, peer),
                            own,
                            (start_ns, ordered_ns),
                            arrived,
                        )
                    )
    return found


def _frames(trace: Sequence[TraceRow], way: str, kind: int, tensor: int) -> dict[int, list[int]]:
    """Return the times of a tensor's frames by peer."""
    times_ns: dict[int, list[int]] = {}
    for row in trace:
        if row[1] == way and row[2] == kind and row[5] == tensor:
            times_ns.setdefault(row[3], []).append(row[0])
    return times_ns


def _slice(
    direction: str,
    kind: int,
    place: tuple[int, int, int, int],
    trace: Sequence[TraceRow],
    since_ns: tuple[int, int],
    arrived_ns: Sequence[int] | None,
) -> UrgentSlice:
    """Return one slice's way.

    Args:
        direction: as in the result.
        kind: kind of its frames.
        place: step, tensor, rank, peer.
        trace: the rank's rows of that step.
        since_ns: when waiting begins, and from when on the order is counted.
        arrived_ns: times of its frames at the peer.
    """
    step, tensor, rank, peer = place
    ready_ns, ordered_from_ns = since_ns
    sent = [row for row in trace if row[1] == "tx" and row[2] in (PUSH, BROADCAST)]
    own = [
        index
        for index, row in enumerate(sent)
        if row[2] == kind and row[3] == peer and row[5] == tensor
    ]
    first, last = own[0], own[-1]
    first_ns, last_ns = sent[first][0], sent[last][0]
    others = [(row[0], row[3], index) for index, row in enumerate(sent) if row[7] < sent[first][7]]
    since = [(to, index) for time_ns, to, index in others if time_ns > ordered_from_ns]
    ahead = [to for to, index in since if index < first]
    until_last = [to for to, index in since if index < last]
    within = [to for _, to, index in others if first < index < last and to == peer]
    busy_before = any(ready_ns - _SATURATED_NS <= time_ns <= ready_ns for time_ns, *_ in others)
    busy_after = any(last_ns < time_ns <= last_ns + _SATURATED_NS for time_ns, *_ in others)
    return UrgentSlice(
        direction=direction,
        step=step,
        tensor=tensor,
        rank=rank,
        peer=peer,
        frames=len(own),
        first_left_ms=(first_ns - ready_ns) / _NS_PER_MS,
        last_left_ms=(last_ns - ready_ns) / _NS_PER_MS,
        received_ms=(arrived_ns[-1] - ready_ns) / _NS_PER_MS if arrived_ns else None,
        less_urgent_same_peer=ahead.count(peer),
        less_urgent_any_peer=len(ahead),
        less_urgent_within=len(within),
        less_urgent_until_last=len(until_last),
        saturated=busy_before and busy_after,
    )
