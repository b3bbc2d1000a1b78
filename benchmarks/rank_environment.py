"""Ranks of a benchmark, one a node of an emulated cluster: their environment, and their start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from gradlane.lab.cluster.namespaces import INTERFACE, EmulatedCluster


def rank_environment(
    cluster: EmulatedCluster, rank: int, world_size: int, port: int
) -> dict[str, str]:
    """Return the variables that torchrun would set, with one thread for arithmetic.

    Args:
        cluster: with a node for each rank.
        rank: of the process.
        world_size: number of ranks.
        port: that rank 0's store listens on.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": cluster.addresses[0],
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def told_by_rank_0(ranks: int, rate_bps: int, program: Sequence[str]) -> list[bytes]:
    """Run a program on each node of a new cluster, and return the lines that rank 0 printed.

    Args:
        ranks: number of nodes, one rank each.
        rate_bps: of each node's port.
        program: arguments of this Python's interpreter.

    Raises:
        SystemExit: a rank has failed.
    """
    interface = {"GRADLANE_INTERFACE": INTERFACE, "GLOO_SOCKET_IFNAME": INTERFACE}
    with EmulatedCluster(ranks, rate_bps) as cluster:
        port = cluster.next_port()
        processes = [
            cluster.spawn(
                rank,
                [sys.executable, *program],
                environment={**rank_environment(cluster, rank, ranks, port), **interface},
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            )
            for rank in range(ranks)
        ]
        output = processes[0].stdout
        assert output is not None
        told = list(output)
        if any([process.wait() for process in processes]):
            raise SystemExit("a rank has failed; its output is above")
    return told


def summed_over_ranks(values: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return the sums over all ranks of the default group, value by value; a collective call."""
    import torch.distributed as dist

    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, values)
    return {
        name: [sum(ranks) for ranks in zip(*(one[name] for one in everywhere), strict=True)]
        for name in values
    }
