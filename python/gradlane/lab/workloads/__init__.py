"""The models that the lab trains: replays of large ones, and small ones that compute for real.

`build` is the only way in. Importing this package is light: torch, and the data of a real
workload, are loaded when a workload is built.
"""

from __future__ import annotations

from pathlib import Path

from gradlane.lab.workloads.contract import Evaluation, Workload
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
    "build",
]


def build(
    name: str,
    *,
    rank: int,
    world_size: int,
    seed: int = 0,
    dilation: float = 1.0,
    profile_path: str | Path | None = None,
    batch_time_s: float | None = None,
    paced: bool = True,
) -> Workload:
    """Build a workload for one rank.

    Args:
        name: one of `NAMES`.
        rank: this rank, from 0.
        world_size: number of ranks.
        seed: decides the model's initial parameters, the same on all ranks, and the data.
        dilation: factor by which every operation takes longer than its nominal time.
        profile_path: for replay workloads, a recorded profile (JSON) whose tensors and times
            replace those of the built-in model.
        batch_time_s: nominal seconds of one step's forward and backward together, in place of
            the workload's own. For real workloads it must leave time to compute.
        paced: false lets every operation take only the time that it really needs.

    Returns:
        The workload, with its model built.

    Raises:
        ValueError: for an unknown name, a rank outside the world, a dilation or batch time that
            is not positive, or a profile that is malformed or given to a real workload.
    """
    if name in SIMULATED_NAMES:
        raise ValueError(
            f"'{name}' is too large to be replayed on one machine: ask `gradlane whatif {name}`"
        )
    if name not in NAMES:
        raise ValueError(f"unknown workload '{name}'; choose one of {', '.join(NAMES)}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is outside a world of {world_size}")
    if name in REPLAY_NAMES:
        from gradlane.lab.workloads.replay import ReplayWorkload

        return ReplayWorkload(
            name,
            rank=rank,
            world_size=world_size,
            seed=seed,
            dilation=dilation,
            profile_path=profile_path,
            batch_time_s=batch_time_s,
            paced=paced,
        )
    if profile_path is not None:
        raise ValueError(f"workload '{name}' computes for real and takes no profile")
    from gradlane.lab.workloads.real import real_kind

    return real_kind(name)(
        name,
        rank=rank,
        world_size=world_size,
        seed=seed,
        dilation=dilation,
        batch_time_s=batch_time_s,
        paced=paced,
    )
