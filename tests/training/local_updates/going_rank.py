"""A rank of a training with local updates that goes on: `python -m ... JOB.json`, with `RANK` set.

The job has `port` of the store, `folder`, `world_size`, `update`: of `gradlane.Local`, `options`,
and `ends`: by rank, the step before whose update it is killed. Writes the bits of the parameters
in the end, and who was left, to `rank-R.json`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch._C._distributed_c10d import TCPStore

import gradlane
from gradlane.training.options.options import keywords_of
from tests.training.local_updates.test_training import adam, build, loss
from tests.training.model.models import seeded
from tests.training.node.node_programs import digest
from tests.waiting import eventually

STEPS = 14


def main() -> None:
    """Train, and end as the job says."""
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    own = int(os.environ["RANK"])
    store = TCPStore("127.0.0.1", job["port"], is_master=False, wait_for_workers=False)
    session = gradlane.init(
        update=gradlane.Local(**job["update"]),
        going_on=True,
        **keywords_of(
            store=store,
            rank=own,
            world_size=job["world_size"],
            job="going",
            advertise="127.0.0.1",
            **job["options"],
        ),
    )
    model = seeded(build, 7 + own)
    optimizer = adam(model)
    session.prepare(model, optimizer)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss(model, own, step).backward()
        if job["ends"].get(str(own)) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == STEPS - 4:
            assert eventually(lambda: bool(session.metrics()["lost"]), 60.0)
        optimizer.step()
    session.synchronize()
    found = {"common": digest(model), "place": [session.rank, session.world_size]}
    session.close()
    (Path(job["folder"]) / f"rank-{own}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
