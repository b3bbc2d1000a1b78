"""Processes that are stopped, ranks that are at other work for long, clocks that are set."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradlane
from gradlane.errors import PeerLostError, ProgressTimeoutError
from gradlane.training.rendezvous.deadline import SuspendAwareDeadline
from tests.built import needs_core
from tests.training.model.pool import RankPool
from tests.training.model.ranks import run_ranks

SOURCES = Path(gradlane.__file__).parent
_APART = (
    *("lab", "planning", "report", "formats"),
    # Failures before the ranks are connected, compared between machines.
    "training/rendezvous/start_failures.py",
)


def train_with_a_stop(
    store: Any, rank: int, world_size: int, job: str, *, stop_s: float, silence_s: float
) -> float:
    """Train while something outside stops this process once; returns how long that took."""
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    me = os.getpid()
    with gradlane.init(
        rendezvous=gradlane.Rendezvous(store=store, rank=rank, world_size=world_size, job=job),
        network=gradlane.Network(silence_timeout_s=silence_s, progress_timeout_s=silence_s),
        monitoring=gradlane.Monitoring(summary=False),
    ) as session:
        session.prepare(model, optimizer)
        stopper = subprocess.Popen(
            ["sh", "-c", f"sleep 0.2; kill -STOP {me}; sleep {stop_s}; kill -CONT {me}"]
        )
        begun_s = time.monotonic()
        for _ in range(60):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)
        session.synchronize()
        took_s = time.monotonic() - begun_s
        stopper.wait()
    return took_s


@needs_core
def test_a_job_that_is_suspended_and_resumed_goes_on(pool: RankPool) -> None:
    """As a batch system does it: all ranks stand still, for longer than any time-out of theirs."""
    results = pool.run(
        "tests.training.long_runs.test_standing_still:train_with_a_stop",
        ranks=2,
        stop_s=4.0,
        silence_s=2.0,
    )
    # Otherwise they were through before.
    assert all(took_s > 4.0 for took_s in results), results


def test_a_deadline_counts_only_the_time_in_which_it_was_polled() -> None:
    now_s = [0.0]
    deadline = SuspendAwareDeadline(10.0, clock=lambda: now_s[0])
    for _ in range(3):
        now_s[0] += 2.0
        assert not deadline.is_over(2.0)
    now_s[0] += 3_600.0
    assert not deadline.is_over(2.0), "an hour that was none of the other rank's"
    now_s[0] += 2.0
    assert deadline.is_over(2.0)
    deadline.renew()
    now_s[0] += 9.0
    assert not deadline.is_over(9.0)


@needs_core
def test_a_rank_may_evaluate_for_longer_than_it_takes_to_connect() -> None:
    steps = _with_an_evaluation(connect_timeout_s=1.0, progress_timeout_s=30.0)
    assert steps == [4, 4]


@needs_core
@pytest.mark.parametrize("check_every", [0, 1])
def test_a_rank_that_evaluates_for_too_long_is_named_with_the_option(check_every: int) -> None:
    results = _with_an_evaluation(
        connect_timeout_s=20.0, progress_timeout_s=1.0, check_every=check_every
    )
    first, second = results
    assert isinstance(second, ProgressTimeoutError), results
    assert "rank 0" in str(second) and "progress_timeout_s" in str(second)
    # Who comes back hears that the others have given up.
    assert isinstance(first, PeerLostError), results


def _with_an_evaluation(**options: Any) -> list[Any]:
    def body(session: gradlane.Session) -> int:
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        for step in range(4):
            if step == 2 and session.rank == 0:
                time.sleep(2.5)
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.synchronize()
        return session.metrics()["step"]

    return run_ranks(2, body, expect_errors=True, summary=False, **{"check_every": 1, **options})


def test_nothing_that_trains_reads_a_clock_that_can_be_set() -> None:
    """Only code outside of trainings reads the time of day."""
    wall = re.compile(r"time\.time\(|time\.time_ns\(|datetime\.now|utcnow|localtime|gmtime")
    found = [
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        if not str(path.relative_to(SOURCES)).startswith(_APART)
        and wall.search(path.read_text(encoding="utf-8"))
    ]
    assert found == []
    crates = SOURCES.parent.parent / "crates"
    for name in ("units", "wire", "engine", "codec", "net", "py"):
        for path in (crates / f"gradlane-{name}" / "src").rglob("*.rs"):
            text = path.read_text(encoding="utf-8")
            assert "SystemTime" not in text and "CLOCK_REALTIME" not in text, path
