"""Runs the ranks of one training, and injects one fault into it.

Ranks are forked from a process that has torch loaded. Where the network is at fault, each node is a
network namespace on a switch of this process's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gradlane.lab.cluster.namespaces import EmulatedCluster
from tests.faults.connections import connection_between
from tests.faults.going_on.scenario import GoingOnScenario
from tests.faults.outcome import Outcome, RankEnd, complete_checkpoints
from tests.faults.ports import Listener, own_loopback
from tests.faults.scenario import (
    CHECKPOINT_EVERY,
    CLOSE_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    PROGRESS_TIMEOUT_S,
    SIGNALS,
    SILENCE_TIMEOUT_S,
    TRAININGS,
    Scenario,
    Training,
)
from tests.faults.trigger import LATE
from tests.forked_programs import ForkedPrograms
from tests.waiting import eventually

_POLL_S = 0.01
_PATIENT_S = 90.0
"""Time-outs of runs without a fault, which only a machine that stands still reaches."""
_START_S = 120.0
_CONNECTED_WITHIN_S = 5.0
RATE_BPS = 10**9
_asking = threading.Lock()
"""Held while the process that forks is asked: requests are lines of one pipe."""


class Switch(EmulatedCluster):
    """Network namespaces on a switch, each pair of which can be cut from each other."""

    def cut_pair(self, first: int, second: int) -> None:
        """Drop all packets between two nodes, silently; both reach all others."""
        route = self.switch.route
        for node in (first, second):
            # Isolated ports of a bridge reach all others that are not isolated.
            route.brport("set", index=self.switch.interface(f"port{node}"), isolated=1)


def run_undisturbed(
    programs: ForkedPrograms,
    folder: Path,
    training: str,
    world_size: int,
    checkpoint: Path,
    last_step: int,
    keep: int,
) -> Outcome:
    """Train without a fault, and without a time-out that a busy machine could reach.

    Args:
        programs: forks the ranks.
        folder: for files of the run; it is made.
        training: key of `TRAININGS`.
        world_size: number of ranks.
        checkpoint: folder of checkpoints, to go on from and to write to.
        last_step: the last training step.
        keep: number of complete checkpoints that stay.
    """
    run = Run(programs, folder, TRAININGS[training], world_size, None, None)
    options = {
        "connect_timeout_s": _PATIENT_S,
        "silence_timeout_s": _PATIENT_S,
        "progress_timeout_s": _PATIENT_S,
        "checkpoint_keep": keep,
        "checkpoint_every": CHECKPOINT_EVERY,
    }
    with run.running(options, checkpoint, last_step):
        run.wait(range(world_size), time.monotonic() + 2 * _PATIENT_S)
    return run.outcome


def run_faulted(
    programs: ForkedPrograms, folder: Path, scenario: Scenario, checkpoint: Path, bound_s: float
) -> Outcome:
    """Train until the fault, inject it, and wait until all ranks have ended that can.

    Args:
        programs: forks the ranks.
        folder: for files of the run; it is made.
        scenario: the fault.
        checkpoint: folder of checkpoints, to go on from and to write to.
        bound_s: seconds from the fault within which all ranks have to end.
    """
    switch: Switch | None = None
    if scenario.namespaces:
        switch = Switch(scenario.node_of(scenario.world_size - 1) + 2, RATE_BPS)
    run = Run(programs, folder, scenario.kind, scenario.world_size, scenario, switch)
    options = {
        "connect_timeout_s": CONNECT_TIMEOUT_S,
        "silence_timeout_s": SILENCE_TIMEOUT_S,
        "progress_timeout_s": PROGRESS_TIMEOUT_S,
        "checkpoint_keep": 2,
        "checkpoint_every": CHECKPOINT_EVERY,
    }
    with (
        contextlib.nullcontext() if switch is None else switch,
        run.running(options, checkpoint, scenario.last_step),
    ):
        run.wait_for_moment()
        run.outcome.complete_before = list(complete_checkpoints(checkpoint))
        run.inject(scenario.fault, scenario.victims)
        silent = scenario.victims if scenario.fault == "stop" else ()
        ranks = [rank for rank in range(scenario.world_size) if rank not in silent]
        run.wait(ranks, run.outcome.fault_s + bound_s)
    run.look_for_left_over()
    return run.outcome


class Run:
    """The processes of one run.

    Attributes:
        outcome: what came of it.
    """

    def __init__(
        self,
        programs: ForkedPrograms,
        folder: Path,
        training: Training,
        world_size: int,
        scenario: Scenario | GoingOnScenario | None,
        switch: Switch | None,
        program: str = "tests.faults.rank_program",
        joiners: int = 0,
    ) -> None:
        """Start nothing yet.

        Args:
            programs: forks the ranks.
            folder: for files of the run; it is made.
            training: its options.
            world_size: number of ranks.
            scenario: the fault, or None.
            switch: of the ranks' network namespaces; None: they are on one loopback interface.
            program: module of a rank.
            joiners: ranks that are started as well, with the next numbers, and join by themselves.
        """
        self._programs = programs
        self._program = program
        self._folder = folder
        self._training = training
        self._world_size = world_size
        self._processes = world_size + joiners
        self._scenario = scenario
        self._switch = switch
        self._pids: dict[str, int] = {}
        self._codes: dict[str, int] = {}
        self._job = folder
        self.outcome = Outcome([RankEnd(rank) for rank in range(self._processes)])
        folder.mkdir(parents=True)

    @contextlib.contextmanager
    def running(
        self,
        options: dict[str, Any],
        checkpoint: Path,
        last_step: int,
        *,
        digests: bool = False,
        own: Mapping[int, dict[str, Any]] = MappingProxyType({}),
    ) -> Iterator[None]:
        """Run all processes while the context lasts, then kill those that have not ended.

        Args:
            options: of `gradlane.init`.
            checkpoint: folder of checkpoints.
            last_step: the last training step.
            digests: whether ranks write a digest of the model after each step.
            own: options of one rank alone, by rank.
        """
        scenario, size = self._scenario, self._training.local_size
        nodes = [rank // size for rank in range(self._processes)]
        if self._training.serving:
            options["workers"] = self._world_size - self._training.serving
        has_agent = scenario is not None and scenario.agent
        stack = contextlib.ExitStack()
        namespace, port = stack.enter_context(own_loopback())
        job = {
            "folder": str(self._folder),
            "scenario": None if scenario is None else scenario.to_json(),
            "options": {**self._training.options, **options, "checkpoint_folder": str(checkpoint)},
            "close_timeout_s": CLOSE_TIMEOUT_S if scenario is not None else _PATIENT_S,
            "last_step": last_step,
            "digests": digests or scenario is None,
            "own": dict(own),
            "port": port,
            # The agent that hosts the store is on a node of its own.
            "nodes": [*nodes, nodes[-1] + 1],
            "namespaces": self._namespaces(namespace, nodes[-1] + 2),
        }
        path = self._job = self._folder / "job.json"
        path.write_text(json.dumps(job))
        hosts = ["127.0.0.1"] * (nodes[-1] + 2)
        if self._switch is not None:
            hosts = self._switch.addresses
        common = {
            "WORLD_SIZE": str(self._world_size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": hosts[nodes[-1] + 1] if has_agent else hosts[0],
            "MASTER_PORT": str(port),
            "GRADLANE_SUMMARY": "0",
            "TORCH_CPP_LOG_LEVEL": "FATAL",
        }
        if has_agent:
            common["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        try:
            if scenario is not None and scenario.listener:
                listener = Listener(namespace, port, scenario.listener)
                stack.callback(listener.close)
            elif has_agent:
                self._start("agent", "tests.faults.store_host", path, common)
                assert eventually((self._folder / "store-is-up").exists, _START_S)
            for rank in range(self._processes):
                variables = {"RANK": str(rank), "LOCAL_RANK": str(rank % size)}
                variables["ADVERTISE"] = hosts[nodes[rank]]
                name = f"rank-{rank}"
                self._start(name, self._program, path, common | variables)
            yield
        finally:
            self._end_all()
            stack.close()
        for end in self.outcome.ends:
            self._read_events(end)

    def wait_for_moment(self) -> None:
        """Wait until the announcer reaches the moment, or a rank ends before."""
        assert self._scenario is not None
        if self._scenario.listener:
            # It was there before any rank.
            self.outcome.is_reached = True
            return
        reached = self._folder / "reached"
        deadline_s = time.monotonic() + _START_S
        while not reached.exists() and time.monotonic() < deadline_s:
            if any(self._has_ended(f"rank-{rank}") for rank in range(self._world_size)):
                # It may have reached the moment just before.
                break
            time.sleep(_POLL_S / 4)
        self.outcome.is_reached = reached.exists()
        self.outcome.is_late = reached.exists() and reached.read_text() == LATE

    def start(self, name: str, program: str) -> None:
        """Start a process beside the ranks, with the job's file as argument."""
        self._start(name, program, self._job, {})

    def signal(self, name: str, number: int) -> None:
        """Send a process a signal: `agent`, `rank-0` or another one by its name."""
        self._signal(name, number)

    def code_of(self, name: str) -> int | None:
        """Return the exit status of a process, or None: it has not ended."""
        return self._codes.get(name) if self._has_ended(name) else None

    def has_ended(self, rank: int) -> bool:
        """Return whether a rank has ended."""
        return self._has_ended(f"rank-{rank}")

    def inject(self, fault: str, victims: Sequence[int]) -> None:
        """Let a fault happen, and tell the rank that waits for it."""
        if fault in SIGNALS:
            for rank in victims:
                self._signal(f"rank-{rank}", SIGNALS[fault], group=fault == "kill the group")
        elif fault == "cut":
            assert self._switch is not None
            self._switch.set_link(victims[0] // self._training.local_size, connected=False)
        elif fault == "partition":
            assert self._switch is not None
            self._switch.cut_pair(*(rank // self._training.local_size for rank in victims))
        elif fault in ("hang up", "garble"):
            self._disturb_connection(fault, victims)
        elif fault == "freeze the store":
            if self._switch is None:
                self._signal("agent", signal.SIGSTOP)
            else:
                self._switch.set_link(self._switch.nodes - 1, connected=False)
        self.outcome.fault_s = min(self.outcome.fault_s, time.monotonic())
        (self._folder / "acted").touch()

    def _disturb_connection(self, fault: str, victims: Sequence[int]) -> None:
        """Shut a connection of two ranks down, or send a byte on it that is none of theirs."""
        pids = [self._pids[f"rank-{rank}"] for rank in victims]
        deadline_s = time.monotonic() + _CONNECTED_WITHIN_S
        while (connection := connection_between(*pids)) is None:
            if time.monotonic() > deadline_s:
                return
            time.sleep(_POLL_S)
        with connection, contextlib.suppress(OSError):
            if fault == "hang up":
                connection.shutdown(socket.SHUT_RDWR)
            else:
                connection.send(b"\x5a")

    def wait(self, ranks: Sequence[int], deadline_s: float) -> None:
        """Wait until ranks have ended; of those that have not, note where they stand."""
        left = list(ranks)
        while left:
            now_s = time.monotonic()
            for rank in list(left):
                if self._has_ended(f"rank-{rank}") or now_s >= deadline_s:
                    self.outcome.ends[rank].after_s = now_s - self.outcome.fault_s
                    left.remove(rank)
            time.sleep(_POLL_S)
        for rank in ranks:
            if not self._has_ended(f"rank-{rank}"):
                self._signal(f"rank-{rank}", signal.SIGUSR1)
        if not all(self._has_ended(f"rank-{rank}") for rank in ranks):
            time.sleep(1.0)
        for rank in ranks:
            end = self.outcome.ends[rank]
            end.code = self._codes.get(f"rank-{rank}")
            if end.code is None:
                end.traces = (self._folder / f"errors-rank-{rank}").read_text(errors="replace")

    def look_for_left_over(self) -> None:
        """Look for processes, shared memory and temporary files of the ranks."""
        found = self.outcome.left_over
        assert self._scenario is not None
        # A process that is killed cannot remove its own, nor end its children.
        unable = self._scenario.silenced
        pids = {pid for name, pid in self._pids.items() if name.startswith("rank-")}
        children_of = {self._pids[f"rank-{rank}"] for rank in unable}
        for process, leader in _processes_of_sessions(pids).items():
            if leader not in children_of:
                found.append(f"process {process}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        shared = Path("/dev/shm")
        if shared.is_dir():
            numbers = {str(pid) for pid in pids}
            for one in shared.iterdir():
                if numbers & set(one.name.replace("-", "_").replace(".", "_").split("_")):
                    found.append(str(one))
        for rank in set(range(self._processes)) - set(unable):
            if self.outcome.ends[rank].code is not None:
                # Processes that load batches for torch end with their rank, and leave these.
                own = (self._folder / f"tmp-rank-{rank}").iterdir()
                found += [str(one) for one in own if not one.name.startswith("pymp-")]

    def _namespaces(self, alone: str | None, count: int) -> list[str] | None:
        if self._switch is None:
            return None if alone is None else [alone] * count
        descriptors = map(self._switch.namespace_descriptor, range(count))
        return [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in descriptors]

    def _start(self, name: str, program: str, job: Path, environment: dict[str, str]) -> None:
        temporary = self._folder / f"tmp-{name}"
        temporary.mkdir()
        with _asking:
            self._pids[name] = self._programs.start(
                self._name(name),
                program=program,
                arguments=[str(job)],
                output=str(self._folder / f"output-{name}"),
                errors=str(self._folder / f"errors-{name}"),
                environment={**environment, "TMPDIR": str(temporary)},
            )

    def _name(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _has_ended(self, name: str) -> bool:
        if name not in self._codes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._codes[name] = self._programs.wait(self._name(name), 0.0)
        return name in self._codes

    def _signal(self, name: str, number: int, *, group: bool = False) -> None:
        if not self._has_ended(name):
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if group else os.kill)(self._pids[name], number)

    def _end_all(self) -> None:
        for name in self._pids:
            self._signal(name, signal.SIGKILL)
        assert eventually(lambda: all(map(self._has_ended, self._pids)), _START_S)

    def _read_events(self, end: RankEnd) -> None:
        path = self._folder / f"rank-{end.rank}"
        # A rank that was killed may have left a part of a line.
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        end.events = [json.loads(line) for line in lines if line.endswith("\n")]
        end.errors = (self._folder / f"errors-rank-{end.rank}").read_text(errors="replace")


def new_folder(root: Path, name: str) -> Path:
    """Return a folder's path that nothing has had before."""
    return root / f"{name}-{uuid.uuid4().hex[:8]}"


def _processes_of_sessions(leaders: set[int]) -> dict[int, int]:
    """Return the processes that are in one of the sessions, with its leader."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) in leaders and fields[0] != "Z":
                found[int(path.parent.name)] = int(fields[3])
    return found
