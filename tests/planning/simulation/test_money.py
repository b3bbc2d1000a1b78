"""What a whole training costs: prices by hand, and the table by exhaustion."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradlane.planning.advice.money import Training, parse_prices, trainings_of
from gradlane.planning.advice.verdict import LEARNING
from gradlane.planning.simulation.grid import SimulatedRow, evaluate
from gradlane.planning.simulation.profiles import synthetic_profile
from gradlane.planning.simulation.scenarios import Cluster
from tests.command_line import run

(ROW,) = evaluate(synthetic_profile("resnet50"), [Cluster(4, 1e10, free_host=True)])


def row(workers: int, samples_per_s: float, rate_bps: float = 1e10, **other: Any) -> SimulatedRow:
    return replace(
        ROW,
        workers=workers,
        samples_per_s=samples_per_s,
        rate_bps=rate_bps,
        **other,
    )


def text_of(rows: list[SimulatedRow], samples: str, price: str, budget: float | None = None) -> str:
    prices = parse_prices(samples, price, budget)
    assert prices is not None
    return trainings_of(rows, prices).text


def test_prices_are_those_of_machines_for_hours() -> None:
    prices = parse_prices("2x1.8e6", "1gbit=2,10gbit=3", None)
    assert prices is not None
    rows = [
        row(4, 100.0, 1e9),
        row(8, 100.0, ranks_per_node=4),
        row(4, 50.0, serving=2),
    ]
    found = trainings_of(rows, prices).found
    # Ten hours of four machines at 2, ten of two at 3, twenty of four and two servers at 3.
    assert [(one.machines, one.hours, one.price) for one in found] == [
        (4, 10.0, 80.0),
        (2, 10.0, 60.0),
        (6, 20.0, 360.0),
    ]
    assert [one.is_beaten for one in found] == [True, False, True]


def test_the_answer_in_words() -> None:
    exact = [row(2, 60.0), row(4, 100.0), row(8, 110.0)]
    said = text_of(exact, "3.6e6", "1")
    assert "cheapest training that learns the same is p3 on 2 workers" in said
    assert "the fastest p3 on 8 workers" in said and "other numbers" not in said
    said = text_of(exact, "3.6e6", "1", 45)
    assert said.startswith("Within 45, the cheapest") and "the fastest p3 on 4 workers" in said
    said = text_of(exact, "3.6e6", "1", 10)
    assert said.startswith("Nothing simulated costs 10 or less: the cheapest is p3 on 2 workers")
    fewer = [*exact, row(2, 120.0, codec="qsgd:bits=8")]
    said = text_of(fewer, "3.6e6", "1")
    assert "Faster with other numbers: p3 in qsgd:bits=8" in said
    assert "Cheaper with other numbers: p3 in qsgd:bits=8" in said and "docs/accuracy.md" in said
    said = text_of(fewer[-1:], "3.6e6", "1")
    assert "fastest is p3 in qsgd:bits=8" in said and "it changes what is learned" in said


def test_a_difference_of_less_than_a_per_cent_is_none() -> None:
    said = text_of([row(2, 100.0), row(8, 399.0)], "3.6e6", "1")
    assert "cheapest training that learns the same is p3 on 8 workers" in said
    assert "none is faster" in said


@pytest.mark.parametrize("seed", range(8))
def test_what_is_left_is_what_nothing_beats(seed: int) -> None:
    rng = random.Random(seed)
    rows = [
        row(rng.choice((2, 4, 8)), rng.choice((50.0, 100.0, 200.0)), codec=codec)
        for codec in rng.choices(("raw", "qsgd:bits=8"), k=12)
    ]
    prices = parse_prices("1e6", "2.5", None)
    assert prices is not None
    found = trainings_of(rows, prices)

    def costs(one: Training) -> tuple[float, float, int]:
        return one.hours, one.price, list(LEARNING).index(one.learning)

    for own in found.found:
        others = [costs(other) for other in found.found if costs(other) != costs(own)]
        beaten = [
            other for other in others if all(a <= b for a, b in zip(other, costs(own), strict=True))
        ]
        assert own.is_beaten == bool(beaten), (seed, own, beaten)
    assert [one.price for one in found.unbeaten] == sorted(one.price for one in found.unbeaten)


@pytest.mark.parametrize(
    ("samples", "price", "budget", "named"),
    [
        ("9e6", None, None, "--price"),
        (None, "3", None, "--samples"),
        (None, None, 100.0, "--samples"),
        ("9y", "3", None, "--samples has '9y'"),
        ("0x9", "3", None, "--samples has '0'"),
        ("9", "10gbit=", None, "--price has ''"),
        ("9", "inf", None, "--price has 'inf'"),
        ("9", "3", -1.0, "--budget has '-1.0'"),
    ],
)
def test_what_is_no_number_is_named(
    samples: str | None, price: str | None, budget: float | None, named: str
) -> None:
    with pytest.raises(ValueError, match=named.replace("(", r"\(")):
        parse_prices(samples, price, budget)


def test_a_rate_without_a_price_is_named() -> None:
    prices = parse_prices("9e6", "1gbit=2", None)
    assert prices is not None
    with pytest.raises(ValueError, match="at 10 Gbit/s"):
        trainings_of([ROW], prices)


def test_the_command_prints_and_writes_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "whatif.json"
    asked = ("resnet50", "--workers", "4", "--rate", "1gbit", "--samples", "90x1.28e6")
    status, printed, errors = run(
        monkeypatch, capsys, "whatif", *asked, "--price", "3.06", "--json", str(path)
    )
    assert status == 0, errors
    assert "115,200,000 samples, each worker with its batch of 32" in printed
    trainings = json.loads(path.read_text(encoding="utf-8"))["trainings"]
    assert trainings["text"].split(":")[0] in " ".join(printed.split())
    assert {one["row"] for one in trainings["trainings"]} == {0, 1}
