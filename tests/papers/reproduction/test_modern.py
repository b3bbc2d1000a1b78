"""Networks of today: rows are simulated right, and the page says what they show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradlane.planning.simulation.profiles import synthetic_profile
from gradlane_papers.reproduction.modern import (
    EXACT,
    NOTHING,
    NetworkRow,
    answers,
    markdown_of,
    profile_of,
    study,
    ways_in_words,
    ways_table,
)
from gradlane_papers.reproduction.simulations import Simulations


def test_gradients_are_what_travels() -> None:
    half, whole = profile_of("vit_b16"), synthetic_profile("vit_b16")
    assert 2 * half.size_bytes == whole.size_bytes
    assert profile_of("dlrm").size_bytes == synthetic_profile("dlrm").size_bytes


def test_a_network_on_two_rates() -> None:
    rows = study(Simulations(), ["vit_b16"], [4], [10, 100])
    slow, fast = rows
    for row in rows:
        assert row.compute_s <= row.bound_step_s <= min(row.p3_step_s, row.ddp_step_s)
    # 173 MB, 1.5 of them each way: 217 ms at 10 Gbit/s, over six times 34 ms of compute.
    assert slow.bound_step_s == pytest.approx(1.5 * 173.1e6 * 8 / 1e10 / (1448 / 1514), rel=0.02)
    assert slow.verdict == "scheduling helps, bytes decide" or slow.gain < 0.05
    assert slow.fewer_needed == pytest.approx(0.95 * slow.bound_step_s / slow.compute_s, rel=0.1)
    # A port that is faster than the host: DDP copies less.
    assert fast.is_slower and not slow.is_slower
    assert fast.verdict == "fewer bytes; exact: DDP"
    assert slow.compute_s / slow.bound_step_s < slow.scaling_8bit < slow.scaling_1bit <= 1.0
    # Half of the bytes of bf16, where the port decides.
    assert slow.scaling_8bit == pytest.approx(2 * slow.compute_s / slow.bound_step_s, rel=0.02)


def test_the_smallest_change_that_is_enough() -> None:
    (row,) = study(Simulations(), ["vit_b16"], [4], [25])
    # 8 bits can reach less than 95 % even where all overlaps: they are not simulated.
    assert row.scaling_8bit < 0.95 < row.scaling_1bit
    assert row.change == "an exchange every 32 steps, overlapped, 8 bits"
    # Eight steps of 34 ms for a quarter of the bytes; without them a 32nd of all is too much.
    assert row.fewer_needed < 32


def test_ways_are_counted_by_rate() -> None:
    made = row(1.0, 5.0, 5.0)
    changes = [EXACT, "4 bits", "an exchange every 8 steps", "an exchange every 8 steps", None]
    rows = [replace(made, change=one, rate_bps=1e9 * (1 + at)) for at, one in enumerate(changes)]
    table = ways_table(rows).splitlines()
    assert table[2] == f"| {EXACT} | 1 | 0 | 0 | 0 | 0 | 1 |"
    assert "| an exchange every 8 steps | 0 | 0 | 1 | 1 | 0 | 2 |" in table
    assert table[-1] == f"| {NOTHING} | 0 | 0 | 0 | 0 | 1 | 1 |"
    assert ways_in_words(rows) == (
        "Of 5 clusters 1 reach 95 % of compute alone exactly, 1 in fewer bits, 2 with fewer "
        "exchanges, and 1 by none of the ways that were tried."
    )


def row(compute_s: float, ddp_s: float, p3_s: float, rate_bps: float = 1e10) -> NetworkRow:
    return NetworkRow("vit_b16", 4, rate_bps, 1, compute_s, ddp_s, p3_s, compute_s, 1, 1, 1.0)


@pytest.mark.parametrize(
    ("ddp_s", "p3_s", "verdict"),
    [
        (1.01, 1.0, "nothing is needed"),
        (1.3, 1.02, "scheduling is enough"),
        (1.6, 1.3, "scheduling helps, bytes decide"),
        (5.0, 4.9, "only fewer bytes help"),
        (5.0, 5.09, "only fewer bytes help"),
        (5.0, 5.2, "fewer bytes; exact: DDP"),
    ],
)
def test_verdicts(ddp_s: float, p3_s: float, verdict: str) -> None:
    made = row(1.0, ddp_s, p3_s)
    assert made.verdict == verdict
    assert made.to_json()["gain"] == pytest.approx(ddp_s / p3_s - 1)


def test_the_page_says_what_the_rows_show() -> None:
    rows = [row(1.0, 1.3, 1.02), row(1.0, 5.0, 5.5, 1e9), row(1.0, 1.01, 1.0, 1e11)]
    texts = answers(rows)
    assert texts[0].startswith("1 Gbit/s: of 1 clusters 0 need nothing")
    assert "in 0 it gains 5 % or more, and in 1 it loses more than 2 % (most: 9 %" in texts[0]
    assert "in 1 scheduling alone reaches 95 %, in 1 it gains" in texts[1]
    page = markdown_of(rows, "gradlane reproduce modern")
    assert "In 1 of 3 clusters" in page and "in 1 it is slower" in page
    assert "the\nlargest 27 %" in page and "the largest loss 9.1 %" in page
    assert page.count("| vit_b16 | 4 |") == 3
    assert "Of 3 clusters 0 reach 95 % of compute alone exactly, 0 in fewer bits, 0 with" in page
    assert "{" not in page
