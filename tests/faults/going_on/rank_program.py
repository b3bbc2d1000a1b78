"""One rank of a training that goes on: `python -m tests.faults.going_on.rank_program JOB.json`.

Environment as torchrun sets it; the rank after the last one joins, once the others have come to a
step. Writes a JSON line an event to `rank-R` in the job's folder: each step with its loss, each
mean that an update takes with its checksum, new members, and the end.
"""

from __future__ import annotations

import importlib
import itertools
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import gradlane
from gradlane.training.model.prepared import PreparedModel
from gradlane.training.options.options import keywords_of
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.join_requests import JoinRequest, JoinRequests
from gradlane.training.rendezvous.membership import Membership
from tests.faults.rank_program import (
    WIDTH,
    Log,
    Model,
    digest,
    reach_before,
    reach_in_core,
    reach_in_preparing,
    run_rank,
)
from tests.faults.trigger import Trigger

STEP_S = 0.01
SLOW_STEP_S = 0.05
"""Where a rank joins: it takes some steps."""
_READY, _ASKS = "joiner-is-ready", "joiner-asks"
_WAIT_S = 60.0
_LOOK_EVERY_S = 0.02
_JOIN_LIMIT_S = 20.0
"""How long a rank asks that nobody lets in, since the others are through."""


class Batches(Dataset[Tensor]):
    """A rank's batch of each step, from step 1 on; ranks are numbered as at the start."""

    def __init__(self, rank: int, steps: int) -> None:
        """Hold the batches of a rank."""
        self._rank, self._steps = rank, steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * (index + 1) + self._rank)
        return torch.randn(4, WIDTH, generator=generator)


def model_of(middle: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and its optimizer, the same on all ranks."""
    torch.manual_seed(1)
    model = Model(middle)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the loss of a batch."""
    loss: Tensor = (model(batch) - 1.0).square().mean()
    return loss


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of a tensor's values."""
    return zlib.crc32(tensor.detach().numpy().tobytes())


def log_means(model: nn.Module, log: Log) -> None:
    """Write down each mean as an update takes it, without adding a wait."""
    places = {one.data_ptr(): index for index, one in enumerate(model.parameters())}
    module: Any = importlib.import_module("torch.optim.sgd")
    update: Callable[..., Any] = module.sgd

    def logged(parameters: list[Tensor], means: list[Tensor], *rest: Any, **options: Any) -> Any:
        for parameter, mean in zip(parameters, means, strict=True):
            log.write("mean", parameter=places[parameter.data_ptr()], crc=checksum(mean))
        return update(parameters, means, *rest, **options)

    module.sgd = logged


def log_agreements(log: Log) -> None:
    """Write down when this rank hears of new members, and when it moves to a new world."""
    note, open_with = Membership.note, Membership.open_with

    def opened(
        self: Membership, rank_info: RankInfo, generation: int, step: int, reason: str
    ) -> gradlane.MembershipChange:
        log.write("moved", members=self.members, step=step)
        return open_with(self, rank_info, generation, step, reason)

    def logged(
        self: Membership,
        generation: int,
        members: tuple[int, ...],
        step: int,
        reason: str,
    ) -> None:
        note(self, generation, members, step, reason)
        log.write("agreed", members=members, step=self.training_step_of(step) + 1)

    Membership.note = logged  # type: ignore[method-assign]
    Membership.open_with = opened  # type: ignore[method-assign]


def reach_in_joining(trigger: Trigger, joins: bool) -> None:
    """Reach the moments of joining where the session calls what joins, or lets in."""
    session: Any = importlib.import_module("gradlane.training.session.joining")
    model: Any = importlib.import_module("gradlane.training.model.joining")
    requests: Any = importlib.import_module("gradlane.training.rendezvous.join_requests")
    requests._LOOK_EVERY_S = _LOOK_EVERY_S

    reach_before(model, "_hand_over", trigger, "handing over")
    reach_before(session.Joins, "_move", trigger, "moving")
    if joins:
        reach_before(JoinRequest, "wait_for_invitation", trigger, "asking")
        reach_before(JoinRequest, "wait_for_outcome", trigger, "deciding")
        reach_before(session.FirstStepState, "take_over", trigger, "joined")
    else:
        reach_before(session.Joins, "_answer", trigger, "asking")
        reach_before(JoinRequests, "settle", trigger, "deciding")
        reach_before(PreparedModel, "moved_to", trigger, "joined")


def wait_for_file(path: Path) -> None:
    """Wait until another rank has come to a point."""
    deadline_s = time.monotonic() + _WAIT_S
    while not path.exists() and time.monotonic() < deadline_s:
        time.sleep(_LOOK_EVERY_S / 4)


def batches_of(job: dict[str, Any], rank: int, begun: int) -> Iterator[Tensor]:
    """Return a rank's batches, loaded by another process if the job says so."""
    batches = Batches(rank, job["last_step"])
    if not job["scenario"]["loads"]:
        return (batches[index] for index in range(begun, len(batches)))
    loader: Iterable[Tensor] = DataLoader(batches, batch_size=None, num_workers=1)
    return itertools.islice(loader, begun, None)


def train(job: dict[str, Any], rank: int, log: Log) -> None:
    """Train all steps."""
    trigger = Trigger(Path(job["folder"]), job, rank)
    folder, asks_at = Path(job["folder"]), job["scenario"]["asks_at"]
    joins = rank == job["scenario"]["world_size"]
    reach_in_core(trigger)
    reach_in_joining(trigger, joins)
    reach_in_preparing(trigger)
    log_agreements(log)
    trigger.reach("start")
    limit = {"connect_timeout_s": _JOIN_LIMIT_S} if joins else {}
    options = keywords_of(**{**job["options"], **limit}, advertise=os.environ["ADVERTISE"])
    session = gradlane.init(**options, join=joins)
    if job["scenario"]["call"] % 2:
        trigger.reach("rendezvous")
    trigger.reach("prepare")
    model, optimizer = model_of(trigger.module())
    log_means(model, log)
    step = 0

    def changed(change: gradlane.MembershipChange) -> None:
        log.write("changed", **{**asdict(change), "rank": None, "at": step})

    session.on_membership(changed)
    if joins:
        (folder / _READY).touch()
        wait_for_file(folder / _ASKS)
    session.prepare(model, optimizer)
    trigger.reach("restore")
    trigger.watch()
    begun = session.step
    batches = batches_of(job, rank, begun)
    if asks_at is not None and not joins:
        wait_for_file(folder / _READY)
    for step in range(begun + 1, job["last_step"] + 1):
        trigger.step = step
        loss = loss_of(model, next(batches))
        loss.backward()  # type: ignore[no-untyped-call]
        trigger.reach("pushing")
        optimizer.step()
        optimizer.zero_grad()
        trigger.pass_by()
        if step == asks_at:
            (folder / _ASKS).touch()
        time.sleep(STEP_S if asks_at is None else SLOW_STEP_S)
        log.write("step", step=step, loss=loss.item(), at_s=time.monotonic())
    # A rank may have joined after the last step.
    log.write("digest", step=session.step, digest=digest(session, model))
    trigger.reach("close")
    session.close(job["close_timeout_s"])


if __name__ == "__main__":
    run_rank(train)
