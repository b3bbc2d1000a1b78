"""Which rank this is, of how many, of which job: read from the launcher's environment variables.

torchrun's variables come first, then Slurm's, then those of Open MPI and of PMI launchers; without
any of them the program is a world of one. Nothing here opens a connection or changes a variable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
_JOB_VARIABLES = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
_DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Place:
    """Where a rank stands.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        job: name of the job, the same on every rank.
        restart: how often the launcher has restarted the job's ranks.
    """

    rank: int
    world_size: int
    job: str
    restart: int


def find_place(
    environment: Mapping[str, str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    job: str | None = None,
) -> Place:
    """Find this rank's place from arguments and, where they are missing, from the environment.

    Args:
        environment: the variables, such as `os.environ`.
        rank: in place of the launcher's.
        world_size: in place of the launcher's.
        job: in place of the launcher's.

    Raises:
        ValueError: only one of rank and world size is known, or they contradict each other.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(
            f"rank={rank} and world_size={world_size}: give both, or neither and start the "
            "program with torchrun, srun or mpirun"
        )
    if rank is None or world_size is None:
        rank, world_size = _launched_as(environment)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size} ranks (0 is the first)")
    if job is None:
        known = (environment[name] for name in _JOB_VARIABLES if environment.get(name))
        job = next(known, "default")
    restart = _integer(environment, "TORCHELASTIC_RESTART_COUNT", default=0)
    return Place(rank=rank, world_size=world_size, job=job, restart=restart)


def find_store_address(environment: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port of the rendezvous store.

    `MASTER_ADDR` and `MASTER_PORT` when set; under Slurm the first node of the job.

    Raises:
        ValueError: the variables name no host.
    """
    host = environment.get("MASTER_ADDR")
    if not host and environment.get("SLURM_JOB_NODELIST"):
        host = first_slurm_node(environment["SLURM_JOB_NODELIST"])
    if not host:
        raise ValueError(
            "no rendezvous store: give store=, initialize torch.distributed first, or set "
            "MASTER_ADDR and MASTER_PORT (torchrun does) to the host of rank 0 and a free port"
        )
    default = _DEFAULT_PORT
    if "MASTER_PORT" not in environment and environment.get("SLURM_JOB_ID", "").isdigit():
        # Jobs that share a node must not meet in one store.
        default += int(environment["SLURM_JOB_ID"]) % 10_000
    return host, _integer(environment, "MASTER_PORT", default=default)


def first_slurm_node(node_list: str) -> str:
    """Return the first host of a Slurm list such as `gpu[03-05,9],login1`: here `gpu03`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", node_list.strip())
    if match is None:
        raise ValueError(f"SLURM_JOB_NODELIST={node_list!r} names no node")
    return match.group(1) + (match.group(2) or "") + (match.group(3) or "")


def _launched_as(environment: Mapping[str, str]) -> tuple[int, int]:
    for rank_name, world_name in _RANK_VARIABLES:
        if environment.get(rank_name) and environment.get(world_name):
            return _integer(environment, rank_name), _integer(environment, world_name)
    if environment.get("WORLD_SIZE", "1") != "1" or environment.get("RANK", "0") != "0":
        raise ValueError(
            f"RANK={environment.get('RANK')} and WORLD_SIZE={environment.get('WORLD_SIZE')}: "
            "set both, or start the program with torchrun"
        )
    return 0, 1


def _integer(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ValueError(f"environment variable {name}={text!r} is not a whole number") from None
