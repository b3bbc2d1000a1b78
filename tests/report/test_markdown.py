"""Pages of text: templates whose places are filled."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradlane.report.markdown import filled


def test_a_template_is_filled_and_what_is_left_empty_leaves_no_gap(tmp_path: Path) -> None:
    template = tmp_path / "page.md"
    template.write_text("# {title}\n\n{note}\n\n{table}\n\n\n", encoding="utf-8")
    assert filled(template, title="T", note="", table="| {a} |") == "# T\n\n| {a} |\n"
    with pytest.raises(KeyError, match="table"):
        filled(template, title="T", note="")
