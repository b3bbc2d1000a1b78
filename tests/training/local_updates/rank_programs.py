"""Programs of four ranks on two emulated nodes; each function runs on every rank."""

from __future__ import annotations

from typing import Any

import gradlane
from tests.training.local_updates.test_training import adam, build, loss
from tests.training.model.models import seeded
from tests.training.node.node_programs import digest, opened


def trained(
    store: Any, rank: int, world_size: int, job: str, *, given: dict[str, Any], **options: Any
) -> dict[str, Any]:
    """Train, meet, train on and close; return what all ranks must have alike."""
    update = gradlane.Local(**given)
    with opened(store, rank, world_size, job, update=update, **options) as session:
        model = seeded(build, 7 + rank)
        optimizer = adam(model)
        session.prepare(model, optimizer)
        found = {}
        for step in range(1, 14):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
            if step == 7:
                session.synchronize()
                found["at 7"] = digest(model)
        reading = session.metrics()
    found["closed"] = digest(model)
    return {**found, "values": [one.tolist() for one in model.parameters()], "metrics": reading}
