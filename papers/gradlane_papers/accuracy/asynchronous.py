"""Asynchronous training by real processes, which nobody tells whose turn it is.

`training` emulates the order of updates; here it is that of processes that run beside each other
and exchange gradients over loopback with strategy `asgd`. A seed does not give the same bits again.
"""

from __future__ import annotations

import sys
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from gradlane.lab.cluster.rank_program import Answers, answer_requests
from gradlane.lab.cluster.ranks import RankPool
from gradlane.training.torch_internals import FileStore
from gradlane_papers.accuracy.curve import TrainingCurve, evaluation_steps
from gradlane_papers.accuracy.run import Run
from gradlane_papers.accuracy.tasks import Task

STALL_S = 300.0
"""Seconds that processes may take to meet, and that one waits for another one."""


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


def train_on_ranks(run: Run, advance: Callable[[int], None]) -> TrainingCurve:
    """Train with a process for each worker; the curve is of rank 0's parameters.

    Args:
        run: each worker takes all steps and then serves until all have; the order of updates is
            not drawn, and of the scheme the share of the learning rate is taken.
        advance: told of rank 0's steps.

    Raises:
        ValueError: the task cannot be trained like this.
        RankError: a process failed; the text has its last words.
    """
    check_ranks(run.parsed()[0])
    advanced = 0

    def on_progress(rank: int, done_steps: int) -> None:
        nonlocal advanced
        if rank == 0:
            advance(done_steps - advanced)
            advanced = done_steps

    with (
        tempfile.TemporaryDirectory(prefix="gradlane-asgd-") as folder,
        RankPool(None, ranks=run.workers, program=__name__, stall_timeout_s=STALL_S) as pool,
    ):
        request = {
            "kind": "train",
            "run": asdict(run),
            "store": f"{folder}/store",
            "job": f"asgd-{uuid.uuid4().hex}",
        }
        results = pool.ask([request] * run.workers, on_progress)
    on_progress(0, run.steps)
    curve = TrainingCurve(**results[0]["curve"])
    # Each has counted the gradients that it applied.
    pushes = sum(one["pushes"] for one in results)
    curve.stale = sum(one["stale"] for one in results) / pushes
    return curve


def _train(rank: int, given: dict[str, Any], answers: Answers) -> dict[str, Any]:
    """Train as one of the processes; `given` is what `train_on_ranks` asks for."""
    import gradlane

    run = Run(**given["run"])
    task, scheme = run.parsed()
    model = task.build(run.seed)
    optimizer = task.make_optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] *= scheme.lr_share
    curve = TrainingCurve()
    stops = evaluation_steps(run.steps)[1:-1]
    rendezvous = gradlane.Rendezvous(
        store=FileStore(given["store"], run.workers),
        rank=rank,
        world_size=run.workers,
        job=given["job"],
    )
    network = gradlane.Network(
        advertise="127.0.0.1", connect_timeout_s=STALL_S, progress_timeout_s=STALL_S
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
            if rank == 0 and step + 1 in stops:
                curve.note(step + 1, task, model)
            answers.report_step(step + 1)
        session.synchronize()
        if rank == 0:
            curve.note(run.steps, task, model)
        applied = session.monitoring.staleness()
    curve.wire_bytes = [2 * 4 * sum(one.numel() for one in model.parameters())] * run.steps
    return {
        "curve": asdict(curve),
        "pushes": sum(one["pushes"] for one in applied),
        "stale": sum(one["pushes"] * (one["mean"] or 0.0) for one in applied),
    }


def main() -> None:
    """Answer requests for the rank in argument one until the input ends."""
    rank = int(sys.argv[1])
    answer_requests(lambda answers: {"train": lambda **given: _train(rank, given, answers)})


if __name__ == "__main__":
    main()
