"""Advice in words: whether the network is the bottleneck, and the cheapest change.

Changes are ordered by their cost to the user: another order of sending is free and exact, a faster
link costs money, and compression changes the numbers that are learned from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradlane.formats.rates import format_rate
from gradlane.planning.advice.causes import (
    BOTH,
    FASTER,
    GOAL,
    HOST,
    LATENCY,
    NETWORK,
    NONE,
    OTHER,
    RANKS,
    Cause,
    Explain,
    Place,
)
from gradlane.planning.advice.verdict import (
    OTHER_ROUNDINGS,
    RARE,
    SLOWER,
    Recommendation,
    offer_name,
    own_exact,
    verdict_on,
)
from gradlane.planning.simulation.grid import WORKER, SimulatedRow
from gradlane.planning.simulation.scenarios import DDP, FORMULAS, IN_NETWORK, RING_FUSED
from gradlane.training.node.rules import NODE_STRATEGIES
from gradlane.training.options.codec_options import RAW
from gradlane.training.options.strategy import ASGD

WORTHWHILE = 0.01
"""The least gain in scaling factor that counts."""
BASELINES = (
    DDP,
    *("wfbp", "slicing", "kvstore", "deferred-pull", "p3"),
    *OTHER_ROUNDINGS,
    *(IN_NETWORK, RING_FUSED, ASGD),
)
"""Strategies that stand for a training without gradlane's scheduling: the first simulated one."""

_LIMITS = {
    HOST: "the host is",
    LATENCY: "the latency is",
    RANKS: "ranks that compute more slowly are",
    OTHER: "neither host nor latency is",
}
_CAUSES = {
    NETWORK: "the network is the bottleneck",
    HOST: "the host is the bottleneck, not the network",
    BOTH: "the network and the host are the bottleneck together",
    LATENCY: "the latency is the bottleneck, not the rate of the link",
    RANKS: "ranks that compute more slowly are the bottleneck, not the network",
    OTHER: "neither the network nor the host is the bottleneck",
}
_WITHOUT_BOTH = "an unlimited link and a free host together"
_TOGETHER = {
    **dict.fromkeys((NETWORK, HOST, BOTH), _WITHOUT_BOTH),
    LATENCY: f"{_WITHOUT_BOTH} and no latency",
    **dict.fromkeys((RANKS, OTHER), f"{_WITHOUT_BOTH}, no latency and equally fast ranks"),
}


_NeedKey = tuple[int, int, str, str, str, float]
"""Key of a required link: all of a row but its rate."""


@dataclass(frozen=True)
class Change:
    """A change that the user could make."""

    kind: str
    """`nothing`, `strategy`, `link`, `compression`, or, where none of them reaches the goal alone,
    `link and compression`."""
    strategy: str
    rate_bps: float
    compression: float
    scaling_factor: float
    """The scaling factor with the change."""
    codec: str = RAW


@dataclass(frozen=True)
class ClusterAdvice:
    """The advice for one cluster."""

    workers: int
    ranks_per_node: int
    rate_bps: float
    bottleneck: str
    """As in `Cause`; `none` where the baseline reaches the goal."""
    cause: Cause | None
    """Cause of the baseline's waits; None where it reaches the goal."""
    baseline: str
    """The strategy that the change is compared with."""
    baseline_scaling_factor: float
    cheapest: Change | None
    """The cheapest change that reaches the goal; None if no simulated one does."""
    alternatives: list[Change]
    """Other kinds of change that reach the goal, the cheapest of each kind."""
    not_worth: list[str]
    """Changes without a gain."""
    verdict: Recommendation | None
    """The fastest of all that was asked for; None where only a formula was."""
    place: Place | None
    """The port or way that most of the waiting is for, where machines are not alike."""
    text: str
    """The advice in words."""

    def to_json(self) -> dict[str, Any]:
        """Return the answer with the units in its keys."""
        return asdict(self)


@dataclass(frozen=True)
class RequiredLink:
    """The slowest simulated link on which a strategy reaches the goal."""

    workers: int
    ranks_per_node: int
    strategy: str
    codec: str
    topology: str
    compression: float
    rate_bps: float | None
    """Least rate that reaches the goal; None if no simulated rate does."""
    from_slowest: bool
    """True if that is the slowest simulated rate, so that a slower one may do."""
    any_link: bool
    """False if not even a link of unlimited rate reaches the goal."""
    limit_beyond: str
    """The limit over a link of unlimited rate: `host`, `latency`, `ranks` or `other`; `none` where
    a link is enough."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields with the units in their keys."""
        return asdict(self)


def required_links(
    rows: Sequence[SimulatedRow], limit_beyond_link: Callable[[SimulatedRow], str]
) -> list[RequiredLink]:
    """Return the link that each strategy needs for the goal, by number of workers and
    compression.

    Args:
        rows: simulated, at all rates.
        limit_beyond_link: what keeps the cluster of a row from the goal over a link of unlimited
            rate; asked where no simulated rate reaches it.
    """
    needs = []
    for key, group in _by_need(rows).items():
        reached = _least_link(group)
        slowest = min(row.rate_bps for row in group)
        rate_bps = None if reached is None else reached.rate_bps
        beyond = NONE if reached is not None else limit_beyond_link(group[0])
        needs.append(RequiredLink(*key, rate_bps, rate_bps == slowest, beyond == NONE, beyond))
    return needs


def without_link(rows: Sequence[SimulatedRow]) -> list[SimulatedRow]:
    """Return the rows that `required_links` asks the limit of."""
    return [group[0] for group in _by_need(rows).values() if _least_link(group) is None]


def _by_need(rows: Sequence[SimulatedRow]) -> dict[_NeedKey, list[SimulatedRow]]:
    groups: dict[_NeedKey, list[SimulatedRow]] = {}
    for row in rows:
        # Under local updates a faster link is not what helps.
        if row.update == WORKER:
            groups.setdefault(_need_key(row), []).append(row)
    return groups


def _least_link(group: Sequence[SimulatedRow]) -> SimulatedRow | None:
    """Return the row with the slowest link that reaches the goal, of rows that differ in links."""
    # From the fastest link that reaches it down: a single slow one that does is chance.
    reached: SimulatedRow | None = None
    for row in sorted(group, key=lambda it: -it.rate_bps):
        if row.scaling_factor >= GOAL:
            reached = row
        elif reached is not None:
            break
    return reached


def text_of_required_links(needs: Sequence[RequiredLink]) -> list[str]:
    """Return a sentence for each number of workers."""
    sentences = []
    for nodes in dict.fromkeys((need.workers, need.ranks_per_node) for need in needs):
        rows_here = [need for need in needs if (need.workers, need.ranks_per_node) == nodes]
        least = min(need.compression for need in rows_here)
        strategies: dict[str, list[str]] = {}
        beyond: dict[str, list[str]] = {}
        for need in rows_here:
            if need.compression == least:
                group, key = (strategies, _rate_text(need))
                if not need.any_link:
                    group, key = (beyond, need.limit_beyond)
                group.setdefault(key, []).append(_link_name(need))
        parts = []
        if strategies:
            links = [f"{rate} with {', '.join(names)}" for rate, names in strategies.items()]
            parts.append(f"{_percent(GOAL)} takes {'; '.join(links)}")
        parts += [
            f"no link, however fast, reaches {_percent(GOAL)} with {', '.join(names)}, where then "
            f"{_LIMITS[limit]} the limit"
            for limit, names in beyond.items()
        ]
        sentences.append(f"{workers_on_nodes(*nodes)}: {'; '.join(parts)}.")
    return sentences


def workers_on_nodes(workers: int, ranks_per_node: int) -> str:
    """Return the number of workers as text, with their nodes if these have several."""
    if ranks_per_node == 1:
        return f"{workers} worker{'s' * (workers != 1)}"
    return f"{workers} workers on {workers // ranks_per_node} nodes of {ranks_per_node}"


def _link_name(need: RequiredLink) -> str:
    name = need.strategy if need.codec == RAW else f"{need.strategy} {need.codec}"
    return name if need.topology == "flat" else f"{name} ({need.topology})"


def _rate_text(need: RequiredLink) -> str:
    if need.rate_bps is None:
        return "a faster link than was simulated"
    rate = format_rate(need.rate_bps)
    return f"{rate} or less" if need.from_slowest else rate


def advise(
    rows: Sequence[SimulatedRow],
    needs: Sequence[RequiredLink],
    explain: Explain,
    find_place: Callable[[SimulatedRow], Place | None] = lambda row: None,
    host_part_s: Callable[[SimulatedRow], float] = lambda row: 0.0,
) -> list[ClusterAdvice]:
    """Return the advice for each number of workers and rate, in the order of the rows.

    Args:
        rows: simulated.
        needs: the links that the strategies of these rows need.
        explain: finds what a row waits for; asked for the baseline of each cluster that does not
            reach the goal.
        find_place: finds the port or way that a row waits for, where machines are not alike.
        host_part_s: finds how much shorter a row's step is with a host that costs nothing; asked
            where DDP is faster.
    """
    return [
        _advise_cluster(
            [row for row in rows if (row.workers, row.ranks_per_node) == (workers, each)],
            rate,
            {_need_key(need): need.any_link for need in needs},
            explain,
            find_place,
            host_part_s,
        )
        for workers, each, rate in _cells(rows)
    ]


def missing_goal(rows: Sequence[SimulatedRow]) -> list[SimulatedRow]:
    """Return the rows that `advise` asks the cause of."""
    return [row for row in baselines(rows) if row.scaling_factor < GOAL]


def baselines(rows: Sequence[SimulatedRow]) -> list[SimulatedRow]:
    """Return the row of each cluster that changes are compared with."""
    return [
        _baseline([row for row in rows if (row.workers, row.ranks_per_node, row.rate_bps) == cell])
        for cell in _cells(rows)
    ]


def _cells(rows: Sequence[SimulatedRow]) -> list[tuple[int, int, float]]:
    return list(dict.fromkeys((row.workers, row.ranks_per_node, row.rate_bps) for row in rows))


def _baseline(rows_here: Sequence[SimulatedRow]) -> SimulatedRow:
    """Return the row that changes are compared with, of those of one cluster and rate."""
    rows_here = _with_own_results(rows_here)
    least = min(row.compression for row in rows_here)
    plain = [row for row in rows_here if row.compression == least]
    return min(plain, key=lambda row: BASELINES.index(row.strategy))


def _with_own_results(rows: Sequence[SimulatedRow]) -> list[SimulatedRow]:
    """Return the rows that learn what DDP does; all, where only others were simulated."""
    return [row for row in rows if row.strategy != ASGD and row.update == WORKER] or list(rows)


def _need_key(it: SimulatedRow | RequiredLink) -> _NeedKey:
    return (it.workers, it.ranks_per_node, it.strategy, it.codec, it.topology, it.compression)


def _advise_cluster(
    rows: list[SimulatedRow],
    rate_bps: float,
    link_is_enough: Mapping[_NeedKey, bool],
    explain: Explain,
    find_place: Callable[[SimulatedRow], Place | None],
    host_part_s: Callable[[SimulatedRow], float],
) -> ClusterAdvice:
    """Return the advice for one rate; `rows` are all with the same workers on the same nodes."""
    asked = [row for row in rows if row.rate_bps == rate_bps]
    rows = _with_own_results(rows)
    rows_here = [row for row in rows if row.rate_bps == rate_bps]
    baseline = _baseline(rows_here)
    plain = [row for row in rows_here if row.compression == baseline.compression]
    changes = _possible_changes(rows, rows_here, baseline)
    enough = [change for change in changes if change.scaling_factor >= GOAL]
    cause = None
    if baseline.scaling_factor < GOAL:
        cause = explain(baseline, link_is_enough[_need_key(baseline)])
    not_worth = _not_worth(rows, plain, baseline)
    # Codecs and local updates have a compression of their own.
    whole = [
        row
        for row in asked
        if row.codec != RAW or row.update != WORKER or row.compression == baseline.compression
    ]
    verdict = verdict_on(whole)
    own = own_exact(whole)
    slower = []
    place = None
    for row in (baseline, *([] if own is None or own is baseline else [own])):
        if row.scaling_factor < GOAL and place is None and row.strategy not in FORMULAS:
            place = find_place(row)
    if place is not None:
        slower.append(place.text)
    if own is not None and verdict is not None and verdict.beside_ddp == SLOWER:
        part_s = host_part_s(own)
        if part_s >= WORTHWHILE * own.step_s:
            slower.append(
                f"With a host that costs nothing {offer_name(own)} would take "
                f"{_ms(own.step_s - part_s)} a step."
            )
    return ClusterAdvice(
        workers=baseline.workers,
        ranks_per_node=baseline.ranks_per_node,
        rate_bps=rate_bps,
        bottleneck=NONE if cause is None else cause.bottleneck,
        cause=cause,
        baseline=baseline.strategy,
        baseline_scaling_factor=baseline.scaling_factor,
        cheapest=enough[0] if enough else None,
        alternatives=enough[1:],
        not_worth=not_worth,
        verdict=verdict,
        place=place,
        text=_text(baseline, verdict, cause, changes, enough, not_worth, slower),
    )


def _possible_changes(
    rows: list[SimulatedRow], rows_here: list[SimulatedRow], baseline: SimulatedRow
) -> list[Change]:
    """Return the cheapest change of each kind that reaches the goal, else the one that gets
    closest.

    If another strategy is enough, a faster link and fewer bytes are listed alone, too. A faster
    link together with fewer bytes is listed if neither is enough.
    """
    strategies = [row for row in rows_here if row.compression == baseline.compression]
    is_enough = any(row.scaling_factor >= GOAL for row in strategies)
    if is_enough:
        rows = [row for row in rows if _strategy_name(row) == _strategy_name(baseline)]
    kinds = {
        "nothing": [baseline],
        "strategy": [row for row in strategies if row.strategy != baseline.strategy],
        "link": _rows_with_faster_link(rows, baseline),
        "compression": _rows_with_compression(rows, baseline),
    }
    changes = [
        _cheapest_change(kind, candidates) for kind, candidates in kinds.items() if candidates
    ]
    both = [
        row
        for row in rows
        if row.rate_bps > baseline.rate_bps and row.compression > baseline.compression
    ]
    if both and all(change.scaling_factor < GOAL for change in changes):
        changes.append(_cheapest_change("link and compression", both))
    return changes


def _rows_with_faster_link(rows: list[SimulatedRow], baseline: SimulatedRow) -> list[SimulatedRow]:
    """Return the rows that differ by a faster link only."""
    return [
        row
        for row in rows
        if row.rate_bps > baseline.rate_bps and row.compression == baseline.compression
    ]


def _rows_with_compression(rows: list[SimulatedRow], baseline: SimulatedRow) -> list[SimulatedRow]:
    """Return the rows that differ by fewer bytes only."""
    return [
        row
        for row in rows
        if row.rate_bps == baseline.rate_bps and row.compression > baseline.compression
    ]


def _cheapest_change(kind: str, candidates: list[SimulatedRow]) -> Change:
    """Return the cheapest row that reaches the goal, else the one that gets closest."""
    enough = [row for row in candidates if row.scaling_factor >= GOAL]
    best = min(enough, key=_cost) if enough else max(candidates, key=lambda row: row.scaling_factor)
    return Change(
        kind, best.strategy, best.rate_bps, best.compression, best.scaling_factor, best.codec
    )


def _cost(row: SimulatedRow) -> tuple[float, float, bool, float]:
    # A formula without host costs is too optimistic.
    return row.rate_bps, row.compression, row.strategy == RING_FUSED, -row.scaling_factor


def _not_worth(
    rows: list[SimulatedRow], plain: list[SimulatedRow], baseline: SimulatedRow
) -> list[str]:
    reached = max(row.scaling_factor for row in plain)
    found = []
    for row in plain:
        gain = row.scaling_factor - baseline.scaling_factor
        if row is not baseline and abs(gain) < WORTHWHILE:
            found.append(
                f"{_strategy_name(row)} instead of {_strategy_name(baseline)} ({_points(gain)})"
            )
    faster = _rows_with_faster_link(rows, baseline)
    fewer = _rows_with_compression(rows, baseline)
    others = {
        f"a link of {format_rate(max((row.rate_bps for row in faster), default=0.0))}": faster,
        f"{max((row.compression for row in fewer), default=0.0):g} times fewer bytes": fewer,
    }
    for what, candidates in others.items():
        if candidates:
            gain = max(row.scaling_factor for row in candidates) - reached
            if gain < WORTHWHILE:
                found.append(f"{what} ({_points(gain)} at most)")
    return found


def _text(
    baseline: SimulatedRow,
    verdict: Recommendation | None,
    cause: Cause | None,
    changes: list[Change],
    enough: list[Change],
    not_worth: list[str],
    further: list[str],
) -> str:
    nodes = workers_on_nodes(baseline.workers, baseline.ranks_per_node)
    where = f"{nodes} at {format_rate(baseline.rate_bps)}: "
    reached = _percent(baseline.scaling_factor)
    sentences = []
    if verdict is not None and verdict.text:
        sentences = [f"{where}{verdict.text}."]
        where = ""
    if cause is None:
        waits = _sentence(
            f"{where}the network is not the bottleneck; {_strategy_name(baseline)} reaches "
            f"{reached}."
        )
        sentences.append(waits)
    else:
        waits = _sentence(
            f"{where}{_CAUSES[cause.bottleneck]}; {_strategy_name(baseline)} reaches {reached}, "
            f"{_ms(cause.waiting_s)} of a step of {_ms(baseline.step_s)} is waiting."
        )
        sentences += [
            waits,
            f"A link {FASTER:g} times as fast would save {_ms(cause.saved_by_faster_link_s)} of "
            f"it, a host that costs nothing {_ms(cause.saved_by_free_host_s)}, {FASTER:g} times "
            f"fewer bytes {_ms(cause.saved_by_fewer_bytes_s)}; "
            f"{_ms(cause.saved_together_s)} would go with {_TOGETHER[cause.bottleneck]}.",
        ]
        if enough:
            sentences.append(
                f"The cheapest change that reaches {_percent(GOAL)}: {_change_text(enough[0])}."
            )
            if len(enough) > 1:
                others = "; ".join(_change_text(change) for change in enough[1:])
                sentences.append(f"So would: {others}.")
        else:
            best = max(changes, key=lambda change: change.scaling_factor)
            most = f"; the most is {_change_text(best)}"
            if best.kind == "nothing":
                most = f", or more than {_strategy_name(baseline)}"
            here = "here"
            if verdict is not None and any(offer.cost == RARE for offer in verdict.offers):
                here = "here with an exchange in each step"
            sentences.append(f"Nothing simulated {here} reaches {_percent(GOAL)}{most}.")
    sentences += further
    if not_worth:
        sentences.append(f"Not worth it: {'; '.join(not_worth)}.")
    return " ".join(sentences)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _change_text(change: Change) -> str:
    reaches = f"({_percent(change.scaling_factor)})"
    if change.kind == "strategy" and change.strategy == RING_FUSED:
        return f"{RING_FUSED}, a formula that charges hosts nothing {reaches}"
    if change.kind == "strategy" and change.strategy in NODE_STRATEGIES:
        return (
            f"aggregate in the node first ({change.strategy}), free, with other roundings {reaches}"
        )
    if change.kind == "strategy" and change.strategy in OTHER_ROUNDINGS:
        return f"{change.strategy}, free, with other roundings {reaches}"
    if change.kind == "strategy":
        return f"{change.strategy}, exact and free {reaches}"
    link = f"a link of {format_rate(change.rate_bps)}"
    fewer = f"{change.compression:g} times fewer bytes"
    what = {"link": link, "compression": fewer}.get(change.kind, f"{link} and {fewer}")
    coded = "" if change.codec == RAW else f" in {change.codec}"
    return f"{what} with {change.strategy}{coded} {reaches}"


def _strategy_name(row: SimulatedRow) -> str:
    return row.strategy if row.topology == "flat" else f"{row.strategy} ({row.topology})"


def _ms(time_s: float) -> str:
    return f"{max(0.0, time_s) * 1e3:.0f} ms"


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _points(gain: float) -> str:
    # Rounded first: "-0.0" would claim a loss.
    return f"{round(gain * 100, 1) + 0.0:+.1f} points"
