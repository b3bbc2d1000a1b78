"""Real ranks with real data loaders, one of which is killed in the middle of an epoch."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from tests.built import needs_core
from tests.forked_programs import ForkedPrograms
from tests.waiting import eventually

pytestmark = needs_core

SAMPLES = 403
RANKS = 4
EPOCHS = 2
PATIENT_S = 120.0


def rows_of(path: Path) -> list[dict[str, Any]]:
    """What a rank wrote; of a rank that was killed the last line may be a part."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


@pytest.mark.parametrize(("victim", "workers"), [(0, 0), (2, 1)])
def test_no_sample_is_lost_or_doubled(
    programs: ForkedPrograms, tmp_path: Path, victim: int, workers: int
) -> None:
    random_ = random.Random(victim)
    # It outlives every rank.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = {
        "port": store.port,
        "folder": str(tmp_path),
        "world_size": RANKS,
        "samples": SAMPLES,
        "epochs": EPOCHS,
        "workers": workers,
    }
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job))
    files = {rank: tmp_path / f"rank-{rank}" for rank in range(RANKS)}
    names = {rank: f"{tmp_path}-{rank}" for rank in range(RANKS)}
    survivors = [rank for rank in range(RANKS) if rank != victim]
    pids: list[int] = []
    try:
        for rank, name in names.items():
            pid = programs.start(
                name,
                program="tests.training.sampler.elastic_rank",
                arguments=[str(path)],
                output=str(tmp_path / f"output-{rank}"),
                errors=str(tmp_path / f"errors-{rank}"),
                environment={"RANK": str(rank)},
            )
            pids.append(pid)
        # Steps of the first of some twenty in an epoch.
        fatal_step = random_.randrange(4, 12)
        assert eventually(lambda: len(rows_of(files[victim])) >= fatal_step, PATIENT_S)
        time.sleep(0.03 * random_.random())
        os.kill(pids[victim], signal.SIGKILL)
        codes = [programs.wait(names[rank], PATIENT_S) for rank in survivors]
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert codes == [0] * len(survivors), [
        (tmp_path / f"errors-{rank}").read_text() for rank in survivors
    ]
    rows = {rank: rows_of(files[rank]) for rank in range(RANKS)}
    changes = [[row for row in rows[rank] if "lost" in row] for rank in survivors]
    (change,) = changes[0]
    assert change["lost"] == [victim] and all(one == [change] for one in changes)
    for epoch in range(EPOCHS):
        trained = Counter(
            sample
            for rank in range(RANKS)
            for row in rows[rank]
            # The batch that the rank was lost with is trained again.
            if row.get("epoch") == epoch and (rank != victim or row["step"] < change["step"])
            for sample in row["samples"]
        )
        assert trained == dict.fromkeys(range(SAMPLES), 1), epoch
    # All ranks that are left take as many steps.
    assert len({len(rows[rank]) for rank in survivors}) == 1
