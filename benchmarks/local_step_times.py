"""Step times of local updates on shaped ports, beside what `gradlane whatif` predicts for them.

`python -m benchmarks.local_step_times --rate 20mbit --ranks 4` (root: network namespaces and `tc`)
trains layers that sleep in place of computing, so that a loaded machine changes little. Each way
has whole rounds, of which the first is not counted. Printed are the mean step of rank 0, the
prediction with the profile of the same layers, and each port's bytes a step beside the simulated
ones. `--json PATH` writes the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.rank_environment import told_by_rank_0

from gradlane.formats.rates import parse_rate
from gradlane.planning.simulation.grid import simulate
from gradlane.planning.simulation.profiles import Profile, ProfileTensor
from gradlane.planning.simulation.scenarios import Cluster
from gradlane.training.options.local_updates import Local, parse_local

LAYERS, SIZE = 8, 256
COMPUTE_S = 0.16
SPARSE = "topk:ratio=0.02,broadcast_ratio=0.08,bits=2,bucket=4096,decay=0.95"
WAYS: tuple[tuple[str, str], ...] = (
    ("local:steps=4", "raw"),
    ("local:steps=8", "raw"),
    ("local:steps=8,fragments=4,overlap_steps=2,mix=0.5", "raw"),
    ("local:steps=8", "qsgd:bits=8"),
    ("local:steps=8,outer=average", SPARSE),
)
ROUNDS = 3


def profile() -> Profile:
    """Return the profile of the layers that ranks train."""
    return Profile(
        "sleeping layers",
        1,
        COMPUTE_S / 3,
        COMPUTE_S,
        tuple(
            ProfileTensor(f"{2 * layer}.weight", (SIZE, SIZE), "f32", 0.0, COMPUTE_S)
            for layer in range(LAYERS)
        ),
    )


def train() -> None:
    """Train on one rank in all ways, and print the mean step and the bytes sent for each."""
    import torch
    from torch import nn

    import gradlane

    torch.set_num_threads(1)
    for update, codec in WAYS:
        local = parse_local(update)
        session = gradlane.init(
            update=local,
            codec=codec,
            local="off",
            monitoring=gradlane.Monitoring(summary=False),
        )
        layers: list[nn.Module] = []
        for _ in range(LAYERS):
            layers += [nn.Linear(SIZE, SIZE, bias=False), nn.Tanh()]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        inputs = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(session.rank))
        begin_s, before = 0.0, 0.0
        for step in range(local.steps * (ROUNDS + 1)):
            if step == local.steps:
                session.exchange("a round is over")
                begin_s, before = time.monotonic(), session.metrics()["tx_bytes"]
            next_s = time.monotonic() + COMPUTE_S
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            time.sleep(max(0.0, next_s - time.monotonic()))
            optimizer.step()
        steps = local.steps * ROUNDS
        step_s = (time.monotonic() - begin_s) / steps
        session.exchange("all have what this rank has sent")
        sent = (session.metrics()["tx_bytes"] - before) / steps
        session.close()
        if session.rank == 0:
            print(json.dumps({"update": update, "step_s": step_s, "bytes": sent}), flush=True)


def predicted(update: Local, codec: str, ranks: int, rate_bps: float) -> Any:
    """Return the simulated row."""
    cluster = Cluster(workers=ranks, rate_bps=rate_bps, update=update, codec=codec)
    return simulate(profile(), cluster)[0]


def main() -> None:
    """Build the cluster, train, and print a line for each way."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", default="20mbit")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train()
        return
    rate_bps = round(parse_rate(given.rate))
    program = ["-m", "benchmarks.local_step_times", "--train"]
    told = [json.loads(line) for line in told_by_rank_0(given.ranks, rate_bps, program)]
    rows = []
    for (update, codec), found in zip(WAYS, told, strict=True):
        row = predicted(parse_local(update), codec, given.ranks, float(rate_bps))
        rows.append(
            {
                **{"update": update, "codec": codec, "ranks": given.ranks, "rate": given.rate},
                **{"measured_s": found["step_s"], "predicted_s": row.step_s},
                **{"measured_bytes": found["bytes"], "predicted_bytes": row.tx_bytes_per_step},
                "load": os.getloadavg()[0],
            }
        )
        print(
            f"{update} {codec}: {1e3 * found['step_s']:.1f} ms a step, predicted "
            f"{1e3 * row.step_s:.1f} ({100 * (row.step_s / found['step_s'] - 1):+.1f} %); "
            f"{found['bytes']:.0f} bytes a step, predicted {row.tx_bytes_per_step:.0f}",
            flush=True,
        )
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
