"""Nothing grows with the number of steps, or of sessions; the benchmark looks longer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.endurance import CASES, MEASURES, growth, verdict

from tests.built import needs_core
from tests.training.model.pool import RankPool


@pytest.mark.slow
@needs_core
@pytest.mark.parametrize(("case", "steps"), [("p3", 640), ("codec", 640), ("reopen", 32)])
def test_sessions_stay_as_large_as_they_are(
    pool: RankPool, tmp_path: Path, case: str, steps: int
) -> None:
    """Over so few steps a leak is told from what settles by one object a step."""
    follow: dict[str, Any] = {"case": case, "steps": steps, "samples": 16, "folder": str(tmp_path)}
    by_rank = pool.run("benchmarks.endurance:follow", ranks=2, **follow)
    for found in by_rank:
        for name in ("descriptors", "threads", "store_keys"):
            assert growth(found, name) <= 0.0, (name, [row[name] for row in found])
        if not CASES[case].reopens:
            # The times of the last 128 steps are kept.
            settled = found[len(found) // 2 :]
            assert growth(settled, "python_blocks") < 0.7, [row["python_blocks"] for row in found]
            assert growth(settled, "heap_bytes") < 200.0, [row["heap_bytes"] for row in found]


def test_what_grows_is_found() -> None:
    def rows(a_step: int) -> list[dict[str, int]]:
        flat = dict.fromkeys(MEASURES, 1_000)
        return [
            {**flat, "step": step, "store_keys": 7 + a_step * step} for step in range(10, 410, 10)
        ]

    assert verdict("p3", [rows(0), rows(0)])["grown"] == []
    found = verdict("p3", [rows(0), rows(1)])
    assert found["grown"] == ["store_keys"] and found["a_step"]["store_keys"] == 1.0
    assert (found["steps"], found["ranks"]) == (400, 2)
