"""A rank of a training that others join: `python -m ... JOB.json`, with `LABEL` set, and `RANK` if
it is there from the start.

The job has `port` of the store, `folder`, `world_size` of the start, `joins`: how many ranks join
and stay until it ends, some steps later, `losses`: how many members all see lost until then,
`options`, `joiner_options`: in place of these on ranks that come later, `fatal`: by label, the
function in whose first call a rank is killed, `fatal_after`: the same, after a rank has `joined` or
was `lost`, `spoils`: one that does nothing there, `raises`: one that fails there, `is_small`:
whether the model has one parameter and SGD, `other_optimizer`: whether ranks that come later have
SGD, `slow`: seconds that each file of a checkpoint takes, `samples`: of an epoch for an
`ElasticSampler`, or 0, `fatal_steps`: by label, the step in whose backward a rank is killed,
counted from the start or the last join on, and after how many joins, `numbers`: by label, the
number whose batches a rank has, in place of its own, `pause_s`: seconds after each step, and
`prepares_anew`: whether all prepare the model anew in the end, and train on. Writes each step to
`rows-LABEL`, what it has seen to `LABEL.json`, and with `numbers` the state after each step, and
the owners of slices in each world, to `LABEL.pt`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.utils.data import DataLoader

import gradlane
from gradlane.training.options.options import keywords_of
from tests.training.model.going_rank import Model, copies_of, loss_of, note_owners

STEPS_AFTER = 6
EPOCHS = 4
PATIENT_S = 100.0


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with state, or without for a small model."""
    if isinstance(model, nn.Linear):
        return torch.optim.SGD(model.parameters(), lr=0.01)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a scheduler that changes the rate often."""
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.99)


def digest_of(model: nn.Module) -> str:
    """Return a digest of the bits of all parameters."""
    parts = [one.detach().cpu().numpy().tobytes() for one in model.parameters()]
    return hashlib.sha1(b"".join(parts)).hexdigest()


def replace_function(path: str, body: Callable[[], None]) -> None:
    """Replace `module:function` by another one."""
    module_name, _, name = path.partition(":")
    owner: Any = importlib.import_module(module_name)
    *outer, last = name.split(".")
    for part in outer:
        owner = getattr(owner, part)

    @functools.wraps(getattr(owner, last))
    def other(*_: Any, **__: Any) -> None:
        body()

    setattr(owner, last, other)


def kill_in(path: str) -> None:
    """Have this process killed in the first call of `module:function`."""
    replace_function(path, lambda: os.kill(os.getpid(), signal.SIGKILL))


def fail_in(path: str) -> None:
    """Have each call of `module:function` fail."""

    def fail() -> None:
        raise RuntimeError(f"{path} fails in this test")

    replace_function(path, fail)


def slow_down_writing(seconds: float) -> None:
    """Have each file of a checkpoint take so long."""
    module: Any = importlib.import_module("gradlane.training.checkpoints.manager")
    write = module.write_shard

    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return write(*arguments)

    module.write_shard = slow


def main() -> None:
    """Train, until as many ranks have joined as the job says."""
    torch.set_num_threads(1)
    label = os.environ["LABEL"]
    job = json.loads(Path(sys.argv[1]).read_text())
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    if label in job["fatal"]:
        kill_in(job["fatal"][label])
    if label in job["spoils"]:
        replace_function(job["spoils"][label], lambda: None)
    if label in job["raises"]:
        fail_in(job["raises"][label])
    slow_down_writing(job["slow"])
    is_member = "RANK" in os.environ
    place = {"rank": int(os.environ["RANK"]), "world_size": job["world_size"]} if is_member else {}
    owners: dict[str, list[int]] = {}
    note_owners(owners)
    session = gradlane.init(
        join=not is_member,
        **keywords_of(
            store=TCPStore("127.0.0.1", job["port"], is_master=False, wait_for_workers=False),
            job="joining",
            advertise="127.0.0.1",
            **place,
            **(job["options"] | ({} if is_member else job["joiner_options"])),
        ),
    )
    torch.manual_seed(1)
    model = nn.Linear(64, 1, bias=False) if job["is_small"] else Model()
    optimizer = optimizer_of(model)
    if not is_member and job["other_optimizer"]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = scheduler_of(optimizer)
    session.share_state(scheduler=scheduler)
    changes: list[dict[str, Any]] = []
    gathered: list[list[list[int]]] = []

    worlds: list[dict[str, list[int]]] = []
    """Owners of each tensor's slices in each world."""
    joined = 0
    """Ranks that have joined and are still there."""
    lost = 0
    """Members that were lost, also before this rank has joined."""

    def changed(change: gradlane.MembershipChange) -> None:
        nonlocal joined, lost
        changes.append(asdict(change))
        lost += len(change.lost)
        if change.joined:
            worlds.append(dict(owners))
        after, place = job["fatal_after"].get(label, ("", ""))
        if after and getattr(change, after):
            kill_in(place)
        rows = session.gather_integers([session.rank, session.step, int(not is_member), lost])
        gathered.append([[rank, step] for rank, step, _, _ in rows])
        joined = sum(has_joined for _, _, has_joined, _ in rows)
        lost = max(losses for _, _, _, losses in rows)

    session.on_membership(changed)
    sampler = None
    if job["samples"]:
        sampler = gradlane.ElasticSampler(
            range(job["samples"]), batch_size=2, session=session, shuffle=True
        )
    log = (Path(job["folder"]) / f"rows-{label}").open("w", buffering=1)
    session.prepare(model, optimizer)
    if is_member:
        worlds.append(dict(owners))
    fatal_step, fatal_joins = job["fatal_steps"].get(label, (0, 0))

    def die(*_: Any) -> None:
        joins = [one["step"] for one in changes if one["joined"]]
        begun = joins[-1] - 1 if joins else 0
        if (session.step + 1 - begun, len(joins)) == (fatal_step, fatal_joins):
            os.kill(os.getpid(), signal.SIGKILL)

    if fatal_step:
        assert isinstance(model, Model)
        model.second.register_full_backward_hook(die)
    before = 0
    """Steps that the session does not count: those of the checkpoint it goes on from."""
    if "checkpoint_folder" in job["options"]:
        before = session.restore() - session.step
        if is_member and before:
            # The checkpoint was taken inside `optimizer.step()`.
            scheduler.last_epoch = before - 1
            scheduler.step()
    rows: list[list[Any]] = []
    states: list[list[torch.Tensor]] = []
    metrics: Any
    ids: list[list[int]] = []
    deadline_s = time.monotonic() + PATIENT_S

    def train(step: int) -> None:
        loss = loss_of(model, job["numbers"].get(label, session.rank), step)
        world_size = session.world_size
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        session.synchronize()
        rows.append([step, world_size, digest_of(model)])
        log.write(json.dumps(rows[-1]) + "\n")
        if job["numbers"]:
            states.append(copies_of(model))
        time.sleep(job["pause_s"])
        assert time.monotonic() < deadline_s, f"{joined} have joined"

    def steps() -> Iterator[int]:
        """Yield steps until all ranks have joined, and all losses are in force, and some more."""
        while True:
            last = (changes[-1]["step"] if changes else 0) + STEPS_AFTER
            # A thread learns of losses, on a busy machine some steps later.
            if joined >= job["joins"] and lost >= job["losses"] and session.step >= last:
                return
            yield before + session.step + 1

    if sampler is None:
        for step in steps():
            train(step)
    else:
        data: Any = torch.arange(job["samples"])
        loader: Any = DataLoader(data, batch_sampler=sampler)
        for epoch in range(sampler.epoch, EPOCHS):
            sampler.set_epoch(epoch)
            for batch in sampler.track(loader):
                ids.extend([epoch, one] for one in batch.tolist())
                train(session.step + 1)
                time.sleep(0.05)
    if job["prepares_anew"]:
        ended = session.step
        session.prepare(model, optimizer)
        for step in range(ended + 1, ended + STEPS_AFTER + 1):
            train(step)
    metrics = session.metrics()
    result = {
        "rows": rows,
        "ids": ids,
        "begun": before,
        "changes": changes,
        "gathered": gathered,
        "rate": optimizer.param_groups[0]["lr"],
        "scheduled": scheduler.last_epoch,
        "step": session.step,
        "metrics": {name: metrics[name] for name in ("members", "generation", "joined", "lost")},
    }
    session.close()
    if job["numbers"]:
        torch.save({"states": states, "worlds": worlds}, Path(job["folder"]) / f"{label}.pt")
    (Path(job["folder"]) / f"{label}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
