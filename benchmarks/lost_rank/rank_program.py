"""One rank of a training: `python -m benchmarks.lost_rank.rank_program JOB`.

The model, the data and the length of a step are the same under every system. A batch is a function
of (rank, step), so a step that is done again has the same samples. Each system's packages are
imported by its own function alone, since their loading is a part of a restart.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from benchmarks.lost_rank.rank_log import RankLog, log_path
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 512
CLASSES = 32
BATCH = 32
DEVICE_S = 0.03
"""Seconds that a step sleeps between forward and backward, where an accelerator would compute: four
ranks on two processors then do not measure their fight for these."""
_LEAVE_S = 1.0


class Task:
    """A classifier of 0.8 million parameters, and batches that a random linear map has labelled."""

    def __init__(self, rank: int) -> None:
        """Build the model, the same on every rank, and the data of one rank."""
        torch.manual_seed(0)
        layers = [part for _ in range(3) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self.model: nn.Module = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.05, momentum=0.9
        )
        self._parameters = list(self.model.parameters())
        self._labels = torch.randn(WIDTH, CLASSES)
        self._rank = rank

    def loss(self, forward: nn.Module, step: int) -> Tensor:
        """Return the loss of a step's batch; the backward pass is the caller's.

        Args:
            forward: the model, or a system's wrapper of it.
            step: number of the step.
        """
        generator = torch.Generator().manual_seed(1_000_003 * step + self._rank)
        inputs = torch.randn(BATCH, WIDTH, generator=generator)
        loss = functional.cross_entropy(forward(inputs), (inputs @ self._labels).argmax(1))
        time.sleep(DEVICE_S)
        return loss

    def checksum(self) -> int:
        """Return the CRC-32 of all parameters."""
        total = 0
        for parameter in self._parameters:
            total = zlib.crc32(parameter.detach().numpy().data, total)
        return total


def train_ddp(job: dict[str, Any]) -> None:
    """Train with DistributedDataParallel, from rank 0's last checkpoint if there is one."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    log = RankLog(Path(job["folder"]), rank)
    task = Task(rank)
    checkpoint = Path(job["folder"]) / "checkpoint.pt"
    begun = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        begun = state["step"]
        task.model.load_state_dict(state["model"])
        task.optimizer.load_state_dict(state["optimizer"])
    # Its constructor waits for all ranks, so none writes a checkpoint while another reads.
    forward = nn.parallel.DistributedDataParallel(task.model)
    for step in range(begun, job["steps"]):
        log.begin(step)
        loss = task.loss(forward, step)
        loss.backward()
        task.optimizer.step()
        task.optimizer.zero_grad()
        log.end(step, loss.item(), task.checksum())
        if rank == 0 and (step + 1) % job["every"] == 0:
            state = {
                "step": step + 1,
                "model": task.model.state_dict(),
                "optimizer": task.optimizer.state_dict(),
            }
            torch.save(state, checkpoint.with_suffix(".part"))
            checkpoint.with_suffix(".part").replace(checkpoint)
    dist.barrier()
    # Threads of Gloo outlive the group, and can abort an interpreter that ends.
    os._exit(0)


def train_gradlane(job: dict[str, Any]) -> None:
    """Train with a session and its checkpoints; or, where the job goes on, with neither restart."""
    import gradlane

    rank = int(os.environ["RANK"])
    log = RankLog(Path(job["folder"]), rank)
    task = Task(rank)
    options: dict[str, Any] = {
        "network": gradlane.Network(advertise="127.0.0.1"),
        "monitoring": gradlane.Monitoring(summary=False),
    }
    if job["going_on"]:
        from torch._C._distributed_c10d import TCPStore

        # The launcher keeps the store: it outlives every rank.
        port = int(os.environ["MASTER_PORT"])
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        options["rendezvous"] = gradlane.Rendezvous(store=store)
        options["going_on"] = True
    else:
        folder = Path(job["folder"]) / "checkpoints"
        options["checkpoints"] = gradlane.Checkpoints(folder, every=job["every"], keep=2)
    with gradlane.init(**options) as session:
        _, optimizer = session.prepare(task.model, task.optimizer)
        begun = 0 if job["going_on"] else session.restore()
        for step in range(begun, job["steps"]):
            log.begin(step)
            loss = task.loss(task.model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.synchronize()
            log.end(step, loss.item(), task.checksum())


def train_torchft(job: dict[str, Any]) -> None:
    """Train with torchft: each rank is a replica group of its own, as in torchft's README.

    `Manager.allreduce` averages all gradients in one piece: torchft's own wrapper of a model
    (`torchft.DistributedDataParallel`, 0.2.0) ends the survivors of a broken Gloo connection with
    an AssertionError.
    """
    from torch._C._distributed_c10d import TCPStore

    torchft: Any = importlib.import_module("torchft")
    rank = int(os.environ["REPLICA_GROUP_ID"])
    folder = Path(job["folder"])
    task = Task(rank)

    def load(state: dict[str, Any]) -> None:
        task.model.load_state_dict(state["model"])
        task.optimizer.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=job["timeout_s"])),
        load_state_dict=load,
        state_dict=lambda: {
            "model": task.model.state_dict(),
            "optimizer": task.optimizer.state_dict(),
        },
        min_replica_size=1,
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        replica_id=f"replica_{rank}",
    )
    parameters = list(task.model.parameters())
    optimizer = torchft.Optimizer(manager, task.optimizer)
    log = RankLog(folder, rank)
    # A replica that begins alone would train alone, and those after it would miss its steps.
    while not all(log_path(folder, other).exists() for other in range(job["ranks"])):
        time.sleep(0.01)
    while (step := manager.current_step()) < job["steps"]:
        log.begin(step)
        optimizer.zero_grad()
        loss = task.loss(task.model, step)
        loss.backward()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        manager.allreduce(flat).wait()
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        # It updates nothing if the step has failed, and the step is taken again.
        optimizer.step()
        if manager.current_step() > step:
            log.end(step, loss.item(), task.checksum())
    # A rank that left at once would break the others' last step.
    time.sleep(_LEAVE_S)
    os._exit(0)


PROGRAMS = {"ddp": train_ddp, "gradlane": train_gradlane, "torchft": train_torchft}


def main() -> None:
    """Train one rank of the job in the file that is named; end after its `limit_s` seconds."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    # The default action of the signal ends the process, whatever it waits for.
    signal.alarm(job["limit_s"])
    torch.set_num_threads(1)
    PROGRAMS[job["program"]](job)


if __name__ == "__main__":
    main()
