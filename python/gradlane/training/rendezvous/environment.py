"""The rank, the world size and the job, from the launcher's environment variables.

torchrun's variables come first, then those of Open MPI, of PMI launchers (MPICH, Intel MPI) and of
MVAPICH, then Slurm's: inside a Slurm allocation, mpirun's processes inherit Slurm variables that
describe another process. Without any of them the world has one rank. This module opens no
connection and changes no variable.
"""

from __future__ import annotations

import difflib
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gradlane.errors import RefusedError
from gradlane.training.options.option_fields import variables_of
from gradlane.training.options.option_groups import ENVIRONMENT_GROUPS

_RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
_LOCAL_AND_WORLD_SIZE = (
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("MPI_LOCALNRANKS", "PMI_SIZE"),
    ("MV2_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_SIZE"),
)
"""Variables with the number of ranks on this node, and in the world."""
_LOCAL_RANK_VARIABLES = (
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "SLURM_LOCALID",
)
_LOCAL_SIZE_NAMES = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "SLURM_NTASKS_PER_NODE",
)
_JOB_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "SLURM_JOB_ID",
    "PBS_JOBID",
    "LSB_JOBID",
    "PMIX_NAMESPACE",
)
_DEFAULT_PORT = 29500
_GRADLANE_VARIABLES = (
    "GRADLANE_INTERFACE",
    "GRADLANE_LAB_USER_NAMESPACE",
    "GRADLANE_SIMD",
    *(variable for group in ENVIRONMENT_GROUPS for variable in variables_of(group)),
)
"""All variables that gradlane reads besides the launchers'."""


def warn_of_unknown_variables(environment: Mapping[str, str]) -> None:
    """Warn of variables that begin with `GRADLANE_` and are unknown, such as misspelt ones."""
    for name in sorted(environment):
        if name.startswith("GRADLANE_") and name not in _GRADLANE_VARIABLES:
            own = {known.removeprefix("GRADLANE_"): known for known in _GRADLANE_VARIABLES}
            close = difflib.get_close_matches(name.removeprefix("GRADLANE_"), own, n=1, cutoff=0.7)
            known = f"known are {', '.join(_GRADLANE_VARIABLES)}"
            meant = f"did you mean {own[close[0]]}?" if close else known
            warnings.warn(
                f"the environment variable {name} changes nothing, gradlane reads none of that "
                f"name: {meant}",
                UserWarning,
                stacklevel=3,
            )


@dataclass(frozen=True)
class RankInfo:
    """A rank, its world and its job.

    Attributes:
        rank: this rank; dedicated servers come after all workers.
        world_size: number of workers; all ranks if there is no dedicated server.
        job: name of the job, the same on every rank.
        restart: number of restarts by the launcher.
        serving: number of dedicated servers.
    """

    rank: int
    world_size: int
    job: str
    restart: int
    serving: int = 0

    @property
    def ranks(self) -> int:
        """Number of all ranks, dedicated servers included."""
        return self.world_size + self.serving

    @property
    def serves(self) -> bool:
        """True if this rank is a dedicated server."""
        return self.rank >= self.world_size

    def with_workers(self, workers: int | None) -> RankInfo:
        """Return the rank info with only the first so many ranks training; None: all."""
        if workers is None:
            return self
        return replace(self, world_size=workers, serving=self.ranks - workers)


def find_rank_info(
    environment: Mapping[str, str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    job: str | None = None,
) -> RankInfo:
    """Find this rank from arguments and, where they are missing, from the environment.

    Args:
        environment: the variables, such as `os.environ`.
        rank: in place of the launcher's.
        world_size: in place of the launcher's.
        job: in place of the launcher's.

    Raises:
        ValueError: only one of rank and world size is known, or they contradict each other.
    """
    if (rank is None) != (world_size is None):
        raise RefusedError(
            f"rank={rank} and world_size={world_size}: give both, or neither and start the "
            "program with torchrun, srun or mpirun"
        )
    if rank is None or world_size is None:
        rank, world_size = _rank_from_launcher(environment)
    if not 0 <= rank < world_size:
        raise RefusedError(f"rank {rank} is not in a world of {world_size} ranks (0 is the first)")
    if job is None:
        job = _job_name(environment)
    restart = _integer(environment, "TORCHELASTIC_RESTART_COUNT", default=0)
    return RankInfo(rank=rank, world_size=world_size, job=job, restart=restart)


def find_local_rank(environment: Mapping[str, str]) -> int:
    """Return this rank's number on its node; 0 if the launcher does not say."""
    for name in _LOCAL_RANK_VARIABLES:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return 0


def find_local_size(environment: Mapping[str, str]) -> int:
    """Return the number of ranks on this rank's node; 1 if the launcher does not say."""
    for name in _LOCAL_SIZE_NAMES:
        if environment.get(name, "").isdigit():
            return max(1, int(environment[name]))
    return 1


def ending_survivors(environment: Mapping[str, str], ranks: int, *, by_node: bool) -> str:
    """Return how the launcher ends the ranks that are left when one is lost; empty if not known.

    Args:
        environment: the launcher's variables.
        ranks: number of all ranks.
        by_node: whether the ranks of a machine are lost together anyway.
    """
    local_size = find_local_size(environment)
    if environment.get("TORCHELASTIC_RUN_ID") and local_size > 1:
        if by_node and local_size < ranks:
            return ""
        return (
            f"torchrun ends all {local_size} ranks of its machine when one of them fails: start "
            "one torchrun a rank, with --nproc-per-node 1 and --max-restarts 0"
        )
    if environment.get("SLURM_KILL_BAD_EXIT", "0") not in ("", "0"):
        return (
            "srun ends all tasks when one fails (SLURM_KILL_BAD_EXIT="
            f"{environment['SLURM_KILL_BAD_EXIT']}): start it with --no-kill --kill-on-bad-exit=0"
        )
    recovers = environment.get("OMPI_MCA_orte_enable_recovery", "0") not in ("", "0", "false")
    if environment.get("OMPI_COMM_WORLD_SIZE") and not recovers:
        return "mpirun ends all ranks when one fails: start it with --enable-recovery"
    if environment.get("MPI_LOCALNRANKS") or environment.get("MV2_COMM_WORLD_SIZE"):
        return "mpiexec ends all ranks when one fails: start each rank by itself"
    return ""


def own_processors(environment: Mapping[str, str]) -> int:
    """Return this rank's even share of the processors that this process may run on."""
    return len(os.sched_getaffinity(0)) // find_local_size(environment)


def find_store_address(environment: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port of the rendezvous store.

    `MASTER_ADDR` and `MASTER_PORT` when set; under Slurm the first node of the step, or of the job;
    with mpirun on one node that node.

    Raises:
        ValueError: the variables name no host.
    """
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    host = environment.get("MASTER_ADDR")
    if not host and nodes:
        host = first_slurm_node(nodes)
    if not host and _is_on_one_node(environment):
        host = "127.0.0.1"
    if not host:
        raise RefusedError(
            "no rendezvous store: give store=, initialize torch.distributed first, or set "
            "MASTER_ADDR and MASTER_PORT to the host of rank 0 and a free port there: torchrun "
            "does; with Open MPI `mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ...`, with "
            "MPICH or Intel MPI `mpirun -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 ...`"
        )
    default = _DEFAULT_PORT
    if "MASTER_PORT" not in environment and environment.get("SLURM_JOB_ID", "").isdigit():
        # Jobs that share a node, and steps of one job, must not meet in one store.
        step = environment.get("SLURM_STEP_ID", "")
        default += (int(environment["SLURM_JOB_ID"]) + 97 * int(step or 0)) % 10_000
    port = _integer(environment, "MASTER_PORT", default=default)
    if not 0 < port < 1 << 16:
        raise RefusedError(
            f"environment variable MASTER_PORT={port} is no port, which is 1 to 65535"
        )
    return host, port


def first_slurm_node(node_list: str) -> str:
    """Return the first host of a Slurm list such as `gpu[03-05,9],login1`: here `gpu03`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", node_list.strip())
    if match is None:
        raise RefusedError(f"the Slurm node list {node_list!r} names no node")
    return match.group(1) + (match.group(2) or "") + (match.group(3) or "")


def _rank_from_launcher(environment: Mapping[str, str]) -> tuple[int, int]:
    for rank_name, world_name in _RANK_VARIABLES:
        if environment.get(rank_name) and environment.get(world_name):
            if rank_name == "SLURM_PROCID":
                _check_started_by_srun(environment, world_name)
            return _integer(environment, rank_name), _integer(environment, world_name)
    if environment.get("WORLD_SIZE", "1") != "1" or environment.get("RANK"):
        raise RefusedError(
            f"RANK={environment.get('RANK')} and WORLD_SIZE={environment.get('WORLD_SIZE')}: "
            "set both, or start the program with torchrun"
        )
    return 0, 1


def _check_started_by_srun(environment: Mapping[str, str], world_name: str) -> None:
    """Check that this is a rank: batch scripts and interactive shells have a rank's variables,
    too."""
    is_step = environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEPID")
    knows_job = environment.get("SLURM_JOB_ID") and environment.get("SLURM_SUBMIT_DIR")
    if knows_job and not is_step and environment[world_name] != "1":
        raise RefusedError(
            f"this is the only process of Slurm job {environment['SLURM_JOB_ID']}, which asks for "
            f"{environment[world_name]} tasks: start the program with srun (srun python ...), "
            "mpirun or torchrun, or give rank=0, world_size=1"
        )


def _job_name(environment: Mapping[str, str]) -> str:
    for name in _JOB_VARIABLES:
        job = environment.get(name)
        if job and name == "SLURM_JOB_ID" and environment.get("SLURM_STEP_ID"):
            return f"{job}.{environment['SLURM_STEP_ID']}"
        if job:
            return job
    return "default"


def _is_on_one_node(environment: Mapping[str, str]) -> bool:
    return any(
        environment.get(local) and environment.get(local) == environment.get(world)
        for local, world in _LOCAL_AND_WORLD_SIZE
    )


def _integer(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise RefusedError(f"environment variable {name}={text!r} is not a whole number") from None
