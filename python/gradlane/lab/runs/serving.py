"""A run on a rank that only serves: it knows no workload, and is told by rank 0 what to serve."""

from __future__ import annotations

import gc
from typing import Any

from gradlane.lab.runs.communication import RunRank, prefixed
from gradlane.lab.runs.trial import TrialRequest, open_store


def run_serving(request: TrialRequest, rank: int) -> dict[str, Any]:
    """Serve a run of gradlane's until its workers have closed their sessions.

    Args:
        request: what the workers were asked.
        rank: this rank, after all of these.

    Returns:
        JSON-serializable: `owner`, as `Communication.owner_counters` has it. The bytes are those of
        all steps, with the spread of the first values, scaled to those that workers count.
    """
    import gradlane

    workers = len(request.addresses)
    store = open_store(request.addresses, request.store_port, rank)
    place = RunRank(
        rank=rank,
        world_size=workers,
        address=request.server_addresses[rank - workers],
        interface="",
        slice_elems=None,
        job=request.job,
    )
    session = gradlane.init(
        workers=workers,
        rendezvous=gradlane.Rendezvous(
            prefixed(place, store), rank, workers + request.serving, place.job
        ),
        network=gradlane.Network(advertise=place.address),
        monitoring=gradlane.Monitoring(summary=False),
    )
    served = session.serve()
    del store
    gc.collect()
    share = request.counted_steps / (request.warmup + request.steps)
    return {
        "owner": {
            "owned_bytes": sum(one.owned_bytes for one in served),
            "rx_bytes": round(share * sum(one.rx_bytes for one in served)),
            "tx_bytes": round(share * sum(one.tx_bytes for one in served)),
        }
    }
