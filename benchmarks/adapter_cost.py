"""The adapter's own cost of a step: ResNet-50's number of tensors, next to no bytes.

A chain of 53 layers with batch norm and a head has 161 trained tensors and 159 buffers, as
ResNet-50 has, of a few elements each, so that neither the network nor the arithmetic counts. The
plain loop, DDP over Gloo and gradlane take turns in the same processes; medians are compared. Where
other programs run on the machine, CPU time says more than wall time.

    python benchmarks/adapter_cost.py --ranks 1 --json cost.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

WIDTH = 4
LAYERS = 53
WARM_UP_STEPS = 20


def main() -> None:
    """Run, print a table, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2))
    parser.add_argument("--steps", type=int, default=40, help="steps a turn")
    parser.add_argument("--turns", type=int, default=10, help="turns of each way of training")
    parser.add_argument("--buffers", default="broadcast", help="as in Session.prepare")
    parser.add_argument("--json", metavar="PATH", help="write the rows there")
    arguments = parser.parse_args()
    rows = measure(arguments.ranks, arguments.steps, arguments.turns, arguments.buffers)
    print(
        f"{'way':<10} {'step, ms':>10} {'CPU a rank and step, ms':>24} {'step beyond DDP, ms':>20}"
    )
    ddp = next(row["step_s_median"] for row in rows if row["way"] == "ddp")
    for row in rows:
        beyond = (row["step_s_median"] - ddp) * 1e3
        print(
            f"{row['way']:<10} {row['step_s_median'] * 1e3:>10.2f} "
            f"{row['cpu_s_per_step'] * 1e3:>24.2f} {beyond:>20.2f}"
        )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=2)


def measure(ranks: int, steps: int, turns: int, buffers: str) -> list[dict[str, Any]]:
    """Train in all ways, in turns; returns a row a way, of rank 0."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=train, args=(theirs, rank, ranks, store.port, steps, turns, buffers)
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    rows: list[dict[str, Any]]
    rows, *_ = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return rows


def train(
    pipe: Any, rank: int, ranks: int, port: int, steps: int, turns: int, buffers: str
) -> None:
    """Build the three models of one rank and take turns."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist
    from torch import nn

    import gradlane

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    batch = torch.randn(8, WIDTH)

    def build() -> nn.Module:
        layers: list[nn.Module] = []
        for _ in range(LAYERS):
            layers += [nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH)]
        return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def step() -> None:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    plain = build()
    wrapped = nn.parallel.DistributedDataParallel(build())
    ours = build()
    session = gradlane.init(
        rendezvous=gradlane.Rendezvous(store=store, rank=rank, world_size=ranks),
        network=gradlane.Network(advertise="127.0.0.1"),
    )
    optimizer = optimizer_of(ours)
    session.prepare(ours, optimizer, buffers=buffers)
    ways = {
        "plain": loop(plain, optimizer_of(plain)),
        "ddp": loop(wrapped, optimizer_of(wrapped)),
        "gradlane": loop(ours, optimizer),
    }
    wall: dict[str, list[float]] = {way: [] for way in ways}
    used: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(-1, turns):
        for way, step in ways.items():
            dist.barrier()
            began = time.process_time()
            for _ in range(WARM_UP_STEPS if turn < 0 else steps):
                start = time.perf_counter()
                step()
                if turn >= 0:
                    wall[way].append(time.perf_counter() - start)
            session.synchronize()
            if turn >= 0:
                used[way].append((time.process_time() - began) / steps)
    session.close()
    dist.destroy_process_group()
    pipe.send(
        [
            {
                "way": way,
                "ranks": ranks,
                "tensors": len(list(ours.parameters())),
                "buffers": buffers,
                "steps": len(wall[way]),
                "step_s_median": statistics.median(wall[way]),
                "cpu_s_per_step": statistics.median(used[way]),
            }
            for way in ways
        ]
    )


if __name__ == "__main__":
    main()
