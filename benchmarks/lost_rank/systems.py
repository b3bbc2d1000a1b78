"""The systems that are compared: how each starts its ranks, and why it may be absent."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lost_rank.processes import Processes

MAX_RESTARTS = 3
_PROBE_TIMEOUT_S = 120.0
_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_VERSION = "import importlib.metadata as m, torchft; print(m.version('torchft'))"


@dataclass(frozen=True)
class Job:
    """One training under one system.

    Attributes:
        folder: of everything that it writes.
        ranks: number of ranks.
        torchft_python: interpreter that has torchft.
    """

    folder: Path
    ranks: int
    torchft_python: str

    @property
    def rank_program(self) -> tuple[str, ...]:
        """Arguments of an interpreter that is to be one rank."""
        return ("-m", "benchmarks.lost_rank.rank_program", str(self.folder / "job.json"))


@dataclass(frozen=True)
class System:
    """One way to survive the loss of a rank.

    Attributes:
        about: one line for people.
        settings: for the rank program: which `program`, and what it needs to know.
        start: starts the ranks, and what they need.
        absent: returns why the system cannot be tried here; empty if it can.
    """

    about: str
    settings: dict[str, Any]
    start: Callable[[Job, Processes], None]
    absent: Callable[[str], str]


def _available(_torchft_python: str) -> str:
    return ""


def _start_torchrun(
    job: Job, processes: Processes, environment: Mapping[str, str] | None = None
) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.ranks))
    restarts = ("--max-restarts", str(MAX_RESTARTS))
    processes.start(
        "torchrun", [sys.executable, *launcher, *restarts, *job.rank_program], environment
    )


def _start_ddp(job: Job, processes: Processes) -> None:
    # Restarted ranks would find the addresses of the start before in the store that torchrun keeps
    # (torch 2.15), and fail or wait for them: each start gets a store of its own.
    own_store = {_SHARED_STORE: os.environ.get(_SHARED_STORE, "1")}
    _start_torchrun(job, processes, own_store)


def _start_going_on(job: Job, processes: Processes) -> None:
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes.keep(store)
    for rank in range(job.ranks):
        place = {"RANK": rank, "WORLD_SIZE": job.ranks, "LOCAL_RANK": rank}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
        environment = {name: str(value) for name, value in (place | meeting).items()}
        processes.start(f"rank-{rank}", [sys.executable, *job.rank_program], environment)


def _going_on_absent(_torchft_python: str) -> str:
    import gradlane

    if "going_on" in inspect.signature(gradlane.init).parameters:
        return ""
    return "gradlane.init has no option going_on"


def _torchft(about: str, timeout_s: int) -> System:
    """Return torchft with one time-out for a collective's silence and for a replica's."""

    def start(job: Job, processes: Processes) -> None:
        address = job.folder / "lighthouse"
        # The address is written beside its place, so that it is whole once it can be read.
        program = (
            "import pathlib, signal, torchft.coordination as c\n"
            f"server = c.LighthouseServer(bind='127.0.0.1:0', min_replicas=1, "
            f"join_timeout_ms=60000, quorum_tick_ms=100, "
            f"heartbeat_timeout_ms={1000 * timeout_s})\n"
            f"part = pathlib.Path({str(address)!r} + '.part')\n"
            f"part.write_text(server.address())\n"
            f"part.replace({str(address)!r})\n"
            "signal.pause()\n"
        )
        processes.start("lighthouse", [job.torchft_python, "-c", program], serves=True)
        processes.wait_for_file(address)
        meeting = {"TORCHFT_LIGHTHOUSE": address.read_text(encoding="utf-8")}
        for rank in range(job.ranks):
            environment = {**meeting, "REPLICA_GROUP_ID": str(rank)}
            processes.start(f"rank-{rank}", [job.torchft_python, *job.rank_program], environment)

    return System(about, {"program": "torchft", "timeout_s": timeout_s}, start, _torchft_absent)


def _torchft_absent(torchft_python: str) -> str:
    """Return the last line of a failed import."""
    try:
        done = subprocess.run(
            [torchft_python, "-c", _VERSION],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{torchft_python}: {error}"
    if done.returncode == 0:
        return ""
    return f"{torchft_python}: {(done.stderr.strip().splitlines() or ['no error text'])[-1]}"


SYSTEMS = {
    "ddp-torchrun": System(
        f"DDP, torch.save; torchrun --max-restarts {MAX_RESTARTS} restarts all ranks",
        {"program": "ddp"},
        _start_ddp,
        _available,
    ),
    "gradlane-torchrun": System(
        f"gradlane, its checkpoints; torchrun --max-restarts {MAX_RESTARTS} restarts all ranks",
        {"program": "gradlane", "going_on": False},
        _start_torchrun,
        _available,
    ),
    "torchft": _torchft("torchft, survivors go on; time-outs of its README and lighthouse, 5 s", 5),
    "torchft-1s": _torchft("torchft, survivors go on; both time-outs 1 s", 1),
    "gradlane-going-on": System(
        "gradlane.init(going_on=True), survivors go on",
        {"program": "gradlane", "going_on": True},
        _start_going_on,
        _going_on_absent,
    ),
}
