"""The study's asynchronous workers are the engine's: same updates, same staleness, same curve.

The study takes turns in one process, so that a seed gives the same bits on any machine. Here ranks
over real connections take the same turns, and must learn the same.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from gradlane_papers.accuracy.exchange import ALL
from gradlane_papers.accuracy.run import Run
from gradlane_papers.accuracy.tasks import TASKS
from gradlane_papers.accuracy.training import train
from tests.built import needs_core
from tests.training.model.ranks import run_ranks

pytestmark = needs_core

WORKERS, STEPS, SEED = 3, 5, 4


def test_asgd_of_the_study_is_that_of_the_engine() -> None:
    task = TASKS["mlp"]
    # The study's own generator is one for the whole process.
    models = [task.build(SEED) for _ in range(WORKERS)]
    turns = [threading.Semaphore(0) for _ in range(WORKERS)]
    turns[0].release()

    def body(session: Any) -> tuple[list[float], Any]:
        model = models[session.rank]
        optimizer = task.make_optimizer(model)
        session.prepare(model, optimizer)
        losses = [task.evaluate(model)[0]]
        for step in range(STEPS):
            assert turns[session.rank].acquire(timeout=30)
            loss = task.loss(model, task.batch(SEED, session.rank, WORKERS, step))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            # Waits for this rank's own answer.
            list(model.parameters())
            losses.append(task.evaluate(model)[0])
            turns[(session.rank + 1) % WORKERS].release()
        session.synchronize()
        return losses, session.monitoring.staleness()

    results = run_ranks(WORKERS, body, strategy="asgd", update="server")
    curve = train(Run(task.name, "asgd", ALL, SEED, WORKERS, STEPS))
    assert curve.evaluated == list(range(STEPS + 1))
    # The last rank's answer holds everybody's updates of that round.
    assert results[-1][0] == pytest.approx(curve.loss, abs=1e-5)
    assert curve.loss[-1] != pytest.approx(curve.loss[0], abs=0.01)
    for rank in range(WORKERS):
        told = [staleness[rank] for _, staleness in results]
        pushes = sum(one["pushes"] for one in told)
        stale = sum(one["pushes"] * one["mean"] for one in told if one["pushes"])
        # Of its first gradient only the ranks before it were faster.
        expected = (rank + (WORKERS - 1) * (STEPS - 1)) / STEPS
        assert stale / pushes == pytest.approx(expected)
