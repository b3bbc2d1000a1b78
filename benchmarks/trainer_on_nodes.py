"""Hugging Face's Trainer with its defaults on four emulated nodes: DDP, gradlane and neither.

`python -m benchmarks.trainer_on_nodes --rate 150mbit` (as root, with `transformers` installed)
trains a GPT-2 with random weights, whose blocks take a fixed time in forward and backward as on an
accelerator, and prints the median step of each engine in turn, `--repeat` times. The trainer clips
by the global norm, which is its default. `alone` is one rank without any exchange: the compute.
`apart` are as many ranks as nodes at once, each without any exchange: the compute where they share
the processors of one machine.
`--json PATH` writes what is printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ENGINES = ("alone", "apart", "ddp", "gradlane")
NODES = 4
WARMUP_STEPS = 8
EXAMPLES = Path(__file__).parents[1] / "examples"


def train(engine: str, options: argparse.Namespace) -> None:
    """Train as one rank, and write the times of steps to standard output as JSON."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback

    import gradlane
    from gradlane.integrations.transformers import attach

    sys.path.append(str(EXAMPLES))
    from transformers_trainer import settings_for

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=options.words,
        n_positions=32,
        n_embd=options.width,
        n_layer=options.blocks,
        n_head=4,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    for block in model.transformer.h:
        block.register_forward_pre_hook(lambda *_: time.sleep(options.block_s))
        block.register_full_backward_pre_hook(lambda *_: time.sleep(2 * options.block_s))
    count = 4 * NODES * (WARMUP_STEPS + options.steps)
    tokens = torch.randint(options.words, (count, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    begun_s: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Notes when steps begin."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            """Note the time."""
            begun_s.append(time.monotonic())

    with tempfile.TemporaryDirectory() as folder:
        settings = settings_for(folder, max_steps=WARMUP_STEPS + options.steps)
        trainer = Trainer(model=model, args=settings, train_dataset=data, callbacks=[Clock()])
        session = gradlane.init() if engine == "gradlane" else None
        if session is not None:
            attach(trainer, session)
        trainer.train()
        times_s = [after - before for before, after in itertools.pairwise(begun_s)]
        norm = torch.cat([one.detach().double().flatten() for one in model.parameters()]).norm()
        print(json.dumps({"times_s": times_s[WARMUP_STEPS:], "norm": float(norm)}), flush=True)
        if session is not None:
            session.close()
    sys.stdout.flush()
    os._exit(0)


def measure(engine: str, cluster: Any, arguments: list[str]) -> dict[str, Any]:
    """Train with an engine on the nodes of a cluster; return rank 0's figures."""
    port = str(cluster.next_port())
    exchanges = engine in ("ddp", "gradlane")
    children = [
        cluster.spawn(
            node,
            [sys.executable, "-m", "benchmarks.trainer_on_nodes", "--engine", engine, *arguments],
            environment={
                "RANK": str(node if exchanges else 0),
                "WORLD_SIZE": str(NODES if exchanges else 1),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": cluster.addresses[0 if exchanges else node],
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": "eth0",
                "HF_HUB_OFFLINE": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for node in range(1 if engine == "alone" else NODES)
    ]
    ended = [child.communicate(timeout=600) for child in children]
    for child, (_, errors) in zip(children, ended, strict=True):
        if child.returncode:
            raise SystemExit(f"{engine}: {errors.decode(errors='replace')[-2000:]}")
    lines = [line for line in ended[0][0].decode().splitlines() if line.startswith("{")]
    figures: dict[str, Any] = json.loads(lines[-1])
    for line in ended[0][1].decode(errors="replace").splitlines():
        if "steps" in line and "median" in line:
            figures["summary"] = line
    return figures


def main() -> None:
    """Train as one rank, or measure all engines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=ENGINES)
    parser.add_argument("--rate", default="150mbit")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    for name, value in (("words", 512), ("width", 128), ("blocks", 8), ("steps", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--block-s", type=float, default=0.02)
    options = parser.parse_args()
    if options.engine is not None:
        train(options.engine, options)
        return
    from gradlane.formats.rates import parse_rate
    from gradlane.lab.cluster.namespaces import EmulatedCluster

    names = ("words", "width", "blocks", "steps", "block_s")
    arguments = [
        part for name in names for part in (f"--{name.replace('_', '-')}", str(vars(options)[name]))
    ]
    rows: list[dict[str, Any]] = []
    with EmulatedCluster(NODES, int(parse_rate(options.rate))) as cluster:
        for turn in range(options.repeat):
            for engine in ENGINES:
                found = measure(engine, cluster, arguments)
                step_s = statistics.median(found["times_s"])
                rows.append({"engine": engine, "turn": turn, "step_s": step_s, **found})
                print(f"{engine:9} {step_s * 1e3:8.1f} ms a step, norm {found['norm']:.6g}")
    medians = {
        engine: statistics.median(row["step_s"] for row in rows if row["engine"] == engine)
        for engine in ENGINES
    }
    print(
        f"{options.rate}, four nodes: "
        + ", ".join(f"{engine} {step_s * 1e3:.1f} ms" for engine, step_s in medians.items())
        + f"; gradlane {medians['ddp'] / medians['gradlane']:.2f} times as fast as DDP"
    )
    if options.json is not None:
        options.json.write_text(json.dumps({"medians_s": medians, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
