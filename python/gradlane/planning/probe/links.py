"""Measurement of the links between the ranks of a real cluster: plain TCP streams and round trips.

All ranks take part, in phases that begin and end together: round trips between pairs; a stream
around all ranks, so that every port sends and receives at once; streams in one direction at a time.
Every rank reports the end of a phase to rank 0, which starts the next one. A failure is reported
the same way, and all ranks raise the same error. Every wait has a limit.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from gradlane.errors import RendezvousError
from gradlane.formats.authentication import derived_key
from gradlane.formats.link_report import LinkReport, PortFigures, RoundTrip
from gradlane.planning.probe.stream_endpoint import StreamEndpoint, StreamError
from gradlane.training.connection import SessionContext, listening_hosts
from gradlane.training.rendezvous.rendezvous import RendezvousScope

_ROUND_TRIPS = 20
_DISTANCES_MOST = 4


def probe(
    ctx: SessionContext,
    scope: RendezvousScope,
    *,
    window_s: float = 1.0,
    directions: bool = True,
    on_phase: Callable[[str], None] = lambda text: None,
) -> LinkReport:
    """Measure bandwidth and latency between all ranks; a collective call.

    Args:
        ctx: of the session, with the addresses to listen on.
        scope: for this measurement alone.
        window_s: seconds of each measurement, after a quarter as long for the stream to find its
            rate.
        directions: whether ports are also measured in one direction at a time.
        on_phase: called with the name of each phase.

    Returns:
        The same report on every rank.

    Raises:
        ValueError: the window is not 0.05 to 60 seconds.
        RendezvousError: a rank did not appear, or two cannot reach each other; on every rank.
    """
    if not 0.05 <= window_s <= 60.0:
        raise ValueError(f"window_s is {window_s}; use 0.05 to 60 seconds")
    rank_info = scope.rank_info
    if rank_info.world_size == 1:
        return LinkReport(1, window_s)
    hosts, advertised = listening_hosts(ctx)
    # Of this measurement alone, so that a token of another one opens nothing.
    secret = derived_key(scope.secret(ctx.secret), "probe", scope.name)
    try:
        node = StreamEndpoint(rank_info.rank, hosts, ctx.options.network.ports, secret, window_s)
    except OSError as error:
        raise RendezvousError(
            f"rank {rank_info.rank} {error}: give interface= or ports="
        ) from error
    with node:
        peers = scope.exchange_addresses(advertised or node.host, node.port).called
        phases = _Phases(scope, node, peers, on_phase)
        round_trips = _measure_round_trips(phases)
        both = phases.run("both directions at once", _ring(rank_info.world_size, 1))
        one_way: list[dict[int, float]] = []
        if directions:
            for number, pairs in enumerate(one_way_pairs(rank_info.world_size)):
                one_way.append(phases.run(f"one direction, part {number + 1}", pairs))
        own_results = {
            "round_trips": round_trips,
            "both": both,
            "one_way": one_way,
        }
        return _report(scope.exchange(own_results), rank_info.world_size, window_s)


class _Phases:
    """Phases that all ranks begin and end together."""

    def __init__(
        self,
        scope: RendezvousScope,
        node: StreamEndpoint,
        peers: Sequence[str],
        on_phase: Callable[[str], None],
    ) -> None:
        self._scope = scope
        self._node = node
        self._peers = peers
        self._on_phase = on_phase
        self._number = 0

    @property
    def rank(self) -> int:
        return self._scope.rank_info.rank

    @property
    def world_size(self) -> int:
        return self._scope.rank_info.world_size

    def run(self, phase: str, pairs: Sequence[tuple[int, int]]) -> dict[int, float]:
        """Stream from the first to the second rank of each pair.

        Returns:
            Payload bits a second that this rank received, by sending rank.
        """
        self._on_phase(phase)
        sends = [other for rank, other in pairs if rank == self.rank]
        receives = [rank for rank, other in pairs if other == self.rank]
        # All connections are made before any is used, so no rank waits inside its stream.
        self.synchronized(phase, lambda: self._node.connect(self._peers, sends, receives))
        rates: dict[int, float] = self.synchronized(phase, self._node.stream)
        return rates

    def round_trips(self, distance: int) -> float:
        """Measure the round-trip time to the rank at a distance, in seconds."""
        pairs = _ring(self.world_size, distance)
        sends = [other for rank, other in pairs if rank == self.rank]
        receives = [rank for rank, other in pairs if other == self.rank]
        phase = f"round trips over {distance}"
        self._on_phase(phase)
        self.synchronized(phase, lambda: self._node.connect(self._peers, sends, receives))
        times: list[float] = self.synchronized(phase, lambda: self._node.echo(_ROUND_TRIPS))
        return statistics.median(times)

    def synchronized(self, phase: str, work: Callable[[], Any]) -> Any:
        """Run this rank's part, and wait until all ranks have finished theirs.

        Raises:
            RendezvousError: some rank failed; the same text on every rank.
        """
        result, failure = None, ""
        try:
            result = work()
        except (OSError, StreamError) as error:
            failure = f"rank {self.rank}, measuring {phase}: {error}"
        self._number += 1
        scope, number = self._scope, self._number
        if self.rank == 0:
            failures = [failure]
            for other in range(1, self.world_size):
                failures.append(scope.get(f"done/{number}/{other}", other).decode())
            scope.put(f"go/{number}", next((text for text in failures if text), "ok"))
        else:
            scope.put(f"done/{number}/{self.rank}", failure)
        verdict = scope.get(f"go/{number}", 0).decode()
        if verdict != "ok":
            raise RendezvousError(
                f"{verdict}; check the firewall between the ranks, or give "
                "Network(interface=...) or advertise=, or GRADLANE_INTERFACE"
            )
        return result


def _measure_round_trips(phases: _Phases) -> dict[int, float]:
    """Return round-trip times to a few ranks, by rank."""
    world_size = phases.world_size
    distances = range(1, world_size // 2 + 1)
    if len(distances) > _DISTANCES_MOST:
        step = (len(distances) - 1) / (_DISTANCES_MOST - 1)
        distances = [1 + round(index * step) for index in range(_DISTANCES_MOST)]  # type: ignore[assignment]
    return {
        (phases.rank + distance) % world_size: phases.round_trips(distance)
        for distance in distances
    }


def _ring(world_size: int, distance: int) -> list[tuple[int, int]]:
    return [(rank, (rank + distance) % world_size) for rank in range(world_size)]


def one_way_pairs(world_size: int) -> list[list[tuple[int, int]]]:
    """Return phases in which no rank is in two pairs, so that each rank sends once and receives
    once."""
    even = [(rank, rank + 1) for rank in range(0, world_size - 1, 2)]
    phases = [even, [(other, rank) for rank, other in even]]
    if world_size % 2:
        last = [(world_size - 1, 0)]
        phases += [last, [(other, rank) for rank, other in last]]
    return phases


def _report(results: Sequence[dict[str, Any]], workers: int, window_s: float) -> LinkReport:
    """Combine the ranks' results, each measured at its receiving end."""
    both_in = [next(iter(one["both"].values())) for one in results]
    sent: dict[int, list[float]] = {}
    received: dict[int, list[float]] = {}
    for rank, one in enumerate(results):
        for phase in one["one_way"]:
            for sender, rate_bps in phase.items():
                received.setdefault(rank, []).append(rate_bps)
                sent.setdefault(int(sender), []).append(rate_bps)
    ports = tuple(
        PortFigures(
            rank=rank,
            send_bps=max(sent.get(rank, ()), default=None),
            receive_bps=max(received.get(rank, ()), default=None),
            both_send_bps=both_in[(rank + 1) % workers],
            both_receive_bps=both_in[rank],
        )
        for rank in range(workers)
    )
    round_trips = tuple(
        RoundTrip(rank, int(peer), round_trip_s)
        for rank, one in enumerate(results)
        for peer, round_trip_s in one["round_trips"].items()
    )
    return LinkReport(workers, window_s, ports, round_trips)
