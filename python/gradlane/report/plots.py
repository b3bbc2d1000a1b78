"""Descriptions of plots, as plain dictionaries that the page hands to the plotting library.

Colours are given by number, not by value: the page looks them up for the light or dark theme it
is shown in, and a name keeps its number across all plots of a page that are given the same order.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Series = Mapping[str, tuple[Sequence[float], Sequence[float | None]]]
"""Lines by name, each as (horizontal, vertical) values; None leaves a gap."""


@dataclass(frozen=True)
class Plot:
    """One plot of a page."""

    title: str
    """Heading above the plot."""
    traces: list[dict[str, Any]]
    """Traces as the plotting library takes them; `meta.color` is a colour number."""
    layout: dict[str, Any] = field(default_factory=dict)
    """Layout as the plotting library takes it, without colours."""
    note: str = ""
    """A note to the reader, below the plot."""
    is_low: bool = False
    """Whether it is less high, as one of several that are compared."""


def _number(value: float | None) -> float | None:
    """Return a value as JSON has it: infinities and not-a-number become gaps."""
    return value if value is not None and math.isfinite(value) else None


def _check_lengths(title: str, name: str, horizontal: int, vertical: int) -> None:
    if horizontal != vertical:
        raise ValueError(
            f"plot '{title}': series '{name}' has {horizontal} horizontal "
            f"and {vertical} vertical values"
        )


def line_plot(
    title: str,
    series: Series,
    *,
    x_label: str,
    y_label: str,
    colors: Mapping[str, int | str] | None = None,
    dashed: Collection[str] = (),
    hidden: Collection[str] = (),
    markers: bool = False,
    width: float = 2,
    y_from_zero: bool = False,
    note: str = "",
    is_low: bool = False,
) -> Plot:
    """Plot lines, such as loss curves or step times.

    Args:
        title: heading.
        series: the lines, by name.
        x_label: what the horizontal axis shows, with its unit.
        y_label: what the vertical axis shows, with its unit.
        colors: colour number of each name, or `text` for the colour of text; by order where absent.
        dashed: names to draw dashed, such as bounds.
        hidden: names that show only after a click on the legend.
        markers: show a dot at each value.
        width: of the lines, in pixels.
        y_from_zero: start the vertical axis at zero.
        note: text below the plot.
        is_low: whether it is less high, as one of several that are compared.

    Raises:
        ValueError: if a line's values do not pair up.
    """
    traces: list[dict[str, Any]] = []
    for index, (name, (xs, ys)) in enumerate(series.items()):
        _check_lengths(title, name, len(xs), len(ys))
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if markers else "lines",
                "name": name,
                "legendgroup": name,
                "x": [_number(value) for value in xs],
                "y": [_number(value) for value in ys],
                "line": {"width": width, "dash": "dash" if name in dashed else "solid"},
                "meta": {"color": index if colors is None else colors.get(name, index)},
            }
        )
        if name in hidden:
            traces[-1]["visible"] = "legendonly"
    layout = axes(x_label, y_label, y_from_zero=y_from_zero)
    every = [value for xs, _ in series.values() for value in xs]
    if every and all(isinstance(one, int) for one in every) and max(every) - min(every) <= 10:
        # Nothing lies between two of them, such as steps.
        layout["xaxis"]["dtick"] = 1
    return Plot(title, traces, layout, note, is_low)


def bar_plot(
    title: str,
    categories: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    y_label: str,
    limits: Mapping[str, Sequence[float | None]] | None = None,
    colors: Mapping[str, int] | None = None,
    stacked: bool = False,
    shows_names: bool = True,
    note: str = "",
) -> Plot:
    """Plot bars in groups or on top of each other, with limits as strokes across a category.

    Args:
        title: heading.
        categories: the groups.
        series: for each name, one bar a category.
        y_label: what the bars' height shows, with its unit.
        limits: for each name, one stroke a category, such as a bound.
        colors: colour number of each name; by order where absent.
        stacked: put the bars of a category on top of each other instead of side by side.
        shows_names: list the series in the legend.
        note: text below the plot.

    Raises:
        ValueError: if a series has not one value a category.
    """
    traces: list[dict[str, Any]] = []
    for index, (name, values) in enumerate(series.items()):
        _check_lengths(title, name, len(categories), len(values))
        traces.append(
            {
                "type": "bar",
                "showlegend": shows_names,
                "name": name,
                "x": list(categories),
                "y": [_number(value) for value in values],
                "meta": {"color": index if colors is None else colors.get(name, index)},
            }
        )
    for name, values in (limits or {}).items():
        _check_lengths(title, name, len(categories), len(values))
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": list(categories),
                "y": [_number(value) for value in values],
                "marker": {"symbol": "line-ew", "line": {"width": 2}},
                "meta": {"color": "text"},
            }
        )
    layout = axes("", y_label)
    # Without a type, categories that look like numbers or dates would be read as such.
    layout["xaxis"]["type"] = "category"
    layout["xaxis"]["categoryarray"] = list(categories)
    layout["barmode"] = "stack" if stacked else "group"
    return Plot(title, traces, layout, note)


def utilization_plot(
    title: str,
    series: Series,
    *,
    colors: Mapping[str, int] | None = None,
    hidden: Sequence[str] = (),
    note: str = "",
) -> Plot:
    """Plot the use of a link over time.

    Args:
        title: heading.
        series: by name, seconds and shares of the goodput (0 to 1).
        colors: colour number of each name; by order where absent.
        hidden: names that show only after a click on the legend.
        note: text below the plot.

    Raises:
        ValueError: if a line's values do not pair up.
    """
    shares: Series = {
        name: (xs, [None if share is None else 100.0 * share for share in ys])
        for name, (xs, ys) in series.items()
    }
    return line_plot(
        title,
        shares,
        x_label="time, s",
        y_label="link used, % of goodput",
        colors=colors,
        hidden=hidden,
        width=1.5,
        y_from_zero=True,
        note=note,
    )


def axes(x_label: str, y_label: str, *, y_from_zero: bool = False) -> dict[str, Any]:
    """Return the axes of a layout by their labels; `y_from_zero` starts the vertical one at 0."""
    made: dict[str, Any] = {
        name: {"title": {"text": label}, "automargin": True}
        for name, label in (("xaxis", x_label), ("yaxis", y_label))
    }
    if y_from_zero:
        made["yaxis"]["rangemode"] = "tozero"
    return made
