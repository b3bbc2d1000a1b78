"""The adapter's own cost of a step: models of many small tensors, next to no bytes.

Neither the network nor the arithmetic counts, so what is left is the work for each tensor. The
plain loop, DDP over Gloo and gradlane take turns in the same processes; medians are compared. Where
other programs run on the machine, CPU time says more than wall time.

    python benchmarks/adapter_cost.py --ranks 2 --models chain-40 chain-1000 lora --json cost.json
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

MODELS = ("chain-40", "chain-300", "chain-1000", "chain-5000", "flat-5000", "lora", "vit", "resnet")
WARM_UP_STEPS = 20


def main() -> None:
    """Run, print a table, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models",
        nargs="+",
        default=["resnet"],
        metavar="MODEL",
        help=f"{', '.join(MODELS)}, or another number of tensors: chain-N, flat-N",
    )
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2, 4))
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn, about")
    parser.add_argument("--turns", type=int, default=8, help="turns of each way of training")
    parser.add_argument("--buffers", default="broadcast", help="as in Session.prepare")
    parser.add_argument("--clip", type=float, help="clip the norm of all gradients to this")
    parser.add_argument("--optimizer", default="sgd", choices=("sgd", "adamw"))
    parser.add_argument("--json", metavar="PATH", help="write the rows there")
    arguments = parser.parse_args()
    found = []
    print(
        f"{'model':<12} {'tensors':>7} {'way':<10} {'step, ms':>9} {'/ DDP':>6} "
        f"{'CPU a rank and step, ms':>24} {'/ DDP':>6} {'load':>6}"
    )
    for model in arguments.models:
        rows = measure(model, arguments)
        ddp = next(row for row in rows if row["way"] == "ddp")
        for row in rows:
            print(
                f"{model:<12} {row['tensors']:>7} {row['way']:<10} "
                f"{row['step_s_median'] * 1e3:>9.2f} "
                f"{row['step_s_median'] / ddp['step_s_median']:>6.2f} "
                f"{row['cpu_s_per_step'] * 1e3:>24.2f} "
                f"{row['cpu_s_per_step'] / ddp['cpu_s_per_step']:>6.2f} {row['load']:>6.2f}",
                flush=True,
            )
        found += rows
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=2)


def measure(model: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Train in all ways, in turns; returns a row a way, of rank 0."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(arguments.ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=train, args=(theirs, rank, store.port, model, arguments))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    rows: list[dict[str, Any]]
    rows, *_ = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return rows


def build(name: str) -> tuple[Any, Any]:
    """Return a model of many tensors and its batch.

    Args:
        name: one of `MODELS`.
    """
    import torch
    from torch import nn

    torch.manual_seed(0)
    kind, _, count = name.partition("-")
    if kind == "chain":
        layers = [nn.Linear(16, 16) for _ in range(int(count) // 2)]
        return nn.Sequential(*layers), torch.randn(8, 16)
    if kind == "flat":

        class Flat(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.parts = nn.ParameterList(torch.randn(64) for _ in range(int(count)))

            def forward(self, batch: Any) -> Any:
                return batch * torch.stack(list(self.parts)).mean(0)

        return Flat(), torch.randn(8, 64)
    if kind == "lora":

        class Adapted(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.base = nn.Linear(64, 64).requires_grad_(False)
                self.down = nn.Linear(64, 4, bias=False)
                self.up = nn.Linear(4, 64, bias=False)

            def forward(self, batch: Any) -> Any:
                return self.base(batch) + self.up(self.down(batch))

        # 32 blocks of q, k, v and o.
        return nn.Sequential(*(Adapted() for _ in range(128))), torch.randn(8, 64)
    if kind == "vit":
        block = nn.TransformerEncoderLayer(
            64, 4, 256, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )

        class Patches(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.patch = nn.Conv2d(3, 64, 16, 16)
                self.encoder = nn.TransformerEncoder(block, 12, enable_nested_tensor=False)
                self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 10)

            def forward(self, batch: Any) -> Any:
                tokens = self.patch(batch).flatten(2).transpose(1, 2)
                return self.head(self.norm(self.encoder(tokens)).mean(1))

        return Patches(), torch.randn(2, 3, 64, 64)
    if kind == "resnet":
        # 161 trained tensors and 159 buffers, as ResNet-50 has.
        pairs = ((nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)) for _ in range(53))
        chain = [layer for pair in pairs for layer in pair]
        return nn.Sequential(*chain, nn.Linear(4, 4)), torch.randn(8, 4)
    raise SystemExit(f"unknown model {name!r}; known are {', '.join(MODELS)}")


def train(pipe: Any, rank: int, port: int, name: str, arguments: argparse.Namespace) -> None:
    """Build the three models of one rank and take turns."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist
    from torch import nn

    import gradlane

    torch.set_num_threads(1)
    ranks, turns = arguments.ranks, arguments.turns
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    _, batch = build(name)

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        trained = [one for one in model.parameters() if one.requires_grad]
        if arguments.optimizer == "adamw":
            return torch.optim.AdamW(trained, lr=1e-3)
        return torch.optim.SGD(trained, lr=0.01, momentum=0.9)

    def loop(
        model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[..., Any]
    ) -> Callable[[], None]:
        def step() -> None:
            model(batch).square().mean().backward()
            if arguments.clip:
                clip(model.parameters(), arguments.clip)
            optimizer.step()
            optimizer.zero_grad()

        return step

    plain, _ = build(name)
    wrapped = nn.parallel.DistributedDataParallel(build(name)[0])
    ours, _ = build(name)
    session = gradlane.init(
        rendezvous=gradlane.Rendezvous(store=store, rank=rank, world_size=ranks),
        network=gradlane.Network(advertise="127.0.0.1"),
    )
    optimizer = optimizer_of(ours)
    session.prepare(ours, optimizer, buffers=arguments.buffers)
    norm = nn.utils.clip_grad_norm_
    ways = {
        "plain": loop(plain, optimizer_of(plain), norm),
        "ddp": loop(wrapped, optimizer_of(wrapped), norm),
        "gradlane": loop(ours, optimizer, lambda _, clip: session.clip_grad_norm_(clip)),
    }
    wall: dict[str, list[float]] = {way: [] for way in ways}
    used: dict[str, list[float]] = {way: [] for way in ways}
    steps = 0
    gc.disable()
    for turn in range(-1, turns):
        for way, step in ways.items():
            dist.barrier()
            gc.collect()
            began, start_turn = time.process_time(), time.perf_counter()
            for _ in range(WARM_UP_STEPS if turn < 0 else steps):
                start = time.perf_counter()
                step()
                if turn >= 0:
                    wall[way].append(time.perf_counter() - start)
            session.synchronize()
            if turn >= 0:
                used[way].append((time.process_time() - began) / steps)
            elif way == "ddp":
                pace = (time.perf_counter() - start_turn) / WARM_UP_STEPS
                agreed = torch.tensor([max(4, int(arguments.seconds / pace))])
                dist.broadcast(agreed, 0)
                steps = int(agreed)
    session.close()
    dist.destroy_process_group()
    pipe.send(
        [
            {
                "model": name,
                "way": way,
                "ranks": ranks,
                "tensors": sum(one.requires_grad for one in ours.parameters()),
                "buffers": arguments.buffers,
                "optimizer": arguments.optimizer,
                "clip": arguments.clip,
                "steps": len(wall[way]),
                "step_s_median": statistics.median(wall[way]),
                "cpu_s_per_step": statistics.median(used[way]),
                "load": os.getloadavg()[0],
            }
            for way in ways
        ]
    )


if __name__ == "__main__":
    main()
