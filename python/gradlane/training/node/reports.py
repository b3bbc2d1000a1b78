"""Counters and traces of a node's channel, with ranks of the world in place of nodes."""

from __future__ import annotations

import json
from typing import Any

from gradlane.training.core import CoreRow
from gradlane.training.node.collective_queue import CollectiveQueue
from gradlane.training.node.devices import SumBackend
from gradlane.training.node.layout import NodeLayout
from gradlane.training.node.leader import NodeLeader
from gradlane.training.node.wait_stats import WaitStats


class NodeReports:
    """What a node's channel reports.

    Attributes:
        local_bytes: bytes that this rank has copied within its node.
    """

    def __init__(
        self,
        leader: NodeLeader | None,
        collectives: CollectiveQueue | None,
        layout: NodeLayout,
        sum_backend: SumBackend,
        waits: WaitStats,
    ) -> None:
        """Begin with nothing copied.

        Args:
            leader: this rank's; None unless it is one.
            collectives: where gradients are added up on their device, or None.
            layout: of the nodes.
            sum_backend: where a node's sums are made.
            waits: of this rank's threads.
        """
        self._leader = leader
        self._collectives = collectives
        self._layout = layout
        self._sum_backend = sum_backend
        self._waits = waits
        self.local_bytes = 0

    def metrics_json(self) -> str:
        """Return counters as a JSON object: the network's on a leader, and waits."""
        reading: dict[str, Any] = {}
        if self._leader is not None:
            reading = json.loads(self._leader.channel.metrics_json())
        world_size = self._layout.nodes * self._layout.local_size
        for table in ("peers", "stragglers"):
            by_node = reading.get(table, [])
            empty = dict.fromkeys(by_node[0], 0) if by_node else {}
            rows = [dict(empty) for _ in range(world_size)]
            for node, row in enumerate(by_node):
                rows[self._layout.rank_of(node, self._layout.local_rank)] = row
            reading[table] = rows if by_node else []
        reading["waits"] = self._waits.rows()
        reading["wait_s"] = self._waits.waited_ns * 1e-9
        reading["local_bytes"] = self.local_bytes
        reading["local_sums"] = self._sum_backend.backend or "host"
        reading["local_sums_reason"] = self._sum_backend.reason
        reading["collective_bytes"] = (
            self._collectives.nbytes if self._collectives is not None else 0
        )
        return json.dumps(reading)

    def take_trace(self) -> list[tuple[int, str, int, int, int, int, int, int]]:
        """Return and clear the trace of frames between nodes."""
        if self._leader is None:
            return []
        return [
            (*row[:3], self._peer(row[3]), row[4], self._tensor(row[5]), *row[6:])
            for row in self._leader.channel.take_trace()
        ]

    def take_timeline(self) -> tuple[list[CoreRow], int]:
        """Return and clear the trace between nodes, and the number of rows that were dropped."""
        if self._leader is None:
            return [], 0
        rows, dropped = self._leader.channel.take_timeline()
        named: list[CoreRow] = []
        for times, way, kind, peer, step, (index, *within), nbytes, priority in rows:
            position = (self._tensor(index), within[0], within[1])
            named.append((times, way, kind, self._peer(peer), step, position, nbytes, priority))
        return named, dropped

    def _peer(self, node: int) -> int:
        return self._layout.rank_of(node, self._layout.local_rank)

    def _tensor(self, index: int) -> int:
        assert self._leader is not None
        return self._leader.own_parts[index].tensor
