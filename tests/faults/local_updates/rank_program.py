"""One rank of local updates that go on; `python -m` with `JOB.json`.

Environment as torchrun sets it. Writes a JSON line an event to `rank-R` in the job's folder: each
step with its loss, which tensors it sends, each common value that moves with its checksum, each
share of it that is mixed in, new members, and the end.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

import gradlane
from gradlane.training.local_updates.outer_optimizer import OuterOptimizer
from gradlane.training.options.options import keywords_of
from tests.faults.going_on.rank_program import (
    STEP_S,
    Batches,
    checksum,
    log_agreements,
    loss_of,
    model_of,
)
from tests.faults.rank_program import (
    Log,
    digest,
    reach_before,
    reach_in_core,
    reach_in_preparing,
    run_rank,
)
from tests.faults.trigger import Trigger

_LATE_STEPS = 9
"""A round has fewer steps: a moment of an exchange has come by then, or does not."""


def log_exchanges(log: Log, trigger: Trigger) -> None:
    """Write down what is sent, moved and mixed in, and reach the moments around sending."""
    module: Any = importlib.import_module("gradlane.training.local_updates.outer_exchange")
    submit = module.OuterExchange.submit
    move, mix = OuterOptimizer.step, OuterOptimizer.mix

    def submitted(self: Any, differences: Mapping[int, Tensor], *rest: Any) -> None:
        trigger.reach("exchange")
        log.write("sent", indices=sorted(differences))
        submit(self, differences, *rest)
        trigger.reach("sent")

    def moved(self: OuterOptimizer, index: int, gradient: Tensor) -> None:
        move(self, index, gradient)
        log.write("moved", index=index, crc=checksum(self.common[index]))

    def mixed(self: OuterOptimizer, index: int, share: float) -> None:
        mix(self, index, share)
        log.write("mixed", index=index, share=share)

    module.OuterExchange.submit = submitted
    OuterOptimizer.step = moved  # type: ignore[method-assign]
    OuterOptimizer.mix = mixed  # type: ignore[method-assign]


def train(job: dict[str, Any], rank: int, log: Log) -> None:
    """Train all steps."""
    scenario = job["scenario"]
    trigger = Trigger(Path(job["folder"]), job, rank)
    reach_in_core(trigger)
    reach_in_preparing(trigger)
    reach_before(gradlane.Session, "synchronize", trigger, "synchronize")
    log_agreements(log)
    log_exchanges(log, trigger)
    options = {name: one for name, one in job["options"].items() if "checkpoint" not in name}
    session = gradlane.init(
        update=gradlane.Local(**scenario["update"]),
        **keywords_of(**options, advertise=os.environ["ADVERTISE"]),
    )
    trigger.reach("prepare")
    model, optimizer = model_of(trigger.module())
    step = 0

    def changed(change: gradlane.MembershipChange) -> None:
        # What it may read is that of the change.
        place = [session.rank, session.world_size, session.metrics()["generation"]]
        assert place == [change.rank, change.world_size, change.generation], (place, change)
        assert change.members[change.rank] == rank
        log.write("changed", **{**asdict(change), "rank": None, "at": step})

        if scenario.get("gathers"):
            gather()

    def gather() -> None:
        found = session.gather_integers([rank, step])
        assert found[session.rank] == [rank, step], found
        log.write("gathered", found=found)
        state = session.state_dict()["models"][0]["local_updates"]
        log.write("saved", crcs=[checksum(one) for one in state["common"].values()])

    session.on_membership(changed)
    session.prepare(model, optimizer)
    trigger.watch()
    batches = Batches(rank, job["last_step"])
    for step in range(1, job["last_step"] + 1):
        trigger.step = step
        loss = loss_of(model, batches[step - 1])
        loss.backward()  # type: ignore[no-untyped-call]
        trigger.reach("pushing")
        optimizer.step()
        optimizer.zero_grad()
        if scenario.get("gathers") and step % 4 == 0:
            gather()
        if step == scenario["meets_at"]:
            session.synchronize()
        if step >= scenario["step"] + _LATE_STEPS:
            trigger.pass_by()
        time.sleep(STEP_S)
        log.write("step", step=step, loss=loss.item(), at_s=time.monotonic())
    if scenario["meets_at"] % 2:
        log.write("digest", step=step, digest=digest(session, model))
    trigger.reach("close")
    session.close(job["close_timeout_s"])
    log.write("closed", crcs=[checksum(one) for one in model.parameters()])


if __name__ == "__main__":
    run_rank(train)
