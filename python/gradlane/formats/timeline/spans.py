"""The data of a timeline: spans of time in the lanes of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

LANES = (
    "forward",
    "backward",
    "wait",
    "encode",
    "push",
    "broadcast",
    "reduce",
    "decode",
    "rebuild",
    "update",
    "control",
    "receive",
)
"""Lanes of a rank, top to bottom.

`forward` and `backward` compute; in `wait` forward waits for a tensor; `encode` encodes gradients;
`push` has gradients on their way to their servers, `broadcast` results on their way back; `reduce`
has sums on this server, which of encoded gradients include decoding them and encoding the result;
`decode` decodes results, `rebuild` makes gradients of factors; `update` is the optimizer; `control`
has notices and pulls, `receive` all arrivals.
"""
SENT = ("push", "broadcast", "control")
"""Lanes of sent frames."""
RECEIVED = ("receive",)
"""Lanes of received frames."""
FRAME_ARGUMENTS = frozenset({"tensor", "slice", "bytes", "priority", "peer", "step", "kind"})
"""Arguments of every frame."""


@dataclass(frozen=True, slots=True)
class Span:
    """An interval on a rank."""

    rank: int
    lane: str
    """A lane of `LANES`."""
    name: str
    """For readers: the tensor, or the step."""
    begin_ns: int
    end_ns: int
    arguments: dict[str, Any]
    """`step`; for tensors `tensor`; for frames all of `FRAME_ARGUMENTS`, with `bytes` on the wire,
    headers included; for updates of clipped gradients `clip_factor`."""


@dataclass(frozen=True)
class Timeline:
    """The spans of all ranks."""

    spans: Sequence[Span]
    """In any order."""
    source: str
    """`simulated` or `recorded`."""
    dropped: int = 0
    """Number of spans that were dropped for lack of room."""
    rate_bps: float | None = None
    """Rate of every port in each direction; None if unknown."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Model, strategy and further facts."""
    notes: Sequence[str] = ()
    """Notes for the reader, such as the alignment of clocks."""
    machines: dict[int, str] = field(default_factory=dict)
    """Name of the machine whose clock stamped a rank's spans, by rank; recorded ones only."""

    def stretched(self, factor: float) -> Timeline:
        """Return the timeline with all times multiplied; the rate follows."""
        spans = [
            replace(
                span, begin_ns=round(span.begin_ns * factor), end_ns=round(span.end_ns * factor)
            )
            for span in self.spans
        ]
        rate_bps = None if self.rate_bps is None else self.rate_bps / factor
        return replace(self, spans=spans, rate_bps=rate_bps)
