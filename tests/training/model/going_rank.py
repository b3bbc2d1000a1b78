"""A rank of a training that goes on when ranks are lost: `python -m ... JOB.json`, with `RANK` set.

The job has `port` of the store, `folder`, `world_size`, `steps`, `options`, `ends`: by rank, how,
in which step and at which moment it ends, `numbers`: by rank, the one whose batches it has,
`asks`: steps after which all ask for the session's state, and perhaps `waits`: a file, and the step
before which ranks wait for it. Writes the state after each step to `rank-R.pt`.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore

import gradlane
from gradlane.training.checkpoints.folder import complete_folders
from gradlane.training.options.options import keywords_of
from tests.device import DEVICE
from tests.waiting import eventually

SIGNALS = {
    "sigkill": signal.SIGKILL,
    "sigstop": signal.SIGSTOP,
    "sigstop together": signal.SIGSTOP,
    "sigterm": signal.SIGTERM,
    "sigkill once saved": signal.SIGKILL,
}


class Model(nn.Module):
    """Some layers, in the middle of whose backward a program can end; inputs (N, 64)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        # Each tensor is one slice.
        self.first = nn.Linear(64, 200)
        self.norm = nn.BatchNorm1d(200)
        self.second = nn.Linear(200, 200)
        self.third = nn.Linear(200, 8)
        self.to(DEVICE)

    def forward(self, values: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(values)))
        return self.third(torch.relu(self.second(hidden)))  # type: ignore[no-any-return]


def loss_of(model: nn.Module, rank: int, step: int) -> Any:
    """Return the loss of a rank's batch; ranks are numbered as at the start."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    batch = torch.randn(4, 64, generator=generator).to(DEVICE)
    loss: Any = (model(batch) - 1.0).square().mean()
    return loss


def mean_over(gradients: Sequence[Tensor]) -> Tensor:
    """Return the mean in the order of ranks, divided on the host: CUDA divides by another rule."""
    total = gradients[0]
    for gradient in gradients[1:]:
        total = total + gradient
    return (total.cpu() / len(gradients)).to(total.device)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def copies_of(model: nn.Module) -> list[Tensor]:
    """Return copies of a model's tensors in the host's memory."""
    return [one.detach().to("cpu", copy=True) for one in model.state_dict().values()]


def note_owners(owners: dict[str, list[int]]) -> None:
    """Have the owners of each tensor's slices noted when the ranks connect."""
    core: Any = importlib.import_module("gradlane._core")
    make_plan = core.plan_json

    def plan_json(*arguments: Any, **options: Any) -> str:
        made: str = make_plan(*arguments, **options)
        plan = json.loads(made)
        for tensor in plan["tensors"]:
            slices = plan["slices"][slice(tensor["slices"]["start"], tensor["slices"]["end"])]
            owners[tensor["name"]] = [one["owner"] for one in slices]
        return made

    core.plan_json = plan_json


def main() -> None:
    """Train, and end as the job says."""
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    own = int(os.environ["RANK"])
    kind, fatal_step, fatal_moment = job["ends"].get(str(own), ("", 0, ""))
    step = 0
    owners: dict[str, list[int]] = {}
    note_owners(owners)

    def reached(moment: str) -> None:
        if (step, moment) == (fatal_step, fatal_moment):
            if kind == "raise":
                raise ArithmeticError("the loss is not a number")
            if kind == "sigkill once saved":
                folder = Path(job["options"]["checkpoint_folder"])
                assert eventually(lambda: bool(complete_folders(folder)))
            if kind == "sigstop together":
                # One that stands still owes the others what it has not sent: they would not come.
                here = [Path(job["folder"]) / f"here-{rank}" for rank in job["ends"]]
                here[list(job["ends"]).index(str(own))].touch()
                assert eventually(lambda: all(path.exists() for path in here), 120.0)
            os.kill(os.getpid(), SIGNALS[kind])

    def hear_of_losses(step: int) -> None:
        """Wait until this rank knows of those before a step.

        A thread learns of them, which on a busy machine may be later than the last of few steps.
        """
        count = sum(end[1] < step for end in job["ends"].values())
        eventually(lambda: len(session.metrics()["lost"]) >= count, 5.0)

    session = gradlane.init(
        **keywords_of(
            store=TCPStore("127.0.0.1", job["port"], is_master=False, wait_for_workers=False),
            rank=own,
            world_size=job["world_size"],
            job="going",
            advertise="127.0.0.1",
            **job["options"],
        )
    )
    model = Model()
    model.second.register_full_backward_hook(lambda *_: reached("backward"))
    optimizer = optimizer_of(model)
    session.prepare(model, optimizer)
    changes: list[dict[str, Any]] = []
    gathered: list[list[list[int]]] = []

    def changed(change: gradlane.MembershipChange) -> None:
        changes.append({**asdict(change), "at": step})
        gathered.append(session.gather_integers([own, step]))

    session.on_membership(changed)
    states: list[list[Tensor]] = []
    asked: list[Any] = []
    begun = session.restore() if "checkpoint_folder" in job["options"] else 0
    if begun:
        asked.append(session.state_dict())
    awaited, awaited_before = job.get("waits", ("", 0))
    for step in range(begun + 1, job["steps"] + 1):
        if step == awaited_before:
            assert eventually(Path(awaited).exists, 120.0)
        reached("forward")
        loss = loss_of(model, job["numbers"][own], step)
        loss.backward()
        reached("after backward")
        optimizer.step()
        reached("after step")
        hear_of_losses(step)
        optimizer.zero_grad()
        if job["looks"]:
            states.append(copies_of(model))
        if step in job["asks"]:
            reached("asking")
            asked.append(session.state_dict())
    session.synchronize()
    final = copies_of(model)
    hear_of_losses(job["steps"] + 1)
    lost = [[row["rank"], row["step"]] for row in session.metrics()["lost"]]
    residuals = [row["residuals"] for row in session.metrics()["lost"]]
    codecs = {one.tensor: one.codec for one in session.monitoring.codecs}
    # Each lane has a thread of its own.
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    session.close()
    torch.save(
        {
            "states": states,
            "final": final,
            "changes": changes,
            "gathered": gathered,
            "lost": lost,
            "residuals": residuals,
            "begun": begun,
            "asked": asked,
            "codecs": codecs,
            "owners": owners,
            "lanes": threads.count("gradlane-io"),
        },
        Path(job["folder"]) / f"rank-{own}.pt",
    )


if __name__ == "__main__":
    main()
