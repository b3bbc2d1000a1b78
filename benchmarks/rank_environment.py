"""What a rank of a benchmark finds in its environment, one rank a node of an emulated cluster."""

from __future__ import annotations

from gradlane.lab.cluster.namespaces import EmulatedCluster


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
