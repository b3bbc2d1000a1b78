"""The chart of the README: a step's time over the rate of the network, drawn from measured rows.

`python -m gradlane.lab.experiments.front_chart docs/predictions.json docs/images` writes one SVG
for light and one for dark pages; a test compares them with what is committed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from gradlane.formats.atomic_io import atomic_write_text
from gradlane.lab.runs.rows import Row, read_rows, text_of_no_evidence

WORKLOADS = (("resnet50", "ResNet-50"), ("vgg19", "VGG-19"))
WIDTH, HEIGHT = 820, 330
_TOP, _BOTTOM = 74, 56
_PANEL, _GAP, _LEFT = 340, 62, 56


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


def draw(panels: Sequence[Panel], theme: Mapping[str, str]) -> str:
    """Return an SVG with the panels side by side."""
    label = "Milliseconds a step over the rate of every port, four nodes: " + "; ".join(
        f"{panel.title}: "
        + ", ".join(
            f"{rate:g} Gbit/s DDP {panel.lines['DDP, best buckets'][index]:.0f}, "
            f"gradlane {panel.lines['gradlane'][index]:.0f}"
            for index, rate in enumerate(panel.rates)
        )
        for panel in panels
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{escape(label)}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{theme["text"]}">'
    ]
    x = float(_LEFT)
    for name, (_, color, dashes) in LINES.items():
        parts.append(_line([(x, 20.0), (x + 26, 20.0)], theme[color], dashes))
        parts.append(_text(x + 32, 24, name))
        x += 62 + 7.2 * len(name)
    for number, panel in enumerate(panels):
        parts += _panel(panel, _LEFT + number * (_PANEL + _GAP), theme)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, left: float, theme: Mapping[str, str]) -> list[str]:
    most = max(max(values) for values in panel.lines.values())
    step = next(one for one in (100, 200, 250, 500, 1000) if most / one <= 7)
    top = step * (int(most / step) + 1)
    bottom = HEIGHT - _BOTTOM

    def x_of(rate: float) -> float:
        # Rates are spread evenly: they were chosen for what happens at each.
        return left + 14 + panel.rates.index(rate) * (_PANEL - 28) / (len(panel.rates) - 1)

    def y_of(value: float) -> float:
        return bottom - value / top * (bottom - _TOP)

    parts = [_text(left, _TOP - 18, f"{panel.title}, ms a step", weight=600)]
    for value in range(0, top + 1, step):
        parts.append(
            _line([(left, y_of(value)), (left + _PANEL, y_of(value))], theme["faint"], "", width=1)
        )
        parts.append(_text(left - 8, y_of(value) + 4, str(value), anchor="end"))
    for rate in panel.rates:
        parts.append(_text(x_of(rate), bottom + 20, f"{rate:g}", anchor="middle"))
    parts.append(_text(left + _PANEL / 2, bottom + 42, "Gbit/s each port", anchor="middle"))
    for name, values in panel.lines.items():
        color, dashes = theme[LINES[name][1]], LINES[name][2]
        points = [
            (x_of(rate), y_of(value)) for rate, value in zip(panel.rates, values, strict=True)
        ]
        parts.append(_line(points, color, dashes))
        if not dashes:
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>' for x, y in points
            ]
    return parts


def _line(
    points: Sequence[tuple[float, float]], color: str, dashes: str, width: float = 2.2
) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"{dashed}/>'
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: int = 400) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )


def write_charts(results: Path, folder: Path) -> list[Path]:
    """Draw the chart for each theme, and write the files.

    Args:
        results: a file of rows; those that are no evidence are left out.
        folder: where the files go.
    """
    rows = [row for row in read_rows(results) if row.is_evidence]
    panels = [panel_of(rows, *named) for named in WORKLOADS]
    written = []
    for name, theme in THEMES.items():
        path = folder / f"steps-{name}.svg"
        atomic_write_text(path, draw(panels, theme))
        written.append(path)
    return written


if __name__ == "__main__":
    write_charts(Path(sys.argv[1]), Path(sys.argv[2]))
    if note := text_of_no_evidence(read_rows(Path(sys.argv[1]))):
        print(f"left out, {note}")
