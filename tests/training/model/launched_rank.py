"""A training program as one writes it for gradlane, started by all kinds of launchers.

It divides a data set with torch's own sampler, trains, saves a checkpoint with
torch.distributed.checkpoint on rank 0, and prints one line: rank, world size, job, which samples it
saw, and the hash of its parameters.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed.checkpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import gradlane
from tests.torch_versions import NO_DIST
from tests.training.model.scenarios import digest

CHECKPOINTS: Any = torch.distributed.checkpoint


def main(folder: str) -> None:
    """Train two epochs and print what came of it.

    Args:
        folder: where the checkpoint goes; empty for none.
    """
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    with gradlane.init(
        network=gradlane.Network(silence_timeout_s=20.0, connect_timeout_s=60.0)
    ) as session:
        model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        data = TensorDataset(torch.arange(8.0).view(8, 1))
        sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
            data, session.world_size, session.rank, seed=3
        )
        seen = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for (values,) in DataLoader(data, batch_size=2, sampler=sampler):
                seen += [int(value) for value in values]
                (model(values) - values).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        if folder and session.rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            CHECKPOINTS.save(state, checkpoint_id=folder, **NO_DIST)
        line = f"rank {session.rank} of {session.world_size} saw {seen} has {digest(model)}\n"
        # In one write: the ranks share a pipe, and their lines must not mix.
        os.write(1, line.encode())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
