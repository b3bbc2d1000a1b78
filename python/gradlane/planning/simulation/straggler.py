"""The specification of a slow rank, which the lab stops and the simulator models."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from gradlane.formats.durations import parse_duration_s

BURST_S = 0.5
"""Default length of a stop, in seconds."""


@dataclass(frozen=True)
class StragglerSpec:
    """The rank that is stopped, and for how long.

    Attributes:
        rank: of the stops.
        share: of the time in which it is stopped.
        burst_s: real seconds of each stop; it runs `burst_s / share - burst_s` between two.
    """

    rank: int
    share: float
    burst_s: float = BURST_S

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)


def parse_straggler(text: str) -> StragglerSpec:
    """Parse a text such as `rank=3,share=0.1,burst=0.5s`.

    Raises:
        ValueError: a part is missing, unknown or out of range, or the burst has no unit.
    """
    parts = dict(part.partition("=")[::2] for part in text.replace(" ", "").split(","))
    usage = "it is written rank=3,share=0.1 or rank=3,share=0.1,burst=500ms (length of a stop)"
    if not {"rank", "share"} <= set(parts) <= {"rank", "share", "burst"}:
        raise ValueError(f"straggler is {text!r}; {usage}")
    burst_s = parse_duration_s(parts["burst"]) if "burst" in parts else BURST_S
    try:
        spec = StragglerSpec(int(parts["rank"]), float(parts["share"]), burst_s)
    except ValueError:
        raise ValueError(f"straggler is {text!r}; {usage}") from None
    if spec.rank < 0 or not 0 < spec.share < 1 or not 0.001 <= spec.burst_s <= 20:
        raise ValueError(
            f"straggler is {text!r}; rank is 0 or more, share between 0 and 1, burst 0.001 to 20 s"
        )
    return spec
