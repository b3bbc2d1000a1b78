"""What rank processes ask the information book of their session."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import Store

from gradlane.errors import GradlaneError
from tests.training.model.scenarios import open_session
from tests.training.node.node_programs import opened
from tests.training.serving.rank_programs import run_roles

NAMES = (
    *("job", "ranks", "workers", "servers", "roles", "addresses", "nodes"),
    *("strategy", "update", "model", "gradient_bytes", "layers", "schemes", "codecs"),
)


class Classifier(nn.Module):
    """A convolution and two fully connected layers, one of them tied to an embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.fc = nn.Linear(400, 300)
        self.words = nn.Embedding(20, 300)


def answers_of(session: Any) -> dict[str, Any]:
    """Prepare the model and ask for everything; rank 0 asks last, when the others have trained."""
    torch.manual_seed(0)
    model = Classifier()
    refused = _refusal(lambda: session.planning.query("workers"))
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if session.rank == 0:
        session.synchronize()
    layers = session.planning.query("layers")
    found: dict[str, Any] = dict(zip(NAMES, session.planning.query(*NAMES), strict=True))
    found["layers"] = {name: asdict(session.planning.query(name)) for name in layers}
    found["best"] = {
        f"{name} {batch} {rule}": asdict(
            session.planning.best_scheme(name, batch_size=batch, rule=rule)
        )
        for name in layers
        for batch in (2, 500)
        for rule in ("poseidon", "auto")
    }
    found["by index"] = (
        asdict(session.planning.best_scheme(1, batch_size=2))
        == found["best"][f"{layers[1]} 2 poseidon"]
    )
    found["refused"] = [
        refused,
        _refusal(lambda: session.planning.query("rate_bps")),
        _refusal(lambda: session.planning.query()),
        _refusal(lambda: session.planning.best_scheme("fc9", batch_size=2)),
        _refusal(lambda: session.planning.best_scheme("fc", batch_size=0)),
        _refusal(lambda: session.planning.best_scheme("fc", batch_size=2.5)),
        _refusal(lambda: session.planning.query("workers", model=nn.Linear(2, 2))),
    ]
    session.synchronize()
    return found


def _refusal(ask: Any) -> str:
    try:
        return f"no refusal: {ask()}"
    except (ValueError, GradlaneError) as error:
        return str(error)


def ask(store: Store, rank: int, world_size: int, job: str, **options: Any) -> dict[str, Any]:
    """Ask in a session of ranks that all train."""
    with open_session(store, rank, world_size, job, **options) as session:
        found = answers_of(session)
        if options.get("strategy") is None:
            report = session.planning.probe(window_s=0.05)
            found["probed"] = session.planning.query("rate_bps", "latency_s")
            assert found["probed"] == (report.rate_bps, report.latency_s)
        return found


def ask_beside_servers(store: Store, process: int, processes: int, job: str) -> Any:
    """Ask on two ranks that train; the others only serve."""
    return run_roles(store, process, processes, job, 2, processes - 2, answers_of)


def ask_on_nodes(
    store: Store, rank: int, world_size: int, job: str, local: str = "leader"
) -> dict[str, Any]:
    """Ask on nodes of two ranks, the first or both of which talk to the network for both."""
    with opened(store, rank, world_size, job, local=local) as session:
        return answers_of(session)
