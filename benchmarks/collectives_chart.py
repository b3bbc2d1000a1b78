"""The plot of `benchmarks.collectives`: time over gradlane as a part of Gloo's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from html import escape
from typing import Any

from benchmarks.front_chart import line, text

COLORS = {
    "all_reduce": "#0969da",
    "all_gather": "#1a7f37",
    "reduce_scatter": "#9a6700",
    "all_to_all": "#8250df",
    "send_recv": "#cf222e",
}
"""By operation; readable on light and dark pages."""
INK, FAINT = "#6e7781", "#8c959f55"
TOP = 1.5
"""The highest quotient that is drawn; others stand at the edge."""
_WIDTH, _HEIGHT, _LEFT, _ABOVE, _BELOW, _LEGEND = 300, 190, 44, 34, 54, 30


def draw_quotients(rows: Sequence[dict[str, Any]]) -> str:
    """Return an SVG with a panel for each number of ranks: quotients over bytes.

    Args:
        rows: operation, ranks, bytes, and `seconds` of each round by backend.
    """
    counts = sorted({row["ranks"] for row in rows})
    panel_width = _LEFT + _WIDTH + 16
    width, height = len(counts) * panel_width, _LEGEND + _ABOVE + _HEIGHT + _BELOW
    label = "Time over gradlane as a part of Gloo's, by bytes, ranks and operation"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{escape(label)}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}">'
    ]
    for number, (name, color) in enumerate(COLORS.items()):
        x = 8.0 + number * 150
        parts += [line([(x, 14), (x + 26, 14)], color, ""), text(x + 32, 18, name)]
    for number, ranks in enumerate(counts):
        mine = [row for row in rows if row["ranks"] == ranks]
        parts += _panel(mine, f"{ranks} ranks", number * panel_width + _LEFT, _LEGEND + _ABOVE)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(rows: Sequence[dict[str, Any]], title: str, left: float, upper: float) -> list[str]:
    sizes = sorted({row["bytes"] for row in rows})
    low, high = math.log2(sizes[0]), math.log2(sizes[-1])
    bottom = upper + _HEIGHT

    def x_of(nbytes: int) -> float:
        return left + 8 + (math.log2(nbytes) - low) / max(high - low, 1) * (_WIDTH - 16)

    def y_of(quotient: float) -> float:
        return bottom - min(quotient, TOP) / TOP * _HEIGHT

    parts = [text(left, upper - 14, title, weight=600)]
    for value in (0.0, 0.5, 1.0, TOP):
        ends = [(left, y_of(value)), (left + _WIDTH, y_of(value))]
        parts.append(line(ends, INK if value == 0.5 else FAINT, "4 4" if value == 0.5 else "", 1))
        parts.append(text(left - 6, y_of(value) + 4, f"{value:g}", anchor="end"))
    for nbytes in sizes[:: -(-len(sizes) // 5)]:
        parts.append(text(x_of(nbytes), bottom + 18, _short(nbytes), anchor="middle"))
    parts.append(text(left + _WIDTH / 2, bottom + 40, "bytes of a rank's tensor", anchor="middle"))
    for name, color in COLORS.items():
        points = [
            (x_of(row["bytes"]), y_of(quotient(row))) for row in rows if row["operation"] == name
        ]
        parts.append(line(points, color, ""))
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points]
    return parts


def quotient(row: dict[str, Any]) -> float:
    """Return the median time over gradlane, over Gloo's."""
    ours, gloos = (statistics.median(row["seconds"][it]) for it in ("gradlane", "gloo"))
    return float(ours / gloos)


def _short(nbytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"
