"""The fastest of all that was asked for, exact or not, each with its cost, beside DDP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradlane.planning.simulation.grid import WORKER, SimulatedRow
from gradlane.planning.simulation.scenarios import (
    DDP,
    IN_NETWORK,
    RING_FUSED,
    SCHEME_STRATEGIES,
)
from gradlane.training.monitoring.summary import WORTH_A_MOVE
from gradlane.training.node.rules import NODE_STRATEGIES
from gradlane.training.options.codec_options import RAW
from gradlane.training.options.strategy import ASGD, RING

OTHER_ROUNDINGS = (RING, *SCHEME_STRATEGIES, *NODE_STRATEGIES)
"""Strategies whose sums differ from those of servers in the last bits only."""
EXACT, ROUNDINGS, SWITCH, BITS = "exact", "roundings", "switch", "bits"
RARE, STALE = "rare", "stale"
COSTS = {
    EXACT: "with exact gradients",
    ROUNDINGS: "with sums in another order, and so other roundings",
    SWITCH: "with a switch that adds up",
    BITS: "with gradients of fewer bits, which changes what is learned",
    RARE: "with rare exchanges, which changes what is learned",
    STALE: "with gradients that are applied late, which changes what is learned",
}
"""Kinds of costs, the smallest first."""
LEARNING = {
    EXACT: "the same",
    ROUNDINGS: "other roundings",
    SWITCH: "the same, by a switch",
    BITS: "from fewer bits",
    RARE: "from rare exchanges",
    STALE: "from late gradients",
}
"""The same in a cell of a table."""
FASTER, TIE, SLOWER = "faster", "tie", "slower"


@dataclass(frozen=True)
class Offer:
    """The fastest of what costs the same."""

    name: str
    """Strategy, with its codec if it has one."""
    cost: str
    """A key of `COSTS`."""
    step_s: float


@dataclass(frozen=True)
class Recommendation:
    """What is fastest on one cluster, and what it costs."""

    offers: tuple[Offer, ...]
    """The fastest of each kind of cost, the smallest cost first."""
    fastest: Offer
    """Of these, the cheapest that no other beats by 2 %."""
    beside_ddp: str | None
    """gradlane's fastest exact strategy: `faster`, `tie` (within 2 %) or `slower`; None: one of
    the two was not simulated."""
    text: str
    """In words; empty where there is nothing to compare."""


def cost_of(row: SimulatedRow) -> str | None:
    """Return the kind of cost of a row; None for a formula that charges hosts nothing."""
    if row.strategy == RING_FUSED:
        return None
    if row.strategy == ASGD:
        return STALE
    if row.update != WORKER:
        return RARE
    if row.codec != RAW:
        return BITS
    if row.strategy == IN_NETWORK:
        return SWITCH
    # Two numbers have one sum, whoever adds them.
    is_ring_of_two = row.strategy == RING and row.workers == 2
    return ROUNDINGS if row.strategy in OTHER_ROUNDINGS and not is_ring_of_two else EXACT


def offer_name(row: SimulatedRow) -> str:
    """Return the strategy of a row, with its codec."""
    name = "DDP" if row.strategy == DDP else row.strategy
    if row.update != WORKER:
        name += f" with {row.update}"
    return name if row.codec == RAW else f"{name} in {row.codec}"


def own_exact(rows: Sequence[SimulatedRow]) -> SimulatedRow | None:
    """Return the fastest exact row that is not DDP's."""
    own = [row for row in rows if cost_of(row) == EXACT and row.strategy != DDP]
    return min(own, key=lambda row: row.step_s, default=None)


def verdict_on(rows: Sequence[SimulatedRow]) -> Recommendation | None:
    """Compare the rows of one cluster, all with the same bytes but for codecs.

    Returns:
        None if only formulas that charge hosts nothing were simulated.
    """
    best: dict[str, SimulatedRow] = {}
    for row in rows:
        cost = cost_of(row)
        if cost is not None and (cost not in best or row.step_s < best[cost].step_s):
            best[cost] = row
    offers = tuple(
        Offer(offer_name(best[cost]), cost, best[cost].step_s) for cost in COSTS if cost in best
    )
    if not offers:
        return None
    fastest = offers[0]
    for offer in offers[1:]:
        if _is_faster(offer.step_s, fastest.step_s):
            fastest = offer
    ddp = next((row for row in rows if row.strategy == DDP), None)
    own = own_exact(rows)
    beside = None
    if ddp is not None and own is not None:
        beside = SLOWER if _is_faster(ddp.step_s, own.step_s) else TIE
        beside = FASTER if _is_faster(own.step_s, ddp.step_s) else beside
    text = _text(offers, fastest, ddp, own, beside) if len(rows) > 1 else ""
    return Recommendation(offers, fastest, beside, text)


def _is_faster(step_s: float, other_s: float) -> bool:
    return other_s / step_s >= WORTH_A_MOVE


def _text(
    offers: Sequence[Offer],
    fastest: Offer,
    ddp: SimulatedRow | None,
    own: SimulatedRow | None,
    beside: str | None,
) -> str:
    parts = []
    stay = "stay with DDP" if fastest.cost == EXACT else "for exact gradients stay with DDP"
    if ddp is not None and own is not None:
        name, takes, ddp_takes = offer_name(own), _ms(own.step_s), _ms(ddp.step_s)
        parts.append(
            {
                FASTER: f"{name} takes {takes} a step, DDP {ddp_takes}: "
                f"{ddp.step_s / own.step_s:.2f}x faster, {COSTS[EXACT]}",
                TIE: f"{name} and DDP tie, at {takes} and {ddp_takes} a step: {stay}",
                SLOWER: f"gradlane's {name} is slower than DDP, {takes} a step against "
                f"{ddp_takes}: {stay}",
            }[beside or TIE]
        )
    elif offers[0].cost == EXACT:
        parts.append(f"{offers[0].name} takes {_ms(offers[0].step_s)} a step")
    known_s = offers[0].step_s if offers[0].cost == EXACT else None
    for offer in offers if known_s is None else offers[1:]:
        takes = f"{_ms(offer.step_s)} a step"
        if known_s is not None and not _is_faster(offer.step_s, known_s):
            parts.append(f"{offer.name} is no faster, {takes} {COSTS[offer.cost]}")
            continue
        known_s = offer.step_s
        which = "is fastest of all:" if offer is fastest and len(offers) > 1 else "takes"
        times = "" if ddp is None else f", {ddp.step_s / offer.step_s:.2f}x as fast as DDP"
        parts.append(f"{offer.name} {which} {takes}{times}, {COSTS[offer.cost]}")
    return "; ".join(parts)


def _ms(time_s: float) -> str:
    return f"{time_s * 1e3:.0f} ms"
