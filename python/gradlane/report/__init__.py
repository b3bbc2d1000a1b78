"""Reports: one HTML file with tables and plots that opens anywhere, without a network.

A page is a list of sections, each a list of blocks. All inserted text is escaped. Pages are made in
`lab/runs/page.py` and `planning/advice/page.py`, and by plug-ins. The live page of a session
(`live_page.py`) is one of its own, which has the same look and no plotting library.
"""

from __future__ import annotations

from gradlane.report.page import (
    Block,
    Measurement,
    Paragraph,
    Section,
    Table,
    Widget,
    measured_here,
    write_report,
)
from gradlane.report.plots import Plot, bar_plot, line_plot, utilization_plot

__all__ = [
    "Block",
    "Measurement",
    "Paragraph",
    "Plot",
    "Section",
    "Table",
    "Widget",
    "bar_plot",
    "line_plot",
    "measured_here",
    "utilization_plot",
    "write_report",
]
