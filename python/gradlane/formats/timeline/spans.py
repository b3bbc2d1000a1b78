"""What a timeline is: spans of time in lanes, a process a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

LANES = (
    "forward",
    "backward",
    "wait",
    "push",
    "broadcast",
    "reduce",
    "update",
    "control",
    "receive",
)
"""Lanes of a rank, top to bottom.

`forward` and `backward` compute, in `wait` forward waits for a tensor, `push` has gradients on
their way to their servers, `broadcast` results on their way back, `reduce` sums on this server,
`update` the optimizer, `control` notices and pulls, `receive` all that arrives."""
SENT = ("push", "broadcast", "control")
"""Lanes of what leaves a port."""
RECEIVED = ("receive",)
"""Lanes of what comes to it."""
FRAME_ARGUMENTS = frozenset({"tensor", "slice", "bytes", "priority", "peer", "step", "kind"})
"""Arguments of everything in the lanes of what leaves and comes."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time on a rank."""

    rank: int
    lane: str
    """One of `LANES`."""
    name: str
    """For people: the tensor, or the step."""
    begin_ns: int
    end_ns: int
    arguments: dict[str, Any]
    """`step`, and for tensors `tensor`, for frames all of `FRAME_ARGUMENTS`; `bytes` with headers,
    as they travel."""


@dataclass(frozen=True)
class Timeline:
    """What ranks did when."""

    spans: Sequence[Span]
    """In any order."""
    source: str
    """`simulated` or `recorded`."""
    dropped: int = 0
    """Spans that were not kept, because there were too many."""
    rate_bps: float | None = None
    """Rate of every port in each direction; None where it is not known."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else belongs to it: model, strategy and the like."""
    notes: Sequence[str] = ()
    """What a reader should know, such as how clocks were aligned."""
    machines: dict[int, str] = field(default_factory=dict)
    """For each rank a name of the machine whose clock stamped its spans; recorded ones only."""

    def stretched(self, factor: float) -> Timeline:
        """Return it with all times multiplied; the rate follows."""
        spans = [
            replace(
                span, begin_ns=round(span.begin_ns * factor), end_ns=round(span.end_ns * factor)
            )
            for span in self.spans
        ]
        rate_bps = None if self.rate_bps is None else self.rate_bps / factor
        return replace(self, spans=spans, rate_bps=rate_bps)
