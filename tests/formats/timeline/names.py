"""Names of what the rows of a timeline are about."""

from __future__ import annotations

from collections.abc import Iterable

from gradlane.formats.timeline.spans import Span


def named(spans: Iterable[Span]) -> set[str]:
    """Return the names of all tensors that spans are about, also of those that travel together."""
    return {name for span in spans for name in span.arguments.get("tensors", [span.name])}
