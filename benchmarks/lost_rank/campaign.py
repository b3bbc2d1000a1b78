"""One kill: draw it, run a training, kill a rank, and judge."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lost_rank.judge import SETTLED_STEPS, Verdict, judge
from benchmarks.lost_rank.processes import DeadlineError, Processes
from benchmarks.lost_rank.rank_log import DONE, STARTED, Event, log_path, read_log
from benchmarks.lost_rank.systems import Job, System

STEPS_AFTER = 40
"""Steps of a training after the one at which a rank is killed."""
LIMIT_S = 300
"""Seconds that a training may take, its start included."""
_RANK_LIMIT_S = LIMIT_S + 30
_LATEST_KILL_S = 0.1


@dataclass(frozen=True)
class Kill:
    """A drawn kill.

    Attributes:
        victim: the rank that gets SIGKILL.
        step: it does once every rank has completed this step,
        delay_s: and so many seconds have passed.
    """

    victim: int
    step: int
    delay_s: float


@dataclass(frozen=True)
class Result:
    """One kill under one system; `failure` says what came instead of a verdict."""

    system: str
    kill: Kill
    load: float
    wall_s: float
    verdict: Verdict | None
    failure: str


def draw_kills(seed: int, count: int, ranks: int, every: int) -> list[Kill]:
    """Draw kills: all ranks equally often, at any phase between two checkpoints.

    Args:
        seed: the same seed draws the same kills.
        count: number of kills.
        ranks: number of ranks.
        every: steps from one checkpoint to the next.
    """
    generator = random.Random(seed)
    victims: list[int] = []
    while len(victims) < count:
        victims += generator.sample(range(ranks), ranks)
    first = max(every, 2 * SETTLED_STEPS) + 1
    return [
        Kill(
            victim,
            generator.randrange(first, first + 2 * every),
            generator.uniform(0.0, _LATEST_KILL_S),
        )
        for victim in victims[:count]
    ]


def run_kill(
    name: str, system: System, kill: Kill, job: Job, every: int, limit_s: float = LIMIT_S
) -> Result:
    """Train under a system, kill one rank, and judge what follows.

    Args:
        name: of the system.
        system: the system.
        kill: the kill.
        job: folder and size of the training.
        every: steps from one checkpoint to the next.
        limit_s: seconds that the training may take.
    """
    begin_s = time.monotonic()
    load = os.getloadavg()[0]
    steps = kill.step + STEPS_AFTER
    settings = {
        **system.settings,
        "folder": str(job.folder),
        "ranks": job.ranks,
        "steps": steps,
        "every": every,
        "limit_s": _RANK_LIMIT_S,
    }
    (job.folder / "job.json").write_text(json.dumps(settings), encoding="utf-8")
    failure, killed_at_s = "", None
    with Processes(job.folder, limit_s) as processes:
        try:
            system.start(job, processes)
            _wait_for_step(job, processes, kill.step)
            time.sleep(kill.delay_s)
            pid = _newest_pid(read_log(log_path(job.folder, kill.victim)))
            killed_at_s = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            while not processes.are_done():
                processes.pause("for the survivors' last step")
        except (DeadlineError, ProcessLookupError) as error:
            failure = str(error)
    logs = {rank: read_log(log_path(job.folder, rank)) for rank in range(job.ranks)}
    verdict = None if killed_at_s is None else judge(logs, kill.victim, killed_at_s, steps)
    if verdict is not None and not verdict.finished:
        failure = failure or "the survivors' processes ended before their last step"
    return Result(name, kill, load, time.monotonic() - begin_s, verdict, failure)


def _newest_pid(events: Sequence[Event]) -> int:
    return [event.pid for event in events if event.kind == STARTED][-1]


def _wait_for_step(job: Job, processes: Processes, step: int) -> None:
    def is_behind(rank: int) -> bool:
        events = read_log(log_path(job.folder, rank))
        return not any(event.kind == DONE and event.step >= step for event in events)

    while any(is_behind(rank) for rank in range(job.ranks)):
        if processes.are_done():
            raise DeadlineError(f"the ranks ended before step {step}")
        processes.pause(f"for step {step} on all ranks")


def read_outputs(folder: Path, last_lines: int = 5) -> str:
    """Return the last lines that each process of a training has printed."""
    parts = []
    for path in sorted(folder.glob("*.txt")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-last_lines:]
        parts += [f"{path.name}: {line}" for line in lines]
    return "\n".join(parts)
