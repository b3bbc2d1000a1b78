"""A check of the backend of torch.distributed: a group of all ranks, its sums and their latency."""

from __future__ import annotations

import secrets
import statistics
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from gradlane.formats.untrusted import escaped
from gradlane.planning.doctor.findings import Finding, fault, ok
from gradlane.training.options.option_groups import Network
from gradlane.training.options.secret import draw_secret

if TYPE_CHECKING:
    # They load torch and its compiler, which one machine is examined without.
    from gradlane.distributed.group_connector import GroupConnector
    from gradlane.training.session.session import Session

CHECK = "group of torch.distributed"
CALLS = 50


def group_finding(session: Session, network: Network) -> Finding:
    """Open a group of all ranks, sum numbers over it, and close it; a collective call.

    Args:
        session: of all ranks, without a model.
        network: as the session was given it.

    Returns:
        The same on every rank.

    Raises:
        RendezvousError: a rank did not come.
    """
    from gradlane.distributed import GroupOptions, register

    try:
        register()
    except RuntimeError as error:
        refused = str(error)
    else:
        refused = ""
    told = [str(it) for it in session.exchange(refused)]
    if any(told):
        return ok(CHECK, f"not looked at: {escaped(next(it for it in told if it))}")
    from gradlane.distributed.group_connector import GroupConnector
    from gradlane.training.torch_internals import HashStore

    connector = GroupConnector(GroupOptions(network=network), HashStore(), CHECK)
    try:
        obstacle, own = "", connector.listen()
    except OSError as error:
        obstacle, own = str(error), ""
    start = {"address": own, "why": obstacle, "job": secrets.token_hex(16), "secret": ""}
    if connector.secret is None:
        start["secret"] = draw_secret()
    rows = session.exchange(start)
    latency_s = 0.0
    try:
        if not any(row["why"] for row in rows):
            latency_s = _latency_s(session, connector, rows)
    except Exception as error:
        obstacle = f"{type(error).__name__}: {error}"
    finally:
        connector.close()
    ends = session.exchange([obstacle, latency_s])
    failed = [f"rank {rank}: {why}" for rank, (why, _) in enumerate(ends) if why]
    if failed:
        return fault(
            CHECK, escaped("; ".join(failed)), "mend what the other checks name, then call again"
        )
    latest_s = max(float(it) for _, it in ends)
    return ok(CHECK, f"all_reduce of 4 bytes over all ranks in {latest_s * 1e3:.3g} ms")


def _latency_s(session: Session, connector: GroupConnector, rows: list[dict[str, Any]]) -> float:
    """Return the median seconds of a sum of 4 bytes."""
    import torch

    from gradlane.distributed.backend import GradlaneBackend
    from gradlane.training.torch_internals import c10d

    rank, peers = session.rank, [str(row["address"]) for row in rows]
    wait_s = connector.wait_s(None)
    secret = connector.secret or str(rows[0]["secret"])
    core = connector.connect(str(rows[0]["job"]), rank, peers, 0, secret, wait_s)
    group = GradlaneBackend(core, rank, len(peers), CHECK, timedelta(seconds=wait_s))
    try:
        options = c10d.AllreduceOptions()
        options.asyncOp = False
        expected = len(peers) * (len(peers) + 1) // 2
        times_s = []
        for _ in range(CALLS):
            tensor = torch.tensor([rank + 1], dtype=torch.int32, device="cpu")
            began_s = time.perf_counter()
            group.allreduce([tensor], options).wait()
            times_s.append(time.perf_counter() - began_s)
            if tensor.item() != expected:
                raise RuntimeError(f"the sum of 1 to {len(peers)} is {tensor.item()}")
        return statistics.median(times_s)
    finally:
        group.shutdown()
