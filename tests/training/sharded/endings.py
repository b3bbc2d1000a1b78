"""A training of sharded models that goes wrong on some ranks.

`python -m tests.training.sharded.endings CASE ...`: each rank prints, for each case, its name, and
the class and the text of what ended it.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gradlane
from tests.training.sharded.programs import build, loss_of

STEPS = 12


def train(session: Any, case: str) -> None:
    """Train; the ranks of the second node go wrong in step 3."""
    rank, local = session.rank, int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = session.world_size // local
    mesh: Any = init_device_mesh("cpu", (nodes, local), mesh_dim_names=("node", "shard"))
    if case == "plain_model" and rank == 1:
        model: Any = nn.Linear(2, 2)
    else:
        model = build(mesh if case == "hsdp" and rank == 3 else mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    for step in range(1, STEPS + 1):
        wrong = step == 3 and rank >= local
        loss = loss_of(model, torch.full((2, 3), step + rank) % 11)
        if wrong and case == "killed" and rank == 3:
            # In the middle of backward: the others have gradients under way.
            model.blocks[1].up.weight.grad = None
            loss.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        if wrong and case == "skips":
            model.skips = True
            loss = loss_of(model, torch.full((2, 3), 2))
        loss.backward()
        if wrong and case == "rate":
            optimizer.param_groups[0]["lr"] = 0.2
        if wrong and case == "more":
            loss_of(model, torch.full((2, 3), 2)).backward()
        if wrong and case == "raises":
            raise ValueError("no more disk")
        optimizer.step()
        optimizer.zero_grad()


def main(cases: list[str]) -> None:
    """Run cases, each in a session of its own, and print how they ended."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    network = gradlane.Network(silence_timeout_s=20.0, connect_timeout_s=60.0)
    for case in cases:
        try:
            with gradlane.init(network=network) as session:
                train(session, case)
            found = "no error"
        except Exception as error:
            found = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        os.write(1, f"{case}: {found}\n".encode())
        if case not in ("killed", "raises"):
            # Rank 0 keeps the store in which the others may still read, and no rank is to hear in
            # its next session how another has left the last.
            dist.barrier()
    # Without goodbyes to a group that may have lost a rank.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
