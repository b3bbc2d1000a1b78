"""Bytes through the port of a node in a step, by default, beside the ring of DDP.

Several ranks of a node must not put more on its port than a ring over nodes whose ranks have added
up first: 2 (M - 1) / M of the gradients, for M nodes.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.training.model.pool import RankPool
from tests.training.node.node_programs import PORT_ELEMENTS

HERE = "tests.training.node.node_programs"
HEADERS = 0.03
"""Of frames, packed buffers and rank statuses, over the bytes of gradients."""


@pytest.mark.parametrize(
    ("nodes", "local_size", "options"),
    [(2, 2, {}), (2, 4, {}), (4, 2, {}), (2, 2, {"going_on": True})],
)
@pytest.mark.timeout(240)
def test_the_default_puts_no_more_on_a_port_than_a_ring_over_nodes(
    nodes: int, local_size: int, options: dict[str, Any]
) -> None:
    ranks = nodes * local_size
    pool = RankPool(ranks)
    try:
        found = pool.run(f"{HERE}:port_bytes", local_size=local_size, **options)
        alone = pool.run(f"{HERE}:port_bytes", local_size=local_size, local="off", **options)
    finally:
        pool.close()
    size = 4 * PORT_ELEMENTS
    over_nodes = 2 * (nodes - 1) / nodes * size
    for node in range(nodes):
        sent = sum(found[node * local_size : (node + 1) * local_size])
        assert 0.99 * over_nodes <= sent <= (1 + HEADERS) * over_nodes
    # What every rank by itself puts there: as many times the bytes as a node has ranks.
    everyone = 2 * local_size * (nodes - 1) / nodes * size
    assert sum(alone) == pytest.approx(nodes * everyone, rel=HEADERS)
    # DDP's ring over all ranks passes each port once in each direction.
    ring = 2 * (ranks - 1) / ranks * size
    assert over_nodes < ring < everyone
