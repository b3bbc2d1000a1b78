"""The study with room above what is learned: its data, its search, and its differences."""

from __future__ import annotations

import random

import pytest

from gradlane_papers.accuracy import headroom, mixture
from gradlane_papers.accuracy.exchange import ALL
from gradlane_papers.accuracy.findings import Spread
from gradlane_papers.accuracy.headroom import (
    LEARNING_RATES,
    SEARCH_SEED,
    comparisons,
    found_rates,
    half_interval,
    holm,
    seed_runs,
    student_p,
)
from gradlane_papers.accuracy.study import Result


def result(scheme: str, lr: float, seed: int, accuracy: float, loss: float = 1.0) -> Result:
    return Result(
        task=f"mixture/lr={lr:g}",
        scheme=scheme,
        layers=ALL,
        seed=seed,
        workers=4,
        steps=150,
        codec="f32",
        parameters=81_562,
        compute_s=0.002,
        wire_bytes_per_step=1.0,
        wire_ratio=1.0,
        final_loss=loss,
        final_accuracy=accuracy,
        diverged=False,
        evaluated=[150],
        loss=[loss],
        accuracy=[accuracy],
        time_s={},
        cpu_s=1.0,
    )


def test_the_best_accuracy_is_known_and_leaves_room() -> None:
    assert 0.9 < mixture.best_accuracy() < 0.99
    values, classes = mixture.held_out()
    assert values.shape == (8000, 1, 8, 8) and set(classes.tolist()) == set(range(10))


def test_workers_see_each_image_once_in_an_epoch() -> None:
    seen: set[tuple[float, ...]] = set()
    for step in range(3):
        for worker in range(4):
            values, _ = mixture.batch(16, 5, worker, 4, step)
            seen |= {tuple(image.flatten()[:4].tolist()) for image in values}
    assert len(seen) == 3 * 4 * 16


@pytest.mark.parametrize(
    ("t", "degrees", "p"),
    [(12.706, 1, 0.05), (4.303, 2, 0.05), (3.182, 3, 0.05), (2.776, 4, 0.05), (3.365, 5, 0.02)],
)
def test_students_p_is_that_of_the_tables(t: float, degrees: int, p: float) -> None:
    assert student_p(t, degrees) == pytest.approx(p, abs=2e-4)
    assert student_p(0.0, degrees) == pytest.approx(1.0)


def test_intervals_are_those_of_the_tables() -> None:
    spread = Spread((0.01, 0.02, 0.04, 0.01, 0.03))
    assert half_interval(spread) == pytest.approx(2.776 * spread.deviation / 5**0.5, rel=1e-3)


def test_holm_by_its_definition() -> None:
    """A corrected p-value is at most a level where stepping down at that level rejects it."""
    draw = random.Random(3)
    for _ in range(50):
        p_values = [draw.random() ** 3 for _ in range(6)]
        corrected = holm(p_values)
        for level in (0.01, 0.05, 0.2):
            rejected, left = set(), sorted(range(6), key=p_values.__getitem__)
            while left and p_values[left[0]] <= level / len(left):
                rejected.add(left.pop(0))
            assert {index for index in range(6) if corrected[index] <= level} == rejected


def test_each_scheme_keeps_the_rate_of_its_smallest_loss_and_is_compared_seed_by_seed() -> None:
    low, middle, high = LEARNING_RATES
    rows = [
        result("p3", lr, SEARCH_SEED, 0.5, loss)
        for lr, loss in ((low, 0.9), (middle, 0.7), (high, 0.8))
    ]
    rows += [
        result("qsgd:bits=2", lr, SEARCH_SEED, 0.5, loss)
        for lr, loss in ((low, 0.6), (middle, 0.7), (high, 0.8))
    ]
    rows += [result("int8", low, SEARCH_SEED, 0.5)]
    assert found_rates(rows) == {"p3": middle, "qsgd:bits=2": low}
    assert len(seed_runs(found_rates(rows), 3, 150)) == 6
    for seed in range(3):
        rows.append(result("p3", middle, seed, 0.70 + 0.01 * seed))
        rows.append(result("qsgd:bits=2", low, seed, 0.60 + 0.01 * seed + 0.001 * (seed == 1)))
        # Of another learning rate: no part of the comparison.
        rows.append(result("qsgd:bits=2", high, seed, 0.1))
    full, other = comparisons(rows)
    assert full.scheme == "p3" and other.lr == low
    assert other.change.mean == pytest.approx(-0.1 + 0.001 / 3)
    assert other.p_holm == other.p < 0.001
    assert "(differs)" in headroom.table_of(rows)[1][-1]
    assert "seeds: 3" in headroom.page_text(rows, "command", 0)
