"""Reports: one HTML file with tables and plots that opens anywhere, without a network.

A page is a list of sections, each a list of blocks; `report_from_results` makes one from the rows
of a lab run, `report_from_whatif` one from those of a what-if. All inserted text is escaped.
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
from gradlane.report.results import report_from_results, sections_from_results
from gradlane.report.whatif import report_from_whatif

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
    "report_from_results",
    "report_from_whatif",
    "sections_from_results",
    "utilization_plot",
    "write_report",
]
