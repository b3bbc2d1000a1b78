"""The plot of the collectives: every operation in each panel, and quotients of medians."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.collectives_chart import COLORS, draw_quotients, quotient


def row(operation: str, ranks: int, nbytes: int, ours_s: list[float]) -> dict[str, Any]:
    seconds = {"gradlane": ours_s, "gloo": [4.0, 2.0, 9.0]}
    return {"operation": operation, "ranks": ranks, "bytes": nbytes, "seconds": seconds}


def test_a_quotient_is_of_the_medians() -> None:
    assert quotient(row("all_reduce", 2, 8, [1.0, 7.0, 2.0])) == pytest.approx(0.5)


def test_each_number_of_ranks_has_a_panel_with_every_operation() -> None:
    rows = [
        row(operation, ranks, nbytes, [100.0 if nbytes == 8 else 1.0])
        for operation in COLORS
        for ranks in (2, 4)
        for nbytes in (8, 1 << 20)
    ]
    drawn = draw_quotients(rows)
    assert drawn.count("<circle") == len(rows)
    assert ">2 ranks<" in drawn and ">4 ranks<" in drawn
    assert ">8 B<" in drawn and ">1 MiB<" in drawn
    # What is above the highest quotient stands at the edge.
    assert min(float(it.split('"')[0]) for it in drawn.split('cy="')[1:]) == 64
