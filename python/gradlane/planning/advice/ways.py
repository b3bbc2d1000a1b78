"""The first way that is enough: exactly, else in fewer bits, else with fewer exchanges.

Ways that change what is learned are looked at only where the user allows them, the smallest change
first; how much each changes on small networks is in `docs/between-nodes.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradlane.formats.rates import format_rate
from gradlane.planning.advice.advice import workers_on_nodes
from gradlane.planning.advice.causes import GOAL
from gradlane.planning.advice.verdict import offer_name
from gradlane.planning.simulation.grid import WORKER, SimulatedRow
from gradlane.planning.simulation.scenarios import FORMULAS, IN_NETWORK, Cluster
from gradlane.training.options.codec_options import RAW
from gradlane.training.options.local_updates import AVERAGE, Local, parse_local
from gradlane.training.options.strategy import ASGD, Strategy

BITS, EXCHANGES = KINDS = ("bits", "exchanges")
"""What may be fewer, the smaller change first."""
CODECS = ("bf16", "qsgd:bits=8", "qsgd:bits=4")
"""Fewer bits, in the order in which they are tried."""
LOCALS = (
    (Local(steps=8, outer=AVERAGE), RAW),
    (Local(steps=32), RAW),
    (Local(steps=32), "qsgd:bits=8"),
    (Local(steps=32, fragments=4, overlap_steps=8, mix=0.5), "qsgd:bits=8"),
    (Local(steps=128), "qsgd:bits=8"),
    (Local(steps=128, fragments=4, overlap_steps=32, mix=0.5), "qsgd:bits=8"),
)
"""Fewer exchanges, with their codec, in the order in which they are tried; an overlapped one after
the plain one of as many steps."""
SPARSE_LOCALS = (Local(steps=32, outer=AVERAGE), Local(steps=128, outer=AVERAGE))
"""Fewer exchanges of few values, tried last."""
SPARSE_RATIO = 0.02


def sparse_codec(copies: int) -> str:
    """Return SparseLoCo's codec, with room for the values of all copies on the way back.

    Args:
        copies: of the model that train by themselves.
    """
    broadcast_ratio = min(1.0, SPARSE_RATIO * copies)
    return (
        f"topk:ratio={SPARSE_RATIO},broadcast_ratio={broadcast_ratio:g},"
        "bits=2,bucket=4096,decay=0.95"
    )


@dataclass(frozen=True)
class Ways:
    """What was tried on one cluster.

    Attributes:
        tried: exact ones, then those in fewer bits and those with fewer exchanges, as far as they
            were looked at; nothing after the first that is enough.
        chosen: the first that is enough, else the fastest.
        is_enough: whether it reaches the goal.
        text: in words.
    """

    tried: tuple[SimulatedRow, ...]
    chosen: SimulatedRow
    is_enough: bool
    text: str

    def to_json(self) -> dict[str, Any]:
        """Return it with the rows of what was tried."""
        return {
            "tried": [row.to_json() for row in self.tried],
            "chosen": self.tried.index(self.chosen),
            "is_enough": self.is_enough,
            "text": self.text,
        }


def find_ways(
    clusters: Sequence[Cluster],
    rows: Sequence[SimulatedRow],
    allowed: Sequence[str],
    simulate: Callable[[Cluster], SimulatedRow],
) -> list[Ways]:
    """Find the first way that is enough, for each number of workers and rate.

    Args:
        clusters: simulated, some of them exactly.
        rows: of these.
        allowed: of `KINDS`.
        simulate: simulates another cluster.

    Raises:
        ValueError: no exact strategy of gradlane's was simulated.
    """
    cells: dict[tuple[int, int, float], list[tuple[Cluster, SimulatedRow]]] = {}
    for cluster, row in zip(clusters, rows, strict=True):
        is_exact = row.codec == RAW and row.update == WORKER and cluster.compression == 1.0
        if is_exact and row.strategy not in (ASGD, IN_NETWORK, "ring-fused"):
            cell = (row.workers, row.ranks_per_node, row.rate_bps)
            cells.setdefault(cell, []).append((cluster, row))
    if not cells:
        raise ValueError("--fewer compares with exact training: simulate p3 without a codec, too")
    return [_ways_of(exact, allowed, simulate) for exact in cells.values()]


def _ways_of(
    exact: Sequence[tuple[Cluster, SimulatedRow]],
    allowed: Sequence[str],
    simulate: Callable[[Cluster], SimulatedRow],
) -> Ways:
    tried = sorted((row for _, row in exact), key=lambda row: row.step_s)
    fastest = [cluster for cluster, _ in sorted(exact, key=lambda one: one[1].step_s)]
    engine = [cluster for cluster in fastest if cluster.strategy not in FORMULAS]
    base = engine[0] if engine else replace(fastest[0], strategy=Strategy.name)
    if tried[0].scaling_factor < GOAL:
        tried += smaller_changes(base, allowed, simulate)
    enough = [row for row in tried if row.scaling_factor >= GOAL]
    chosen = enough[0] if enough else min(tried, key=lambda row: row.step_s)
    return Ways(tuple(tried), chosen, bool(enough), _text(tried, chosen, bool(enough), allowed))


def smaller_changes(
    base: Cluster,
    allowed: Sequence[str],
    simulate: Callable[[Cluster], SimulatedRow],
    may_be_enough: Callable[[Cluster], bool] = lambda cluster: True,
) -> list[SimulatedRow]:
    """Simulate changes of what is learned, the smallest first, up to one that is enough.

    Args:
        base: the cluster, trained exactly.
        allowed: of `KINDS`.
        simulate: simulates a cluster.
        may_be_enough: whether one is worth its simulation.
    """
    found: list[SimulatedRow] = []
    for cluster in filter(may_be_enough, candidates(base, allowed)):
        found.append(simulate(cluster))
        if found[-1].scaling_factor >= GOAL:
            break
    return found


def candidates(base: Cluster, allowed: Sequence[str]) -> list[Cluster]:
    """Return changes of what is learned, the smallest first.

    Args:
        base: the cluster, trained exactly.
        allowed: of `KINDS`.
    """
    found = []
    if BITS in allowed:
        found += [replace(base, codec=codec) for codec in CODECS]
    if EXCHANGES in allowed:
        copies = base.workers // (base.ranks_per_node if base.sharded else 1)
        ways = [*LOCALS, *((local, sparse_codec(copies)) for local in SPARSE_LOCALS)]
        found += [replace(base, update=local, codec=codec) for local, codec in ways]
    return found


def _text(
    tried: Sequence[SimulatedRow], chosen: SimulatedRow, is_enough: bool, allowed: Sequence[str]
) -> str:
    exact = tried[0]
    where = (
        f"{workers_on_nodes(exact.workers, exact.ranks_per_node)} at {format_rate(exact.rate_bps)}"
    )
    facts = [
        f"{chosen.step_s * 1e3:.3g} ms a step",
        f"{chosen.scaling_factor:.1%} of compute alone",
    ]
    if chosen.tx_bytes_per_step is not None:
        facts.append(f"{_mb(chosen.tx_bytes_per_step)} a step through a port")
    if chosen.outer_bytes:
        facts.append(f"{_mb(chosen.outer_bytes)} more memory a rank")
    if chosen.update != WORKER or chosen.codec != RAW:
        facts.append(f"gradlane.init({_arguments(chosen)})")
    name = f"{offer_name(chosen)} ({', '.join(facts)})"
    if chosen is exact and is_enough:
        return f"{where}: exact training is enough, with {name}."
    reached = f"exact training reaches {exact.scaling_factor:.1%}"
    if is_enough:
        return (
            f"{where}: {reached}; the smallest change that is enough is {name}. It changes what is "
            "learned: docs/between-nodes.md says how much on a small language model."
        )
    missing = [kind for kind in KINDS if kind not in allowed]
    more = f"; fewer {' and '.join(missing)} were not allowed" if missing else ""
    return f"{where}: {reached}, and nothing is enough; the fastest is {name}{more}."


def _arguments(row: SimulatedRow) -> str:
    """Return what to write in `gradlane.init` for a way that changes what is learned."""
    found = []
    if row.update != WORKER:
        found.append(f"update=gradlane.{parse_local(row.update)!r}")
    if row.codec != RAW:
        found.append(f'codec="{row.codec}"')
    return ", ".join(found)


def _mb(size_bytes: float) -> str:
    size = size_bytes / 1e6
    return f"{size:.0f} MB" if size >= 100 else f"{size:.3g} MB"
