"""Timelines of real runs, from the recordings of one rank."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradlane.formats.timeline.spans import Span, Timeline
from gradlane.training.core import CoreRow

_FRAME_LANES = {
    "push": "push",
    "block": "push",
    "broadcast": "broadcast",
    "ring-scale": "push",
    "ring-reduce": "push",
    "ring-gather": "broadcast",
}
"""Lanes of sent frames by kind; other kinds are in `control`."""
_SLICED = (*_FRAME_LANES, "notify", "pull")
"""Kinds of frames that concern a slice."""
_JOB_LANES = {"encode": "encode", "decode": "decode"}
"""Lanes of jobs by kind; other kinds are in `reduce`."""
_NAMES_MAX = 64
"""Most tensors that a row names."""
NOTES = (
    "recorded: what leaves is shown from when the engine chose it until the kernel had all of it, "
    "what arrives from its header to its last byte; counters spread bytes over that time",
)


@dataclass(frozen=True, slots=True)
class Mark:
    """An interval in the program's own threads."""

    lane: str
    """`forward`, `backward`, `wait` or `update`."""
    begin_ns: int
    end_ns: int
    step: int
    tensors: tuple[int, ...] = ()
    """Tensors that were waited for; empty: the whole step."""
    clip_factor: float | None = None
    """What gradients of an update were multiplied by, where some are clipped."""


@dataclass(frozen=True)
class ModelRecord:
    """All that was recorded of one model."""

    names: Sequence[str]
    """Names of tensors by their number."""
    members: Mapping[int, Sequence[str]]
    """Names of the gradients that travel together, by their group's number."""
    marks: Sequence[Mark]
    """The program's."""
    rows: Sequence[CoreRow]
    """The core's."""
    dropped: int
    """Number of marks and rows that were not kept."""


def recorded_timeline(rank: int, records: Iterable[ModelRecord], facts: dict[str, Any]) -> Timeline:
    """Return the timeline of one rank.

    Args:
        rank: the rank.
        records: one for each model.
        facts: for the file.
    """
    spans: list[Span] = []
    dropped = 0
    for record in records:
        dropped += record.dropped
        spans += _program_spans(rank, record)
        spans += _engine_spans(rank, record)
    notes = list(NOTES)
    if dropped:
        notes.append(f"rank {rank}: {dropped} spans at the beginning were not kept")
    return Timeline(
        spans=spans,
        source="recorded",
        dropped=dropped,
        facts=facts,
        notes=notes,
        machines={rank: host_boot_id()},
    )


def rank_path(path: Path, rank: int) -> Path:
    """Return the path of a rank's own file: `trace.json` becomes `trace.rank0.json`."""
    stem, _, suffixes = path.name.partition(".")
    return path.with_name(f"{stem}.rank{rank}.{suffixes or 'json'}")


def host_boot_id() -> str:
    """Return a name of the machine whose clock the times are from: that of its last boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def _program_spans(rank: int, record: ModelRecord) -> Iterator[Span]:
    """Yield the program's spans; waits and updates interrupt forward and backward."""
    breaks = sorted(
        (mark.begin_ns, mark.end_ns) for mark in record.marks if mark.lane in ("wait", "update")
    )
    for mark in record.marks:
        arguments: dict[str, Any] = {"step": mark.step}
        name = f"step {mark.step}"
        if mark.tensors:
            name = arguments["tensor"] = record.names[mark.tensors[0]]
            arguments |= _several(record, mark.tensors)
        if mark.clip_factor is not None:
            arguments["clip_factor"] = mark.clip_factor
        pieces = [(mark.begin_ns, mark.end_ns)]
        if mark.lane in ("forward", "backward"):
            pieces = list(_subtract_breaks(mark.begin_ns, mark.end_ns, breaks))
        for begin_ns, end_ns in pieces:
            yield Span(rank, mark.lane, name, begin_ns, end_ns, arguments)


def _several(record: ModelRecord, tensors: Iterable[int]) -> dict[str, Any]:
    """Return the argument that names what a row is about; none where it is one tensor."""
    named = (record.members.get(one, (record.names[one],)) for one in tensors)
    names = list(itertools.islice(itertools.chain.from_iterable(named), _NAMES_MAX))
    return {"tensors": names} if len(names) > 1 else {}


def _subtract_breaks(
    begin_ns: int, end_ns: int, breaks: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Yield the parts of an interval outside of the breaks, which are in order."""
    for break_begin_ns, break_end_ns in breaks:
        if break_end_ns <= begin_ns:
            continue
        if break_begin_ns >= end_ns:
            break
        if break_begin_ns > begin_ns:
            yield begin_ns, break_begin_ns
        begin_ns = max(begin_ns, break_end_ns)
    if begin_ns < end_ns:
        yield begin_ns, end_ns


def _engine_spans(rank: int, record: ModelRecord) -> Iterator[Span]:
    for (begin_ns, end_ns), way, kind, peer, step, position, size_bytes, priority in record.rows:
        tensor, slice_number, offset = position
        if kind == "heartbeat":
            continue
        lane = "receive"
        if way == "work":
            lane = _JOB_LANES.get(kind, "reduce")
        elif way == "tx":
            lane = _FRAME_LANES.get(kind, "control")
        about_slice = way == "work" or kind in _SLICED
        name = record.names[tensor] if about_slice else kind
        arguments = {
            "step": step,
            "tensor": name if about_slice else None,
            "slice": slice_number if about_slice else None,
            "kind": kind,
            "peer": peer,
            "bytes": size_bytes,
            "priority": priority,
        }
        if way != "work":
            arguments["offset"] = offset
        if about_slice:
            arguments |= _several(record, (tensor,))
        yield Span(rank, lane, name, begin_ns, end_ns, arguments)
