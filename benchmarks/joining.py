"""What it costs four emulated nodes when a fifth joins them: `python -m benchmarks.joining`.

As root. A model as large as ResNet-50 (25.2 million parameters) trains with AdamW; its layers
sleep where an accelerator would compute. When it has trained for some steps, a rank joins. Printed
are the median step before and after, the steps while the state travels, the step in which the rank
is let in, and how long the bytes of the state need at the link's rate. `--json PATH` writes what is
printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MEMBERS = 4
LAYERS = 24
WIDTH = 1024
STORE_PORT = 29600


def train(options: argparse.Namespace) -> None:
    """Train as one rank, and write the times of its steps to standard output as JSON."""
    import logging

    import torch
    from torch import nn

    import gradlane

    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    part_s = options.compute_s / 3 / LAYERS
    for layer in model:
        layer.register_forward_pre_hook(lambda *_: time.sleep(part_s))
        layer.register_full_backward_pre_hook(lambda *_: time.sleep(2 * part_s))
    optimizer = torch.optim.AdamW(model.parameters())
    session = gradlane.init(going_on=True, join=options.join)
    changes: list[gradlane.MembershipChange] = []
    session.on_membership(changes.append)
    asked_s = time.monotonic()
    session.prepare(model, optimizer)
    prepared_s = time.monotonic()
    begun_s = [time.monotonic()]
    while session.step < (changes[0].step + options.steps if changes else 1 << 30):
        inputs = torch.randn(1, WIDTH)
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        begun_s.append(time.monotonic())
        if len(begun_s) == options.steps:
            print("ready", flush=True)
    session.synchronize()
    total = sum(float(one.double().sum()) for one in model.parameters())
    state = sum(
        value.nbytes
        for one in optimizer.state.values()
        for value in one.values()
        if isinstance(value, torch.Tensor)
    )
    size = sum(one.nbytes for one in model.parameters())
    first = changes[0].step
    print(
        json.dumps(
            {
                "times_s": [after - before for before, after in itertools.pairwise(begun_s)],
                "begun_s": begun_s,
                "asked_s": asked_s,
                "prepared_s": prepared_s,
                "first_step": first,
                "sum": total,
                "state_bytes": size + state,
            }
        ),
        flush=True,
    )
    session.close()


def measure(cluster: Any, arguments: list[str], steps: int) -> dict[str, Any]:
    """Let a rank join four others; return the figures."""
    module = [sys.executable, "-m", "benchmarks.joining", "--train", *arguments]
    address = f"{cluster.addresses[0]}:{STORE_PORT}"
    store = cluster.spawn(
        0,
        [sys.executable, "-m", "gradlane", "store", "--host", cluster.addresses[0], "--json"],
        environment={},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        store.stdout.readline()
        ranks = [
            cluster.spawn(
                node,
                module if node < MEMBERS else [*module, "--join"],
                environment={
                    "GRADLANE_STORE": address,
                    "GRADLANE_INTERFACE": "eth0",
                    **({"RANK": str(node), "WORLD_SIZE": str(MEMBERS)} if node < MEMBERS else {}),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for node in range(MEMBERS)
        ]
        assert ranks[1].stdout.readline().strip() == b"ready", ranks[1].stderr.read().decode()
        ranks.append(
            cluster.spawn(
                MEMBERS,
                [*module, "--join"],
                environment={"GRADLANE_STORE": address, "GRADLANE_INTERFACE": "eth0"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
        rows = []
        told = ""
        for rank in ranks:
            output, errors = rank.communicate(timeout=300)
            if rank.returncode:
                raise SystemExit(errors.decode(errors="replace")[-3000:])
            rows.append(json.loads(output.decode().splitlines()[-1]))
            told = errors.decode(errors="replace")
    finally:
        store.terminate()
    assert len({row["sum"] for row in rows}) == 1, [row["sum"] for row in rows]
    member, joiner = rows[1], rows[-1]
    times_s, begun_s, first = member["times_s"], member["begun_s"], member["first_step"]
    asked = next(step for step, at_s in enumerate(begun_s) if at_s > joiner["asked_s"])
    return {
        "before_s": statistics.median(times_s[2:asked]),
        "meanwhile_s": times_s[asked : first - 2],
        "let_in_s": max(times_s[first - 2 : first]),
        "after_s": statistics.median(times_s[first:]),
        "joined_s": joiner["prepared_s"] - joiner["asked_s"],
        "state_bytes": member["state_bytes"],
        "told": [line for line in told.splitlines() if "state came" in line],
    }


def main() -> None:
    """Train as one rank, or measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--join", action="store_true")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--compute-s", type=float, default=0.5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.train:
        train(options)
        return
    from gradlane.formats.rates import parse_rate
    from gradlane.lab.cluster.namespaces import EmulatedCluster

    rate_bps = int(parse_rate(options.rate))
    arguments = ["--steps", str(options.steps), "--compute-s", str(options.compute_s)]
    with EmulatedCluster(MEMBERS + 1, rate_bps) as cluster:
        found = measure(cluster, arguments, options.steps)
    found["bytes_s"] = found["state_bytes"] * 8 / rate_bps
    meanwhile = ", ".join(f"{one * 1e3:.0f}" for one in found["meanwhile_s"])
    print(
        f"{options.rate}, {MEMBERS} ranks and one that joins: a step took "
        f"{found['before_s'] * 1e3:.0f} ms before, {meanwhile} ms from its request on, "
        f"{found['let_in_s'] * 1e3:.0f} ms where it was let in, and "
        f"{found['after_s'] * 1e3:.0f} ms after; prepare() of the rank that joined "
        f"{found['joined_s']:.2f} s; its {found['state_bytes'] / 1e6:.0f} MB need "
        f"{found['bytes_s']:.2f} s"
    )
    print(*found["told"], sep="\n")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
