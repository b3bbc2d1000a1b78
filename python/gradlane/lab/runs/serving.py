"""A run on a dedicated server: it has no workload, and rank 0 sends it the plan."""

from __future__ import annotations

import gc

from gradlane.lab.cluster.rank_program import open_store
from gradlane.lab.runs.communication import prefixed
from gradlane.lab.runs.messages import TrialRequest
from gradlane.lab.runs.traffic import OwnerCounters


def run_serving(request: TrialRequest, rank: int) -> OwnerCounters:
    """Serve a run of gradlane's until its workers have closed their sessions.

    Args:
        request: the workers' request.
        rank: this rank, after all workers.

    Returns:
        The counters as an owner. The bytes are those of all steps, with the spread of the first
        values, scaled to those that workers count.
    """
    import gradlane

    store = open_store(request.addresses, request.store_port, rank)
    session = gradlane.init(
        workers=request.world_size,
        rendezvous=gradlane.Rendezvous(
            prefixed(request, store), rank, request.world_size + request.serving, request.job
        ),
        network=gradlane.Network(advertise=request.address(rank), secret=request.secret),
        monitoring=gradlane.Monitoring(summary=False),
    )
    served = session.serve()
    del store
    gc.collect()
    share = request.counted_steps / (request.warmup + request.steps)
    return OwnerCounters(
        sum(one.owned_bytes for one in served),
        round(share * sum(one.rx_bytes for one in served)),
        round(share * sum(one.tx_bytes for one in served)),
    )
