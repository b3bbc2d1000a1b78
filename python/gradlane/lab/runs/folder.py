"""A preset's folder: rows, the same as a table for spreadsheets, and a page.

Free space is checked before the first run, so that a full disk costs no measurement.
"""

from __future__ import annotations

import csv
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradlane.lab.cluster.errors import LabError
from gradlane.lab.runs.rows import ROW_COLUMNS, replace_or_say, write_failure

NEEDED_BYTES = 24 * 10**6
"""The page carries the plotting library, 5 MB; rows with what ports did over time are as large."""


@dataclass(frozen=True)
class PresetFolder:
    """The paths of a preset's files."""

    path: Path

    @property
    def results(self) -> Path:
        """All rows, measured and simulated."""
        return self.path / "results.json"

    @property
    def table(self) -> Path:
        """The rows without lists and objects, comma-separated."""
        return self.path / "results.csv"

    @property
    def page(self) -> Path:
        """Plots and tables."""
        return self.path / "report.html"

    def prepare(self) -> None:
        """Make the folder and check that its files can be written.

        Raises:
            ValueError: the path is a file, or not writable.
            LabError: the disk is too full.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file; name a folder with --output")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            trial = self.path / f".trial.{os.getpid()}"
            trial.write_bytes(b"")
            trial.unlink()
        except OSError as failure:
            raise write_failure(self.path, failure) from failure
        free_bytes = shutil.disk_usage(self.path).free
        if free_bytes < NEEDED_BYTES:
            raise LabError(
                f"{self.path} has {free_bytes / 1e6:.1f} MB of free space, and results and page "
                f"need {NEEDED_BYTES / 1e6:.0f} MB: make room, or name another folder with --output"
            )

    def write_table(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows for spreadsheets.

        Raises:
            LabError: the file cannot be written.
        """
        columns = table_columns(rows)

        def write(partial: Path) -> None:
            with partial.open("w", encoding="utf-8", newline="") as file:
                table = csv.writer(file)
                table.writerow(columns)
                table.writerows([row.get(name) for name in columns] for row in rows)

        replace_or_say(self.table, write)


def table_columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of fields that are numbers, texts or nothing in every row that has them."""
    names = dict.fromkeys((*ROW_COLUMNS, *(name for row in rows for name in row)))
    return [
        name
        for name in names
        if any(row.get(name) is not None for row in rows)
        and all(isinstance(row.get(name), str | int | float | None) for row in rows)
    ]
