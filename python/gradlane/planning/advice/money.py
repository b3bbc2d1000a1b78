"""What a training costs: time, money and whether other numbers are learned, in one table.

This is the trade-off of Grubic et al., "Synchronous Multi-GPU Deep Learning with Low-Precision
Communication" (2018), section 5.4, who ask for an optimizer that knows budgets: of all simulated
clusters it keeps those that no other one beats in time, in money and in what it does to the numbers
at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gradlane.formats.rates import format_rate, parse_rate
from gradlane.planning.advice.advice import workers_on_nodes
from gradlane.planning.advice.verdict import (
    BITS,
    LEARNING,
    RARE,
    STALE,
    cost_of,
    offer_name,
)
from gradlane.planning.simulation.grid import SimulatedRow

CHANGING = (BITS, RARE, STALE)
"""Costs that change what is learned."""
ALIKE = 1.01
"""Hours or prices that differ by a factor of no more are the same, as far as simulations tell."""
TRAINING_COLUMNS = ("price", "hours", "machines", "rate", "strategy", "what is learned")


@dataclass(frozen=True)
class Prices:
    """A training's length, and the price of a machine for an hour."""

    samples: float
    """Samples that the training sees, all epochs together."""
    by_rate: Mapping[float, float]
    """By the rate of a machine's port in bits a second; of all rates where there is only 0."""
    budget: float | None = None

    def of_machine(self, rate_bps: float) -> float:
        """Return the price of a machine for an hour.

        Raises:
            ValueError: that of a machine with such a port was not given.
        """
        price = self.by_rate.get(rate_bps, self.by_rate.get(0.0))
        if price is None:
            raise ValueError(
                f"--price has none of a machine at {format_rate(rate_bps)}: give one for each rate "
                "of --rate"
            )
        return price


@dataclass(frozen=True)
class Training:
    """What a whole training on a simulated cluster takes."""

    row: int
    """Its number among the rows."""
    machines: int
    hours: float
    price: float
    learning: str
    """A key of `LEARNING`."""
    is_beaten: bool
    """Whether another beats it."""


@dataclass(frozen=True)
class Trainings:
    """Those of all rows that cost hosts something, and the answer in words."""

    prices: Prices
    found: tuple[Training, ...]
    text: str

    @property
    def unbeaten(self) -> list[Training]:
        """Return those that no other beats, the cheapest first."""
        return sorted((one for one in self.found if not one.is_beaten), key=lambda it: it.price)

    def to_json(self) -> dict[str, Any]:
        """Return it with the rates of prices as text."""
        return {
            "samples": self.prices.samples,
            "budget": self.prices.budget,
            "trainings": [asdict(one) for one in self.found],
            "text": self.text,
        }


def parse_prices(samples: str | None, price: str | None, budget: float | None) -> Prices | None:
    """Read the options of a command line; None where there are none.

    Raises:
        ValueError: one is missing or no number; the text names it.
    """
    if samples is None and price is None and budget is None:
        return None
    if samples is None or price is None:
        raise ValueError("--samples, such as 90x1.28e6, and --price, such as 3.06, need each other")
    epochs, is_product, each = samples.rpartition("x")
    count = _number(each, "--samples") * (_number(epochs, "--samples") if is_product else 1.0)
    by_rate: dict[float, float] = {}
    for part in price.split(","):
        rate, has_rate, one = part.rpartition("=")
        by_rate[float(parse_rate(rate)) if has_rate else 0.0] = _number(one, "--price")
    if budget is not None:
        _number(str(budget), "--budget")
    return Prices(count, by_rate, budget)


def _number(text: str, option: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0.0 < number < math.inf:
        raise ValueError(f"{option} has {text.strip()!r}: use a number above 0")
    return number


def trainings_of(rows: Sequence[SimulatedRow], prices: Prices) -> Trainings:
    """Return what a training costs on each simulated cluster.

    Args:
        rows: simulated; formulas that charge hosts nothing are left out.
        prices: of the training.

    Raises:
        ValueError: a row's machines have no price.
    """
    found: list[Training] = []
    for number, row in enumerate(rows):
        learning = cost_of(row)
        if learning is None:
            continue
        machines = row.workers // row.ranks_per_node + row.serving
        hours = prices.samples / row.samples_per_s / 3600
        price = hours * machines * prices.of_machine(row.rate_bps)
        found.append(Training(number, machines, hours, price, learning, is_beaten=False))
    trainings = tuple(
        replace(one, is_beaten=any(_beats(other, one) for other in found)) for one in found
    )
    return Trainings(prices, trainings, _text(rows, trainings, prices))


def _beats(other: Training, own: Training) -> bool:
    """Return whether a training is no worse in hours, price and learning, and better in one."""
    ranks = list(LEARNING)
    changes = ranks.index(other.learning) - ranks.index(own.learning)
    shares = [other.hours / own.hours, other.price / own.price]
    is_better = changes < 0 or min(shares) < 1 / ALIKE
    return changes <= 0 and max(shares) <= ALIKE and is_better


def training_cells(training: Training, row: SimulatedRow) -> tuple[str, ...]:
    """Return the cells of `TRAINING_COLUMNS`."""
    return (
        f"{training.price:,.0f}" if training.price >= 10 else f"{training.price:.2f}",
        f"{training.hours:,.1f}",
        f"{training.machines}",
        format_rate(row.rate_bps),
        offer_name(row),
        LEARNING[training.learning],
    )


def _text(rows: Sequence[SimulatedRow], trainings: Sequence[Training], prices: Prices) -> str:
    within = [one for one in trainings if prices.budget is None or one.price <= prices.budget]
    if not within:
        least = min(trainings, key=lambda one: one.price, default=None)
        if least is None:
            return "No training to compare: simulate ddp or p3."
        return (
            f"Nothing simulated costs {prices.budget:,g} or less: the cheapest is "
            f"{_said(rows, least)}."
        )
    same = [one for one in within if one.learning not in CHANGING]
    said = f"Within {prices.budget:,g}, the" if prices.budget is not None else "The"
    if not same:
        fastest = min(within, key=_time)
        return f"{said} fastest is {_said(rows, fastest)}; it changes what is learned."
    least, fastest = min(same, key=_money), min(same, key=_time)
    cheapest = min((one for one in same if one.price <= ALIKE * least.price), key=_time)
    text = f"{said} cheapest training that learns the same is {_said(rows, cheapest)}"
    if cheapest.hours <= ALIKE * fastest.hours:
        text += ", and none is faster"
    else:
        text += f"; the fastest {_said(rows, fastest)}"
    text += "."
    changing = [one for one in within if one.learning in CHANGING]
    if changing:
        for name, key, best in (("faster", _time, fastest), ("cheaper", _money, least)):
            other = min(changing, key=key)
            if ALIKE * key(other) < key(best):
                text += f" {name.capitalize()} with other numbers: {_said(rows, other)}."
        text += (
            " How much accuracy that costs small networks: docs/accuracy.md, docs/between-nodes.md."
        )
    return text


def _time(training: Training) -> float:
    return training.hours


def _money(training: Training) -> float:
    return training.price


def _said(rows: Sequence[SimulatedRow], training: Training) -> str:
    row = rows[training.row]
    where = f"{workers_on_nodes(row.workers, row.ranks_per_node)} at {format_rate(row.rate_bps)}"
    price, hours, *_ = training_cells(training, row)
    return f"{offer_name(row)} on {where}: {price} in {hours} hours"
