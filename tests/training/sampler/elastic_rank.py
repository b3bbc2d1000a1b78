"""A rank that trains on an `ElasticSampler`'s batches: `python -m ... JOB.json`, with `RANK` set.

Writes a JSON line for each batch, with its epoch, step and samples, as the program takes it, and
for each change of the members, to `rank-R` in the job's folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.utils.data import DataLoader, Dataset

import gradlane
from gradlane.training.options.options import keywords_of

STEP_S = 0.01


class Data(Dataset[tuple[int, Tensor]]):
    """Samples that come with their numbers."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.full((8,), float(index))


def main() -> None:
    """Train some epochs."""
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["RANK"])
    log = (Path(job["folder"]) / f"rank-{rank}").open("w")

    def write(**fields: object) -> None:
        print(json.dumps(fields), file=log, flush=True)

    session = gradlane.init(
        **keywords_of(
            store=TCPStore("127.0.0.1", job["port"], is_master=False, wait_for_workers=False),
            rank=rank,
            world_size=job["world_size"],
            job="elastic",
            advertise="127.0.0.1",
            going_on=True,
        )
    )
    session.on_membership(lambda change: write(lost=change.lost, step=change.step - 1))
    data = Data(job["samples"])
    sampler = gradlane.ElasticSampler(data, batch_size=5, session=session)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=job["workers"])
    torch.manual_seed(1)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    session.prepare(model, optimizer)
    for epoch in range(job["epochs"]):
        sampler.set_epoch(epoch)
        for samples, values in sampler.track(loader):
            write(epoch=epoch, step=session.step + 1, samples=samples.tolist())
            model(values).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(STEP_S)
    session.close()


if __name__ == "__main__":
    main()
