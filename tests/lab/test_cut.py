"""A node that loses its network in the middle of training: all ranks say so, in bounded time."""

from __future__ import annotations

import contextlib
from pathlib import Path

from gradlane.lab.namespaces import Cluster
from gradlane.lab.nursery import running_nursery
from tests.adapter.nursery import SOURCES
from tests.namespaces import needs_namespaces

RANKS = 3
CUT = 2
"""The rank whose cable is pulled."""
ENDS_WITHIN_S = 60.0
"""Many times the program's silence timeout of 3 s: nothing may wait for ever."""


@needs_namespaces
def test_a_pulled_cable_is_named_on_every_rank(tmp_path: Path) -> None:
    with Cluster(RANKS, 200_000_000) as cluster, contextlib.ExitStack() as ending:
        children = []
        for rank in range(RANKS):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": cluster.addresses[0],
                "MASTER_PORT": "29501",
                "ADVERTISE": cluster.addresses[rank],
                "PYTHONUNBUFFERED": "1",
            }
            with (tmp_path / f"errors-{rank}").open("wb") as errors:
                # With an ending that it does not know, such as a number, it trains for ever.
                child = running_nursery({"OMP_NUM_THREADS": "1", **SOURCES}).fork(
                    rank,
                    "tests.adapter.failing_rank",
                    namespace=cluster.namespace_descriptor(rank),
                    environment=environment,
                    stderr=errors,
                    timeout_s=60.0,
                )
            children.append(child)
            for end in (child.stdout.close, child.stdin.close, child.kill):
                ending.callback(end)
        for child in children:
            for line in child.stdout:
                if line.startswith(b"step 6"):
                    break
        cluster.set_link(CUT, connected=False)
        codes = [child.wait(ENDS_WITHIN_S) for child in children]
    told = [(tmp_path / f"errors-{rank}").read_text() for rank in range(RANKS)]
    for rank in range(RANKS):
        assert codes[rank] == 1, told[rank]
        assert "gradlane.errors.PeerLost" in told[rank], told[rank]
        assert "bytes) were outstanding" in told[rank], told[rank]
        lost = [other for other in range(RANKS) if other != rank] if rank == CUT else [CUT]
        named = [f"rank {other} was lost: silent for" in told[rank] for other in lost]
        assert any(named), told[rank]
