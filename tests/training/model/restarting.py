"""A training program whose second rank fails in the first attempt, under torchrun's own agent.

Argument one is the port where its rendezvous is. The agent forks the ranks, since each would load
torch for seconds otherwise.
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import gradlane


def main() -> None:
    """Train five steps; print what was learned."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with gradlane.init(
        network=gradlane.Network(advertise="127.0.0.1", silence_timeout_s=5.0)
    ) as session:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        for step in range(5):
            if attempt == 0 and session.rank == 1 and step == 2:
                sys.exit(7)
            model(torch.full((2, 4), float(session.rank))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weight = model.weight.sum().item()
        # In one write: the ranks share a pipe, and their lines must not mix.
        os.write(1, f"rank {session.rank} attempt {attempt} weight {weight:.6f}\n".encode())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=2,
            rdzv_backend="c10d",
            rdzv_endpoint=f"127.0.0.1:{sys.argv[1]}",
            max_restarts=1,
            monitor_interval=0.1,
            # A fork beside the threads of the store could inherit a lock that one of them has.
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        elastic_launch(config, main)()
