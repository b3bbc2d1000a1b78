"""Asynchronous training by real processes, which nobody tells whose turn it is.

`training` emulates the order of updates; here it is that of processes that run beside each other
and exchange gradients over loopback with strategy `asgd`. A seed does not give the same bits again.
"""

from __future__ import annotations

import json
import sys
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore

from gradlane.lab.accuracy.curve import Curve, evaluation_steps
from gradlane.lab.accuracy.run import Run
from gradlane.lab.accuracy.tasks import Task
from gradlane.lab.cluster.errors import LabError
from gradlane.lab.cluster.fork_server import ForkedProgram, running_fork_server

START_S = 300.0
"""Longest time for the processes to start and to meet."""
PROGRESS_S = 300.0
"""Longest time that a process waits for another one."""


def check_ranks(task: Task) -> None:
    """Check that real processes can train a task asynchronously.

    Raises:
        ValueError: the task clips gradients, and servers apply each as it comes.
    """
    if task.clip is not None:
        raise ValueError(
            f"task {task.name} clips gradients, and the servers of asgd apply them as they come: "
            "leave out order=real, or choose another task"
        )


def train_on_ranks(run: Run, advance: Callable[[int], None]) -> Curve:
    """Train with a process for each worker; the curve is of rank 0's parameters.

    Args:
        run: each worker takes all steps and then serves until all have; the order of updates is
            not drawn, and of the scheme the share of the learning rate is taken.
        advance: told of rank 0's steps.

    Raises:
        ValueError: the task cannot be trained like this.
        LabError: a process failed; the text has its last words.
    """
    check_ranks(run.parsed()[0])
    server = running_fork_server({"OMP_NUM_THREADS": "1"})
    with tempfile.TemporaryDirectory(prefix="gradlane-asgd-") as folder:
        given = {"run": asdict(run), "store": f"{folder}/store", "job": f"asgd-{uuid.uuid4().hex}"}
        errors = [Path(folder, f"errors-{rank}") for rank in range(run.workers)]
        programs: list[ForkedProgram] = []
        lines = [b""] * run.workers
        try:
            for rank, path in enumerate(errors):
                with path.open("wb") as stderr:
                    told = json.dumps({**given, "rank": rank})
                    started = server.fork(
                        __name__, [told], environment={}, stderr=stderr, timeout_s=START_S
                    )
                started.stdin.close()
                programs.append(started)
            # A process that is lost ends the others' sessions, so every pipe comes to its end.
            for line in programs[0].stdout:
                lines[0] = line
                advance(json.loads(line).get("steps", 0))
            for rank, program in enumerate(programs[1:], start=1):
                lines[rank] = program.stdout.read()
            codes = [program.wait(PROGRESS_S) for program in programs]
        finally:
            for program in programs:
                program.kill()
                program.stdout.close()
        failed = [rank for rank, code in enumerate(codes) if code != 0]
        if failed:
            words = errors[failed[0]].read_text(encoding="utf-8", errors="replace")
            raise LabError(f"rank {failed[0]} of asgd failed; its last words: {words[-3000:]}")
    results: list[dict[str, Any]] = [json.loads(line) for line in lines]
    curve = Curve(**results[0]["curve"])
    # Each has counted the gradients that it applied.
    pushes = sum(one["pushes"] for one in results)
    curve.stale = sum(one["stale"] for one in results) / pushes
    return curve


def main() -> None:
    """Train as one of the processes; argument one has what `train_on_ranks` gives."""
    import gradlane

    given = json.loads(sys.argv[1])
    run, rank = Run(**given["run"]), given["rank"]
    task, scheme = run.parsed()
    torch.set_num_threads(1)
    model = task.build(run.seed)
    optimizer = task.make_optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] *= scheme.lr_share
    curve = Curve()
    stops = evaluation_steps(run.steps)[1:-1]
    rendezvous = gradlane.Rendezvous(
        store=FileStore(given["store"], run.workers),
        rank=rank,
        world_size=run.workers,
        job=given["job"],
    )
    network = gradlane.Network(
        advertise="127.0.0.1", connect_timeout_s=START_S, progress_timeout_s=PROGRESS_S
    )
    with gradlane.init(
        strategy="asgd", update="server", rendezvous=rendezvous, network=network
    ) as session:
        session.prepare(model, optimizer)
        if rank == 0:
            curve.note(0, task, model)
        for step in range(run.steps):
            task.loss(model, task.batch(run.seed, rank, run.workers, step)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                if step + 1 in stops:
                    curve.note(step + 1, task, model)
                print(json.dumps({"steps": 1}), flush=True)
        session.synchronize()
        if rank == 0:
            curve.note(run.steps, task, model)
        applied = session.staleness()
    curve.wire_bytes = [2 * 4 * sum(one.numel() for one in model.parameters())] * run.steps
    told = {
        "curve": asdict(curve),
        "pushes": sum(one["pushes"] for one in applied),
        "stale": sum(one["pushes"] * (one["mean"] or 0.0) for one in applied),
    }
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
