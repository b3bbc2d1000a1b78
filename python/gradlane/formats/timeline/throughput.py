"""Rates through a port over time, from the spans of its frames."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gradlane.formats.timeline.spans import Span

INTERVAL_MIN_NS = 500_000
INTERVALS_MAX = 2000


def interval_ns_for(length_ns: int) -> int:
    """Return the width of the averaging intervals for a timeline of this length."""
    return max(INTERVAL_MIN_NS, -(-length_ns // INTERVALS_MAX))


def bits_per_second(
    spans: Iterable[Span], begin_ns: int, end_ns: int, interval_ns: int
) -> list[float]:
    """Return the mean rate in each interval, with a span's bytes spread evenly over it.

    Args:
        spans: of frames, each with `bytes`.
        begin_ns: begin of the first interval.
        end_ns: within the last interval.
        interval_ns: their width.
    """
    count = max(1, -(-(end_ns - begin_ns) // interval_ns))
    bits = [0.0] * count
    for from_ns, to_ns, bits_per_ns in _pieces(spans):
        at_ns = max(from_ns, begin_ns)
        last_ns = min(to_ns, begin_ns + count * interval_ns)
        while at_ns < last_ns:
            index = (at_ns - begin_ns) // interval_ns
            until_ns = min(last_ns, begin_ns + (index + 1) * interval_ns)
            bits[index] += bits_per_ns * (until_ns - at_ns)
            at_ns = until_ns
    return [value / interval_ns * 1e9 for value in bits]


def _pieces(spans: Iterable[Span]) -> Iterator[tuple[int, int, float]]:
    """Yield (from, to, bits a nanosecond) between changes of the passing spans."""
    changes: list[tuple[int, float]] = []
    for span in spans:
        end_ns = max(span.end_ns, span.begin_ns + 1)
        bits_per_ns = 8.0 * float(span.arguments["bytes"]) / (end_ns - span.begin_ns)
        changes += [(span.begin_ns, bits_per_ns), (end_ns, -bits_per_ns)]
    changes.sort()
    current, since_ns = 0.0, 0
    for time_ns, change in changes:
        if time_ns > since_ns and current > 1e-12:
            yield since_ns, time_ns, current
        current += change
        since_ns = time_ns
