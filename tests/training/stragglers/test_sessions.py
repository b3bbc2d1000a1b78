"""Steps that go on without late ranks, between real processes, one of which SIGSTOP stops.

Who is late is up to the machine; what follows from it is not: the ranks say who was in, and every
parameter has to be what just these gradients make of it.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.built import needs_core
from tests.training.model.pool import RankPool

pytestmark = needs_core
MODULE = "tests.training.stragglers.rank_programs"


def expected_value(results: list[dict[str, Any]], steps: int, carries: bool) -> float:
    """What SGD makes of the gradients of those that were in, starting at 0."""
    carried = [0.0] * len(results)
    value = 0.0
    for step in range(1, steps + 1):
        contributions = []
        for rank, result in enumerate(results):
            if step in result["given"]:
                gradient = result["given"][step] + (carried[rank] if carries else 0.0)
                carried[rank] = 0.0 if result["was_in"][step] else gradient
                if result["was_in"][step]:
                    contributions.append(gradient)
            else:
                assert not result["was_in"][step], "who passes a step is not in it"
        assert contributions, f"step {step} has nobody's gradients"
        value -= 0.01 * sum(contributions) / len(contributions)
    return value


@pytest.mark.parametrize(
    ("stragglers", "late", "paced", "lanes"),
    [
        ("backup=1", "discard", True, 2),
        ("backup=1", "carry", True, 3),
        ("backup=2", "carry", False, 1),
        ("drop", "discard", True, 1),
        ("drop=1.1", "carry", True, 2),
    ],
)
def test_every_rank_has_the_mean_over_those_that_were_in_time(
    pool: RankPool, stragglers: str, late: str, paced: bool, lanes: int
) -> None:
    steps = 24
    results = pool.run(
        f"{MODULE}:follow",
        ranks=3,
        stragglers=stragglers,
        late=late,
        paced=paced,
        stops=True,
        steps=steps,
        lanes=lanes,
    )
    assert len({result["digest"] for result in results}) == 1
    assert all(result["uniform"] for result in results), "no slice is without another"
    for result in results:
        assert result["passed"] + len(result["given"]) == steps
        assert result["passed"] == 0 or paced
        assert result["decided"] == steps
        assert result["left_out"] == results[0]["left_out"]
    out = [sum(not one for one in result["was_in"].values()) for result in results]
    assert out == results[0]["left_out"]
    least = 3 - int(stragglers[-1]) if stragglers.startswith("backup") else 1
    for step in range(1, steps + 1):
        assert sum(result["was_in"][step] for result in results) >= least
    value = expected_value(results, steps, late == "carry")
    assert results[0]["value"] == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"codec": "qsgd:bits=8,residual=on", "late": "carry"},
        {"codec": "onebit:bucket=64"},
    ],
)
def test_training_without_the_late_ranks_learns_and_keeps_all_alike(
    pool: RankPool, options: dict[str, Any]
) -> None:
    results = pool.run(f"{MODULE}:learn", ranks=3, stragglers="backup=1", steps=60, **options)
    assert len({result["digest"] for result in results}) == 1
    assert all(result["lr"] == results[0]["lr"] for result in results), "schedules follow steps"
    for result in results:
        first, last = result["losses"][:5], result["losses"][-5:]
        assert sum(last) < 0.8 * sum(first)


def test_waiting_for_all_is_as_ever_with_slices_on_some_ranks(pool: RankPool) -> None:
    results = pool.run(
        f"{MODULE}:follow",
        ranks=3,
        stragglers="wait",
        late="discard",
        paced=True,
        stops=False,
        steps=6,
    )
    assert len({result["digest"] for result in results}) == 1
    assert all(len(result["given"]) == 6 and result["decided"] == 0 for result in results)
    mean = sum(0.01 * 2 * (step % 3 + 1) for step in range(1, 7))
    assert results[0]["value"] == pytest.approx(-mean, abs=1e-6)
