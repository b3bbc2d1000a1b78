"""The chart of the README: a step's time over the rate of the network, drawn from measured rows.

`python -m benchmarks.front_chart docs/predictions.json docs/images` writes an SVG for
each theme and each width of a page; a test compares them with the committed files.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from gradlane.formats.atomic_io import atomic_write_text
from gradlane.lab.runs.rows import Row, read_rows, text_of_no_evidence

WORKLOADS = (("resnet50", "ResNet-50"), ("vgg19", "VGG-19"))

LINES = {
    "DDP, best buckets": ("DDP", "ddp", ""),
    "gradlane": ("p3", "p3", ""),
    "bound": ("bound", "bound", "6 4"),
    "compute alone": ("none", "bound", "1 4"),
}
"""By the name of a line: its strategy, its color, and its dashes."""
THEMES = {
    "light": dict(text="#1f2328", faint="#d0d7de", ddp="#cf222e", p3="#0969da", bound="#59636e"),
    "dark": dict(text="#e6edf3", faint="#3d444d", ddp="#ff7b72", p3="#58a6ff", bound="#9198a1"),
}
"""Colors by the theme of a page."""


@dataclass(frozen=True)
class Layout:
    """Places of the panels and of the legend, in pixels of the SVG."""

    columns: int
    """Panels side by side."""
    legend_columns: int
    legend_column_px: float
    width: int
    panel_width: int
    panel_height: int
    """From the axis to the highest line of the grid."""
    font_px: int


LAYOUTS = {
    "steps": Layout(2, 4, 204, 820, 338, 190, 15),
    # A phone shows it at nine tenths: text of 15 pixels stays readable.
    "steps-narrow": Layout(1, 2, 200, 400, 340, 150, 16),
}
"""By the first part of a file's name."""
_TICKS = 5
_LEFT, _ABOVE, _BELOW, _ROW = 52, 40, 58, 26


@dataclass(frozen=True)
class Panel:
    """The measured points of one workload, by increasing rate; rates in Gbit/s, times in ms."""

    title: str
    rates: Sequence[float]
    lines: Mapping[str, Sequence[float]]


def panel_of(rows: Sequence[Row], workload: str, title: str) -> Panel:
    """Return the points of a workload that has DDP, gradlane and the bound at a rate.

    Args:
        rows: of four nodes.
        workload: its name.
        title: what people call it.

    Raises:
        ValueError: nothing was measured.
    """
    mine = [row for row in rows if row.workload == workload]
    at: dict[float, dict[str, list[float]]] = {}
    for row in mine:
        lines = at.setdefault(row.gbps, {})
        name = "DDP" if row.strategy.startswith("ddp-gloo") else row.strategy
        lines.setdefault(name, []).append(row.step_s_median * 1e3)
        if row.strategy == "p3" and row.bound_step_s is not None:
            lines.setdefault("bound", []).append(row.bound_step_s * 1e3)
    wanted = {strategy for strategy, _, _ in LINES.values()}
    rates = sorted(rate for rate, lines in at.items() if wanted <= {*lines})
    if not rates:
        raise ValueError(f"no row of {workload} with DDP, p3 and none at one rate")
    # The fastest DDP of all bucket sizes is what gradlane is compared with.
    lines = {name: [min(at[rate][one]) for rate in rates] for name, (one, _, _) in LINES.items()}
    return Panel(title, rates, lines)


def draw(panels: Sequence[Panel], theme: Mapping[str, str], layout: Layout) -> str:
    """Return an SVG with the panels side by side, or below each other."""
    label = "Milliseconds a step over the rate of every port, four nodes: " + "; ".join(
        f"{panel.title}: "
        + ", ".join(
            f"{rate:g} Gbit/s DDP {panel.lines['DDP, best buckets'][index]:.0f}, "
            f"gradlane {panel.lines['gradlane'][index]:.0f}"
            for index, rate in enumerate(panel.rates)
        )
        for panel in panels
    )
    legend_height = -(-len(LINES) // layout.legend_columns) * _ROW
    panel_height = _ABOVE + layout.panel_height + _BELOW
    height = legend_height + -(-len(panels) // layout.columns) * panel_height
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {layout.width} {height}" '
        f'width="{layout.width}" height="{height}" role="img" aria-label="{escape(label)}" '
        f'font-family="system-ui, sans-serif" font-size="{layout.font_px}" fill="{theme["text"]}">'
    ]
    for number, (name, (_, color, dashes)) in enumerate(LINES.items()):
        row, column = divmod(number, layout.legend_columns)
        x, y = 8 + column * layout.legend_column_px, 14.0 + row * _ROW
        parts.append(line([(x, y), (x + 32, y)], theme[color], dashes))
        parts.append(text(x + 40, y + 5, name))
    for number, panel in enumerate(panels):
        row, column = divmod(number, layout.columns)
        left = _LEFT + column * layout.width / layout.columns
        parts += _panel(panel, left, legend_height + row * panel_height + _ABOVE, theme, layout)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    panel: Panel, left: float, upper: float, theme: Mapping[str, str], layout: Layout
) -> list[str]:
    most = max(max(values) for values in panel.lines.values())
    step = next(one for one in (100, 200, 250, 500, 1000) if most / one <= _TICKS)
    top = step * math.ceil(most / step)
    bottom, width = upper + layout.panel_height, layout.panel_width

    def x_of(rate: float) -> float:
        # Rates are spread evenly: they were chosen for what happens at each.
        return left + 14 + panel.rates.index(rate) * (width - 28) / (len(panel.rates) - 1)

    def y_of(value: float) -> float:
        return bottom - value / top * layout.panel_height

    parts = [text(left, upper - 16, f"{panel.title}, ms a step", weight=600)]
    for value in range(0, top + 1, step):
        parts.append(
            line([(left, y_of(value)), (left + width, y_of(value))], theme["faint"], "", width=1)
        )
        parts.append(text(left - 8, y_of(value) + 5, str(value), anchor="end"))
    for rate in panel.rates:
        parts.append(text(x_of(rate), bottom + 20, f"{rate:g}", anchor="middle"))
    parts.append(text(left + width / 2, bottom + 42, "Gbit/s each port", anchor="middle"))
    for name, values in panel.lines.items():
        color, dashes = theme[LINES[name][1]], LINES[name][2]
        points = [
            (x_of(rate), y_of(value)) for rate, value in zip(panel.rates, values, strict=True)
        ]
        parts.append(line(points, color, dashes))
        if not dashes:
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>' for x, y in points
            ]
    return parts


def line(points: Sequence[tuple[float, float]], color: str, dashes: str, width: float = 2.2) -> str:
    """Return a polyline."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"{dashed}/>'
    )


def text(x: float, y: float, text: str, *, anchor: str = "start", weight: int = 400) -> str:
    """Return a text at a place."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )


def write_charts(results: Path, folder: Path) -> list[Path]:
    """Draw the chart for each theme and layout, and write the files.

    Args:
        results: a file of rows; those that are no evidence are left out.
        folder: where the files go.
    """
    rows = [row for row in read_rows(results) if row.is_evidence]
    panels = [panel_of(rows, *named) for named in WORKLOADS]
    written = []
    for prefix, layout in LAYOUTS.items():
        for name, theme in THEMES.items():
            path = folder / f"{prefix}-{name}.svg"
            atomic_write_text(path, draw(panels, theme, layout))
            written.append(path)
    return written


if __name__ == "__main__":
    write_charts(Path(sys.argv[1]), Path(sys.argv[2]))
    if note := text_of_no_evidence(read_rows(Path(sys.argv[1]))):
        print(f"left out, {note}")
