"""Steps of DDP and FSDP2 over the backend `gradlane` beside Gloo, in turns.

    python -m benchmarks.backend_steps --ranks 2 4 --rates 200mbit 500mbit 1gbit

Each rank has a network namespace with a port of a rate (root; `tc`). The same processes train the
same model over both backends, one step of each in turn, the order changing; one more trains alone,
without any exchange. Layers sleep in place of computing, so that a loaded machine changes little.
Printed are medians of rank 0's steps, the quotient (gradlane over Gloo), processor seconds of all
ranks a step, and how many of the parameters have the same bits after all steps. `--json PATH`
writes every step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.rank_environment import summed_over_ranks, told_by_rank_0
from benchmarks.sleeping_layers import sleeping_layers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import gradlane.distributed
from gradlane.formats.rates import parse_rate

BACKENDS = ("gradlane", "gloo")
WRAPPERS = ("ddp", "fsdp2")
UNTIMED_STEPS = 2


def _wrapped(wrapper: str, group: Any, options: dict[str, Any]) -> nn.Module:
    model = sleeping_layers(options["layers"], options["elements"], options["layer_s"])
    if wrapper == "ddp":
        return DistributedDataParallel(
            model, process_group=group, bucket_cap_mb=options["bucket_mb"]
        )
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> tuple[float, float]:
    """Take a step and return its seconds and this process's processor seconds."""
    began, busy = time.perf_counter(), time.process_time()
    (model(batch) - batch.flip(0)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - began, time.process_time() - busy


def _values(model: nn.Module) -> Tensor:
    """Return this rank's parameters or shards as one tensor."""
    own = [it.to_local() if isinstance(it, DTensor) else it for it in model.parameters()]
    return torch.cat([it.detach().flatten() for it in own])


def _measure(wrapper: str, groups: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Train one wrapper over all backends and return rank 0's row."""
    models = {it: _wrapped(wrapper, groups[it], options) for it in BACKENDS}
    models["alone"] = sleeping_layers(options["layers"], options["elements"], options["layer_s"])
    optimizers = {it: torch.optim.SGD(model.parameters(), lr=0.1) for it, model in models.items()}
    seconds: dict[str, list[float]] = {it: [] for it in models}
    processor: dict[str, list[float]] = {it: [] for it in models}
    source = torch.Generator().manual_seed(dist.get_rank())
    for number in range(options["steps"] + UNTIMED_STEPS):
        batch = torch.randn(64, generator=source)
        for name in models if number % 2 else reversed(models):
            dist.barrier()
            taken, busy = _step(models[name], optimizers[name], batch)
            if number >= UNTIMED_STEPS:
                seconds[name].append(taken)
                processor[name].append(busy)
    ours, gloos = (_values(models[it]).view(torch.int32) for it in BACKENDS)
    equal = torch.tensor([int((ours == gloos).sum()), ours.numel()])
    dist.all_reduce(equal)
    return {
        "wrapper": wrapper,
        "ranks": dist.get_world_size(),
        "rate_bps": options["rate_bps"],
        "step_s": seconds,
        "processor_s": summed_over_ranks(processor),
        "equal_parameters": int(equal[0]) / int(equal[1]),
        "load": os.getloadavg()[0],
    }


def train(options: dict[str, Any]) -> None:
    """Be one rank: train with every wrapper, and print the rows on rank 0."""
    torch.set_num_threads(1)
    gradlane.distributed.register()
    dist.init_process_group("gloo")
    groups = {"gloo": dist.group.WORLD, "gradlane": dist.new_group(backend="gradlane")}
    for wrapper in options["wrappers"]:
        row = _measure(wrapper, groups, options)
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def _line(row: dict[str, Any]) -> str:
    step = {it: 1e3 * statistics.median(row["step_s"][it]) for it in row["step_s"]}
    busy = {it: statistics.median(row["processor_s"][it]) for it in BACKENDS}
    return (
        f"| {row['wrapper']} | {row['ranks']} | {row['rate_bps'] / 1e6:,.0f} "
        f"| {step['alone']:,.0f} | {step['gradlane']:,.0f} | {step['gloo']:,.0f} "
        f"| {step['gradlane'] / step['gloo']:.3f} | {busy['gradlane']:.2f} | {busy['gloo']:.2f} "
        f"| {100 * row['equal_parameters']:.0f} % | {row['load']:.1f} |"
    )


HEAD = (
    "| wrapper | ranks | Mbit/s | alone, ms | gradlane, ms | Gloo, ms | quotient "
    "| gradlane, processor s | Gloo, processor s | same bits | load |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["200mbit", "500mbit", "1gbit"])
    parser.add_argument("--wrappers", nargs="+", default=list(WRAPPERS), choices=WRAPPERS)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--elements", type=int, default=1 << 20, help="of a layer's weight")
    parser.add_argument("--layer-ms", type=float, default=60.0)
    parser.add_argument("--bucket-mb", type=float, default=25.0, help="DDP's bucket_cap_mb")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train(json.loads(given.train))
        # A thread of Gloo that drops its last work while the interpreter ends aborts (torch 2.15).
        os._exit(0)
    rows: list[dict[str, Any]] = []
    print(HEAD)
    for ranks in given.ranks:
        for rate in given.rates:
            options = {
                "wrappers": given.wrappers,
                "steps": given.steps,
                "layers": given.layers,
                "elements": given.elements,
                "layer_s": given.layer_ms / 1e3,
                "bucket_mb": given.bucket_mb,
                "rate_bps": round(parse_rate(rate)),
            }
            program = ["-m", "benchmarks.backend_steps", "--train", json.dumps(options)]
            for told in told_by_rank_0(ranks, options["rate_bps"], program):
                rows.append(json.loads(told))
                print(_line(rows[-1]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
