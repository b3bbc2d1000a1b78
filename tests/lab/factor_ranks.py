"""What rank processes run in the tests of replays that send factors."""

from __future__ import annotations

from typing import Any

from torch._C._distributed_c10d import Store

from gradlane.lab.runs.trial import digest_parameters
from gradlane.lab.workloads import WorkloadSpec
from gradlane.lab.workloads.replay import ReplayWorkload
from gradlane.planning.planner.coordinator import Coordinator
from gradlane.training.plans.settings import ClusterFacts
from tests.training.model.scenarios import open_session


def replay(
    store: Store,
    rank: int,
    world_size: int,
    job: str,
    model: str,
    rule: str,
    steps: int,
    scheme: str = "ps",
) -> dict[str, Any]:
    """Replay a model without its sleeps, under the plan of a rule or none."""
    workload = ReplayWorkload(WorkloadSpec(model, seed=3, paced=False), rank, world_size)
    plan = None
    if rule:
        facts = ClusterFacts(world_size, 1e10)
        plan = Coordinator(workload.profile(), facts, rule=rule).plan()
    with open_session(store, rank, world_size, job, scheme=scheme) as session:
        optimizer = workload.make_optimizer(workload.model)
        session.prepare(workload.model, optimizer, plan=plan)
        for step in range(steps):
            workload.begin_step(step)
            loss = workload.loss(workload.model, workload.batch(step))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                session.synchronize()
                before = session.metrics()["tx_payload_bytes"]
        session.synchronize()
        counters = session.metrics()
        sent = counters["tx_payload_bytes"] - before
        schemes = session.monitoring.schemes
    return {
        "wrong": workload.verify(workload.model, steps),
        "digest": digest_parameters(workload.model),
        "sent": sent / (steps - 1),
        "schemes": schemes,
        "factor_bytes": workload.factor_bytes(),
        "owned": [peer["owned_bytes"] for peer in counters["peers"]],
        "served": (counters["served_tx_bytes"], counters["served_rx_bytes"]),
        "sizes": [timing.size_bytes for timing in workload.timings],
    }
