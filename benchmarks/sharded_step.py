"""Step times of sharded models: torch's HSDP over Gloo beside gradlane between nodes, interleaved.

Two nodes of two ranks are two network namespaces with a shaped cable (root; `ip` and `tc`):

    python -m benchmarks.sharded_step --rate 100mbit --steps 12

Layers sleep in place of computing, so that a loaded machine changes little, and all engines train
in the same processes, one step of each in turn; one trains each node by itself. Printed are medians
over the steps of rank 0, in milliseconds, with the quarters.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

NODES, LOCAL = 2, 2
NAMES = ("shn0", "shn1")


def run(command: str) -> None:
    """Run a command of `ip` or `tc`."""
    subprocess.run(command.split(), check=True)


def build_cable(rate: str) -> None:
    """Make two namespaces with a cable that carries a rate in each direction."""
    for name in NAMES:
        run(f"ip netns add {name}")
    run(f"ip link add c0 netns {NAMES[0]} type veth peer name c1 netns {NAMES[1]}")
    for number, name in enumerate(NAMES):
        inside = f"ip netns exec {name}"
        run(f"{inside} ip addr add 10.77.0.{number + 1}/24 dev c{number}")
        run(f"{inside} ip link set c{number} up")
        run(f"{inside} ip link set lo up")
        run(f"{inside} tc qdisc add dev c{number} root handle 1: htb default 1")
        run(f"{inside} tc class add dev c{number} parent 1: classid 1:1 htb rate {rate} burst 16k")
        run(f"{inside} tc qdisc add dev c{number} parent 1:1 pfifo limit 1000")


def start(arguments: argparse.Namespace) -> None:
    """Run all ranks, and remove the namespaces."""
    build_cable(arguments.rate)
    try:
        ranks = []
        for rank in range(NODES * LOCAL):
            node = rank // LOCAL
            environment = {
                **os.environ,
                **{"RANK": str(rank), "WORLD_SIZE": str(NODES * LOCAL)},
                **{"LOCAL_RANK": str(rank % LOCAL), "LOCAL_WORLD_SIZE": str(LOCAL)},
                **{"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29511"},
                **{"GLOO_SOCKET_IFNAME": f"c{node}", "OMP_NUM_THREADS": "1"},
            }
            command = [
                "ip",
                "netns",
                "exec",
                NAMES[node],
                sys.executable,
                "-m",
                "benchmarks.sharded_step",
            ]
            command += [*sys.argv[1:], "--rank"]
            ranks.append(subprocess.Popen(command, env=environment))
        for process in ranks:
            process.wait()
    finally:
        for name in NAMES:
            run(f"ip netns del {name}")


def train(arguments: argparse.Namespace) -> None:
    """Train with every engine in turn, and print rank 0's step times."""
    import torch
    import torch.distributed as dist
    from benchmarks.sleeping_layers import sleeping_layers
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    import gradlane

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    both = init_device_mesh("cpu", (NODES, LOCAL), mesh_dim_names=("node", "shard"))
    session = gradlane.init()
    eight = gradlane.init(codec="qsgd:bits=8", rendezvous=gradlane.Rendezvous(job="eight"))
    engines: dict[str, tuple[Any, Any]] = {}
    for name, averages, dtype in (
        ("compute alone", None, torch.float32),
        ("hsdp float32", None, torch.float32),
        ("gradlane float32", session, torch.float32),
        ("hsdp bfloat16", None, torch.bfloat16),
        ("gradlane bfloat16", session, torch.bfloat16),
        ("gradlane 8 bits", eight, torch.float32),
    ):
        policy = MixedPrecisionPolicy(reduce_dtype=dtype)
        mesh = both if name.startswith("hsdp") else both["shard"]
        model = sleeping_layers(arguments.layers, arguments.elements, arguments.layer_ms / 1000)
        for layer in model:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if averages is not None:
            averages.prepare(model, optimizer)
        engines[name] = (model, optimizer)
    times: dict[str, list[float]] = {name: [] for name in engines}
    x = torch.ones(64, requires_grad=True)
    for step in range(arguments.steps + 2):
        for name, (model, optimizer) in engines.items():
            dist.barrier()
            begin = time.perf_counter()
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step >= 2:
                times[name].append(1000 * (time.perf_counter() - begin))
    if dist.get_rank() == 0:
        print(f"compute {arguments.layers * arguments.layer_ms:.0f} ms, load {os.getloadavg()[0]}")
        for name, row in times.items():
            low, middle, high = statistics.quantiles(row, n=4)
            print(f"{name:20} {middle:7.0f} ms ({low:.0f} to {high:.0f}, {len(row)} steps)")
    session.close()
    eight.close()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--elements", type=int, default=1 << 18)
    parser.add_argument("--layer-ms", type=float, default=84.0)
    parser.add_argument("--rank", action="store_true")
    arguments = parser.parse_args()
    (train if arguments.rank else start)(arguments)


if __name__ == "__main__":
    main()
