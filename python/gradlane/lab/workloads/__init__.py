"""The models that the lab trains: replays of large ones, and small ones that compute for real.

`build` is the only way in. Importing this package is light: torch, and the data of a real
workload, are loaded when a workload is built.
"""

from __future__ import annotations

from gradlane.lab.workloads.contract import Evaluation, Workload, WorkloadSpec
from gradlane.planning.models import ARCHITECTURES
from gradlane.planning.models.timings import Stage, TensorTiming

SIMULATED_NAMES = ("llama_1b", "dlrm")
"""Models that `whatif` and `plan` know, but of over 400 million parameters, which each rank of a
lab would hold twice."""
REPLAY_NAMES = tuple(name for name in ARCHITECTURES if name not in SIMULATED_NAMES)
"""Workloads whose accelerator sleeps."""
REAL_NAMES = ("digits-cnn", "char-transformer")
"""Workloads that compute for real, on real data."""
NAMES = REPLAY_NAMES + REAL_NAMES
"""All names that `build` takes."""

__all__ = [
    "NAMES",
    "REAL_NAMES",
    "REPLAY_NAMES",
    "SIMULATED_NAMES",
    "Evaluation",
    "Stage",
    "TensorTiming",
    "Workload",
    "WorkloadSpec",
    "build",
]


def build(spec: WorkloadSpec, rank: int, world_size: int) -> Workload:
    """Build a workload for one rank.

    Args:
        spec: the workload, the same on every rank.
        rank: this rank, from 0.
        world_size: number of ranks.

    Returns:
        The workload, with its model built.

    Raises:
        ValueError: for an unknown name, a rank outside the world, a dilation or batch time that
            is not positive, or a profile that is malformed or given to a real workload.
    """
    if spec.name in SIMULATED_NAMES:
        raise ValueError(
            f"'{spec.name}' is too large to be replayed on one machine: ask `gradlane whatif "
            f"{spec.name}`"
        )
    if spec.name not in NAMES:
        raise ValueError(f"unknown workload '{spec.name}'; choose one of {', '.join(NAMES)}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is outside a world of {world_size}")
    if spec.name == "digits-cnn":
        from gradlane.lab.workloads.digits_cnn import DigitsCnn

        return DigitsCnn(spec, rank, world_size)
    if spec.name == "char-transformer":
        from gradlane.lab.workloads.char_transformer import CharTransformer

        return CharTransformer(spec, rank, world_size)
    from gradlane.lab.workloads.replay import ReplayWorkload

    return ReplayWorkload(spec, rank, world_size)
