"""The curves of `benchmarks.time_to_loss`: held-out loss over seconds, and over steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from benchmarks.front_chart import line, text

COLORS = ("#0969da", "#1a7f37", "#0a8f8f", "#8250df", "#cf222e", "#9a6700", "#bf3989")
"""By the place of a way; readable on light and dark pages."""
INK, FAINT = "#6e7781", "#8c959f55"
_WIDTH, _HEIGHT, _LEFT, _ABOVE, _BELOW, _ROW = 340, 240, 44, 34, 54, 22
_COLUMNS, _COLUMN = 3, 280
_SHOWN = 3.0
"""The highest loss that is drawn: first steps, alike for all, would take most of the height."""


def draw_curves(series: Mapping[str, Sequence[tuple[int, float, float]]]) -> str:
    """Return an SVG with two panels: losses over seconds, and over steps.

    Args:
        series: steps, seconds and loss of each point, by the name of a way.
    """
    panel_width = _LEFT + _WIDTH + 16
    legend = -(-len(series) // _COLUMNS) * _ROW
    width, height = 2 * panel_width, legend + _ABOVE + _HEIGHT + _BELOW
    label = "Held-out loss over seconds and over steps, by the way of averaging"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{escape(label)}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}">'
    ]
    for number, (name, color) in enumerate(zip(series, COLORS, strict=True)):
        row, column = divmod(number, _COLUMNS)
        x, y = 8.0 + column * _COLUMN, 14.0 + row * _ROW
        parts += [line([(x, y), (x + 26, y)], color, ""), text(x + 32, y + 4, name)]
    for number, (unit, axis) in enumerate((("seconds", 1), ("steps", 0))):
        curves = [[(float(point[axis]), point[2]) for point in one] for one in series.values()]
        left = number * panel_width + _LEFT
        parts += _panel(curves, f"held-out loss over {unit}", unit, left, legend + _ABOVE)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    curves: Sequence[Sequence[tuple[float, float]]],
    title: str,
    unit: str,
    left: float,
    upper: float,
) -> list[str]:
    most = max(x for curve in curves for x, _ in curve)
    lowest = min(loss for curve in curves for _, loss in curve)
    floor = math.floor(lowest * 5) / 5
    top = max(_SHOWN, floor + 0.2)
    bottom = upper + _HEIGHT

    def x_of(value: float) -> float:
        return left + value / most * _WIDTH

    def y_of(loss: float) -> float:
        return bottom - (loss - floor) / (top - floor) * _HEIGHT

    parts = [text(left, upper - 14, title, weight=600)]
    for number in range(round((top - floor) * 5) + 1):
        loss = floor + number / 5
        parts.append(line([(left, y_of(loss)), (left + _WIDTH, y_of(loss))], FAINT, "", 1))
        parts.append(text(left - 6, y_of(loss) + 4, f"{loss:.1f}", anchor="end"))
    step = next(one for one in (10, 20, 50, 100, 200, 500, 1000, 5000) if most / one <= 6)
    for value in range(0, int(most) + 1, step):
        parts.append(text(x_of(value), bottom + 18, str(value), anchor="middle"))
    parts.append(text(left + _WIDTH / 2, bottom + 40, unit, anchor="middle"))
    for curve, color in zip(curves, COLORS, strict=True):
        points = [(x_of(x), y_of(loss)) for x, loss in _from_top(curve, top)]
        parts.append(line(points, color, ""))
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>' for x, y in points]
    return parts


def _from_top(curve: Sequence[tuple[float, float]], top: float) -> list[tuple[float, float]]:
    """Return the points of a curve that are not above the highest loss that is drawn."""
    return [(x, loss) for x, loss in curve if loss <= top]
