"""Training steps on CUDA devices over shaped links: DDP over NCCL and Gloo beside gradlane.

One process a node, each in a network namespace of its own whose port carries `--rate` in each
direction; all ways of training take turns in the same processes, with the same model and data.
Nodes share this machine's CUDA devices: with fewer devices than nodes each computes more slowly
than it would alone, all ways alike, and NCCL is told that they are other machines, since it
refuses two ranks on one device. An accelerator that is shared runs one process at a time unless
NVIDIA's MPS is running, and NCCL's kernels wait on the device for the network. As root.

    python benchmarks/cuda_step.py --model transformer --nodes 2 --rate 10gbit --json steps.json

Ways are `none`, a strategy, `ddp-gloo` and `ddp-nccl`. A strategy takes `/sealed`, `/going-on` and
`/codec=SPEC`; DDP takes `/50mb` (buckets of that size, as views of which gradients lie, in a static
graph) and `/bf16` (torch's hook of that name). With `--clip` all clip by the norm of the gradients:
gradlane's by the session, the others by torch.

`--device cpu` tries the benchmark itself where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

MODES = ("none", "p3", "wfbp", "ddp-gloo", "ddp-nccl")
PORT = 29_400
WARM_UP_STEPS = 3
TIMEOUT_S = 580
SECRET = "6e1f0c53a8b94d27e05f3b7a91c8d462"


def main() -> None:
    """Run the ranks, print a table, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="transformer", help="or a name in torchvision.models")
    parser.add_argument("--batch", type=int, default=8, help="samples a rank and step")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rate", default="10gbit", help="of every port")
    parser.add_argument("--ways", default=",".join(MODES))
    parser.add_argument("--clip", type=float, help="clip by this norm of all gradients")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a turn")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path, dest="json_path")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        train(arguments)
        return
    report = run(arguments)
    steps = report["step_s"]
    print(f"{report['model']}, {report['nodes']} nodes, {report['rate']}, {report['device']}")
    print(f"{report['gradient_bytes'] / 1e6:.1f} MB of gradients, batch {report['batch']}")
    print(f"{'way':<24} {'step, ms':>10} {'least':>8} {'most':>8}  same on all ranks")
    for way, seconds in steps.items():
        print(
            f"{way:<24} {statistics.median(seconds) * 1e3:>10.1f} {min(seconds) * 1e3:>8.1f} "
            f"{max(seconds) * 1e3:>8.1f}  {report['same_on_all_ranks'].get(way, '-')}"
        )
    if arguments.json_path is not None:
        arguments.json_path.write_text(json.dumps(report, indent=1), encoding="utf-8")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start a rank in each node and return what rank 0 reports."""
    from gradlane.formats.rates import parse_rate
    from gradlane.lab.cluster.namespaces import INTERFACE, EmulatedCluster

    with EmulatedCluster(arguments.nodes, parse_rate(arguments.rate)) as cluster:
        ranks = []
        for rank in range(arguments.nodes):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(arguments.nodes),
                "MASTER_ADDR": cluster.addresses[0],
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "NCCL_SOCKET_IFNAME": INTERFACE,
                "NCCL_IB_DISABLE": "1",
                "NCCL_HOSTID": f"node{rank}",
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "OMP_NUM_THREADS": "1",
            }
            program = [sys.executable, __file__, *sys.argv[1:], "--rank", str(rank)]
            ranks.append(
                cluster.spawn(
                    rank,
                    program,
                    environment=environment,
                    stdout=subprocess.PIPE if rank == 0 else None,
                )
            )
        output, _ = ranks[0].communicate(timeout=TIMEOUT_S)
        if any(rank.wait(timeout=30) for rank in ranks):
            raise SystemExit("a rank failed; its words stand above")
        report: dict[str, Any] = json.loads(output.decode().splitlines()[-1])
        return report


def build(name: str, batch: int, device: Any) -> tuple[Any, Callable[[], Any]]:
    """Return a model on the device, and a function that returns the loss of a forward."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    draw = torch.Generator(device).manual_seed(1 + rank)
    if name == "transformer":
        vocabulary, width, length = 50_257, 768, 512
        layer = nn.TransformerEncoderLayer(width, 12, 4 * width, 0.0, "gelu", batch_first=True)
        model: Any = nn.Sequential(
            nn.Embedding(vocabulary, width),
            nn.TransformerEncoder(layer, 12, enable_nested_tensor=False),
            nn.Linear(width, vocabulary, bias=False),
        )
        model[2].weight = model[0].weight
        shape = (batch, length)
        inputs = torch.randint(vocabulary, shape, device=device, generator=draw)
        targets = torch.randint(vocabulary, shape, device=device, generator=draw).flatten()
    else:
        import torchvision

        model = getattr(torchvision.models, name)()
        inputs = torch.randn(batch, 3, 224, 224, device=device, generator=draw)
        targets = torch.randint(1000, (batch,), device=device, generator=draw)
    model.to(device)

    def loss(module: Any) -> Any:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            outputs = module(inputs)
            return nn.functional.cross_entropy(outputs.flatten(0, -2).float(), targets)

    return model, loss


def train(arguments: argparse.Namespace) -> None:
    """Train in all ways, in turns, as one rank; rank 0 prints the report."""
    import torch
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_cuda = arguments.device == "cuda"
    device = (
        torch.device("cuda", rank % torch.cuda.device_count()) if on_cuda else torch.device("cpu")
    )
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    ways = [way for way in arguments.ways.split(",") if on_cuda or "nccl" not in way]
    nccl = dist.new_group(backend="nccl") if any("nccl" in way for way in ways) else None
    steps: dict[str, list[float]] = {way: [] for way in ways}
    same: dict[str, bool] = {}
    gradient_bytes = 0
    for turn in range(arguments.rounds):
        for way in ways:
            model, loss = build(arguments.model, arguments.batch, device)
            gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
            job = f"cuda-step-{turn}-{way}"
            step_s, digest = take_turn(way, model, loss, nccl, arguments.steps, job, arguments.clip)
            steps[way].append(step_s)
            if way != "none":
                digests: list[Any] = [None] * world_size
                dist.all_gather_object(digests, digest)
                same[way] = same.get(way, True) and len(set(digests)) == 1
            if rank == 0:
                print(
                    f"turn {turn + 1}: {way}: {step_s * 1e3:.1f} ms",
                    file=sys.stderr,
                    flush=True,
                )
            del model, loss
    if rank == 0:
        name = torch.cuda.get_device_name(device) if on_cuda else "cpu"
        report = {
            "model": arguments.model,
            "batch": arguments.batch,
            "nodes": world_size,
            "rate": arguments.rate,
            "device": name,
            "devices": torch.cuda.device_count(),
            "torch": torch.__version__,
            "clip": arguments.clip,
            "gradient_bytes": gradient_bytes,
            "step_s": steps,
            "same_on_all_ranks": same,
            "load": os.getloadavg()[0],
        }
        print(json.dumps(report), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def distributed(model: Any, group: Any, extras: list[str]) -> Any:
    """Return a model with DDP around it."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    device = next(model.parameters()).device
    tuned: dict[str, Any] = {}
    for extra in extras:
        if extra.endswith("mb"):
            tuned = {
                "bucket_cap_mb": int(extra.removesuffix("mb")),
                "gradient_as_bucket_view": True,
                "static_graph": True,
            }
        elif extra != "bf16":
            raise SystemExit(f"DDP takes no {extra!r}: give /25mb or /bf16")
    devices = None if device.type == "cpu" else [device.index]
    module = DistributedDataParallel(model, device_ids=devices, process_group=group, **tuned)
    if "bf16" in extras:
        module.register_comm_hook(group, bf16_compress_hook)
    return module


def opened(strategy: str, extras: list[str], job: str) -> Any:
    """Return a session."""
    import gradlane

    options: dict[str, Any] = {}
    secret = None
    for extra in extras:
        if extra == "sealed":
            secret = SECRET
        elif extra == "going-on":
            options["going_on"] = True
        elif extra.startswith("codec="):
            options["codec"] = extra.removeprefix("codec=")
        else:
            raise SystemExit(f"a strategy takes no {extra!r}: give /sealed, /going-on, /codec=SPEC")
    return gradlane.init(
        strategy=strategy,
        rendezvous=gradlane.Rendezvous(job=job),
        network=gradlane.Network(secret=secret),
        **options,
    )


def take_turn(
    way: str,
    model: Any,
    loss: Callable[[Any], Any],
    nccl: Any,
    count: int,
    job: str,
    clip: float | None,
) -> tuple[float, int]:
    """Train some steps in one way; returns seconds a step, and a digest of the parameters."""
    import torch
    import torch.distributed as dist

    name, *extras = way.split("/")
    device = next(model.parameters()).device
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    session, module = None, model
    if name.startswith("ddp"):
        module = distributed(model, nccl if name == "ddp-nccl" else None, extras)
    elif name != "none":
        session = opened(name, extras, job)
        session.prepare(model, optimizer)

    def train_steps(steps: int) -> None:
        """Train, until everything that was sent has been used."""
        for _ in range(steps):
            loss(module).backward()
            if clip is not None and session is not None:
                session.clip_grad_norm_(clip)
            elif clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        if session is not None:
            session.synchronize()
        if device.type == "cuda":
            torch.cuda.synchronize()

    # The first steps find buffers and kernels; the rest are one piece, ends included.
    train_steps(WARM_UP_STEPS)
    dist.barrier()
    begin_s = time.perf_counter()
    train_steps(count)
    step_s = (time.perf_counter() - begin_s) / count
    with torch.no_grad():
        sums = [parameter.double().sum().item() for parameter in model.parameters()]
    if session is not None:
        session.close()
    return step_s, hash(tuple(sums))


if __name__ == "__main__":
    main()
