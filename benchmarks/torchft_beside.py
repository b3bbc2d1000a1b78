"""Local updates of torchft beside gradlane's, on the same work and the same emulated ports.

`python -m benchmarks.torchft_beside --rate 20mbit --steps 256` (root: network namespaces and `tc`;
torchft importable, such as by `pip install --target DIR torchft` and `PYTHONPATH`) trains the
study's transformer over characters of the standard library on four ranks with AdamW, from the same
values and with the same batches, and prints the held-out loss, each port's bytes a step (packets'
headers included) and the mean step. gradlane's ranks are started alike. `--json PATH` writes the
rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.rank_environment import rank_environment

from gradlane.formats.rates import parse_rate
from gradlane.lab.cluster.namespaces import INTERFACE, EmulatedCluster
from gradlane.training.options.local_updates import parse_local

RANKS = 4
WAYS = (
    ("torchft", "local:steps=8,outer=average"),
    ("gradlane", "local:steps=8,outer=average"),
    ("torchft", "local:steps=32"),
    ("gradlane", "local:steps=32"),
)
LIGHTHOUSE_PORT, STORE_PORT = 29510, 29520


def sent_bytes() -> int:
    """Return the bytes that this namespace's port has sent."""
    lines = Path("/proc/self/net/dev").read_text(encoding="utf-8").splitlines()
    (row,) = (line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:"))
    return int(row[8])


def torchft_context(model: Any, optimizer: Any, update: str, address: str) -> Any:
    """Return torchft's context of these local updates, and its manager.

    Args:
        model: that each rank trains.
        optimizer: its inner one.
        update: `average` is torchft's `LocalSGD`, all else its `DiLoCo`.
        address: of this rank's node.
    """
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo, LocalSGD

    local = parse_local(update)
    store = TCPStore(address, STORE_PORT, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=RANKS,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        replica_id=f"rank{os.environ['RANK']}",
        hostname=address,
        init_sync=False,
    )
    if local.outer == "average":
        return LocalSGD(manager, model, optimizer, sync_every=local.steps), (manager, store)
    outer = torch.optim.SGD(
        model.parameters(), lr=local.outer_lr, momentum=local.outer_momentum, nesterov=True
    )
    return (
        DiLoCo(manager, [model], optimizer, outer, sync_every=local.steps, pin_memory=False),
        (manager, store),
    )


def train(engine: str, update: str, steps: int, seed: int) -> None:
    """Train on one rank; rank 0 prints the result."""
    import torch
    from benchmarks.local_updates import BATCH, HELD_OUT_WINDOWS, loss_of, windows

    import gradlane
    from gradlane.lab.workloads.char_transformer import standard_library_text
    from gradlane_papers.accuracy.networks import SmallTransformer

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    text = torch.from_numpy(standard_library_text()).long()
    training = len(text) * 9 // 10
    share = training // RANKS
    own = text[rank * share : (rank + 1) * share]
    torch.manual_seed(seed)
    model = SmallTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    session = None
    if engine == "gradlane":
        quiet = gradlane.Monitoring(summary=False)
        session = gradlane.init(update=parse_local(update), local="off", monitoring=quiet)
        session.prepare(model, optimizer)
        session.exchange("all have rank 0's values")
    else:
        context, kept = torchft_context(model, optimizer, update, os.environ["NODE_ADDRESS"])
        context.__enter__()
    begin_s, before = time.monotonic(), sent_bytes()
    for _ in range(steps):
        loss: Any = loss_of(model, windows(own, BATCH, generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    step_s, sent = (time.monotonic() - begin_s) / steps, (sent_bytes() - before) / steps
    held_out = windows(text[training:], HELD_OUT_WINDOWS, torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = {"loss": float(loss_of(model, held_out)), "step_s": step_s, "bytes": sent}
    if session is not None:
        session.close()
    else:
        # The others may still be in their last exchange.
        time.sleep(5.0)
        kept[0].shutdown(wait=False)
    if rank == 0:
        print("RESULT " + json.dumps(found), flush=True)
    os._exit(0)


def serve_lighthouse() -> None:
    """Run torchft's lighthouse until it is killed."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=f"0.0.0.0:{LIGHTHOUSE_PORT}", min_replicas=RANKS, join_timeout_ms=30_000
    )
    print(server.address(), flush=True)
    time.sleep(3600)


def run_way(cluster: EmulatedCluster, engine: str, update: str, steps: int, seed: int) -> Any:
    """Train on all ranks and return rank 0's result."""
    program = [sys.executable, "-m", "benchmarks.torchft_beside"]
    port = cluster.next_port()
    children = []
    if engine == "torchft":
        children.append(cluster.spawn(0, [*program, "--lighthouse"], stdout=subprocess.DEVNULL))
        time.sleep(8.0)
    ranks = []
    for rank in range(RANKS):
        environment = {
            **rank_environment(cluster, rank, RANKS, port),
            "NODE_ADDRESS": cluster.addresses[rank],
            "TORCHFT_LIGHTHOUSE": f"http://{cluster.addresses[0]}:{LIGHTHOUSE_PORT}",
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        own = [*program, "--train", engine, update, str(steps), str(seed)]
        where = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        ranks.append(cluster.spawn(rank, own, environment=environment, stdout=where))
    output = ranks[0].stdout
    assert output is not None
    found = [line for line in output if line.startswith(b"RESULT ")]
    for child in ranks:
        child.wait()
    for child in children:
        child.kill()
        child.wait()
    if not found:
        raise SystemExit(f"{engine} {update}: rank 0 has failed; its output is above")
    return json.loads(found[0].removeprefix(b"RESULT "))


def main() -> None:
    """Train in all ways, and print a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", default="20mbit")
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lighthouse", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--train", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.lighthouse:
        serve_lighthouse()
    if given.train is not None:
        engine, update, steps, seed = given.train
        train(engine, update, int(steps), int(seed))
    rows = []
    with EmulatedCluster(RANKS, round(parse_rate(given.rate))) as cluster:
        for seed in range(given.seeds):
            for engine, update in WAYS:
                found = run_way(cluster, engine, update, given.steps, seed)
                rows.append({"engine": engine, "update": update, "seed": seed, **found})
                print(rows[-1], flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
