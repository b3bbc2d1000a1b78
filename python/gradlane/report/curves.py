"""Plots of measured points beside the simulator's curves, in the same colours.

A name stands once in the legend, and a click on it hides its points and its curve together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradlane.report.plots import Plot, axes

_MARGIN_SHARE = 0.03


@dataclass(frozen=True)
class Points:
    """Values over a horizontal axis, each with what a tooltip says of it."""

    xs: Sequence[float]
    ys: Sequence[float]
    texts: Sequence[str]
    """Lines of the tooltip, separated by `<br>`; made of numbers and names of the program only."""


def curve_plot(
    title: str,
    measured: Mapping[str, Points],
    simulated: Mapping[str, Points],
    limits: Mapping[str, Points],
    *,
    x_label: str,
    y_label: str,
    colors: Mapping[str, int | str],
    x_ticks: Mapping[float, str] | None = None,
    is_log: bool = False,
    is_from_zero: bool = True,
    stars: Mapping[str, Points] | None = None,
    note: str = "",
) -> Plot:
    """Plot measured points, simulated curves and limits.

    Args:
        title: heading.
        measured: points by name; those without a curve are joined by a thin dotted line.
        simulated: curves by name.
        limits: dashed curves in the colour of text, such as a bound.
        x_label: what the horizontal axis shows, with its unit.
        y_label: what the vertical axis shows, with its unit.
        colors: colour number of each name, or `text` for the colour of text, with square dots.
        x_ticks: values to mark on the horizontal axis, with their texts.
        is_log: whether the horizontal axis is logarithmic.
        is_from_zero: whether the vertical axis starts at zero.
        stars: points to point out, by name: the first with a star, others with a diamond.
        note: text below the plot.
    """
    traces: list[dict[str, Any]] = []
    for name, points in simulated.items():
        line = {"width": 1.75, "dash": "solid"}
        traces.append(_trace(name, points, colors[name], "lines", line))
        traces[-1]["showlegend"] = name not in measured
    for name, points in measured.items():
        mode = "markers" if name in simulated else "lines+markers"
        traces.append(_trace(name, points, colors[name], mode, {"width": 1.25, "dash": "dot"}))
        traces[-1]["marker"] = {"size": 9, "symbol": _symbol(colors[name])}
    for name, points in limits.items():
        traces.append(_trace(name, points, "text", "lines", {"width": 1.5, "dash": "dash"}))
    for name, points in (stars or {}).items():
        traces.append(_trace(name, points, "text", "markers", {"width": 0}))
        symbol = "star-open" if name == next(iter(stars or {})) else "diamond-open"
        traces[-1]["marker"] = {"size": 16, "symbol": symbol, "line": {"width": 1.5}}
    layout: dict[str, Any] = {
        "hovermode": "closest",
        **axes(x_label, y_label, y_from_zero=is_from_zero),
    }
    if is_log:
        layout["xaxis"]["type"] = "log"
        # Left alone, an axis ends where a curve ends, and hides the last value's name.
        xs = [math.log10(x) for trace in traces for x in trace["x"]] or [0.0]
        margin = max(0.02, _MARGIN_SHARE * (max(xs) - min(xs)))
        layout["xaxis"]["range"] = [min(xs) - margin, max(xs) + margin]
    if x_ticks:
        layout["xaxis"]["tickvals"] = list(x_ticks)
        layout["xaxis"]["ticktext"] = list(x_ticks.values())
    return Plot(title, traces, layout, note)


def _symbol(color: int | str) -> str:
    return "square" if color == "text" else "circle"


def _trace(
    name: str, points: Points, color: int | str, mode: str, line: dict[str, Any]
) -> dict[str, Any]:
    if not len(points.xs) == len(points.ys) == len(points.texts):
        raise ValueError(
            f"series '{name}' has {len(points.xs)} horizontal and {len(points.ys)} vertical values "
            f"and {len(points.texts)} texts"
        )
    return {
        "type": "scatter",
        "mode": mode,
        "name": name,
        "legendgroup": name,
        "x": list(points.xs),
        "y": list(points.ys),
        "text": list(points.texts),
        "hovertemplate": "%{text}<extra></extra>",
        "line": line,
        "meta": {"color": color},
    }
