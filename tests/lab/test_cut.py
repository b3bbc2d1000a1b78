"""A node that loses its network in the middle of training: all ranks say so, in bounded time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradlane.lab.namespaces import Cluster
from gradlane.lab.privilege import why_no_namespaces

REASON = why_no_namespaces()
ROOT = Path(__file__).parent.parent.parent
RANKS = 3
CUT = 2
"""The rank whose cable is pulled."""
ENDS_WITHIN_S = 60.0
"""Many times the program's silence timeout of 3 s: nothing may wait for ever."""


@pytest.mark.skipif(REASON is not None, reason=f"network namespaces cannot be made here: {REASON}")
def test_a_pulled_cable_is_named_on_every_rank(tmp_path: Path) -> None:
    with Cluster(RANKS, 200_000_000) as cluster:
        children = []
        for rank in range(RANKS):
            with (tmp_path / f"errors-{rank}").open("wb") as errors:
                children.append(
                    cluster.spawn(
                        rank,
                        [sys.executable, "-u", "-m", "tests.adapter.failing_rank", "none"],
                        environment={
                            "RANK": str(rank),
                            "WORLD_SIZE": str(RANKS),
                            "MASTER_ADDR": cluster.addresses[0],
                            "MASTER_PORT": "29501",
                            "ADVERTISE": cluster.addresses[rank],
                            "PYTHONPATH": f"{ROOT / 'python'}{os.pathsep}{ROOT}",
                            "OMP_NUM_THREADS": "1",
                        },
                        stdout=subprocess.PIPE,
                        stderr=errors,
                    )
                )
        for child in children:
            assert child.stdout is not None
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
