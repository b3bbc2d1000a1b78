"""Peak memory of a rank with and without `going_on`, for models of several sizes.

    python -m benchmarks.going_on_memory

Two ranks of this machine train a few steps over loopback with SGD, a process each; a table says
how far each one's resident memory rose above what it had before the session was opened.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from gradlane.report.markdown import markdown_table

RANKS = 2
STEPS = 4
WIDTHS = {"resnet50": 25_557_032, "bert_base": 109_482_240, "vgg19": 143_667_240}
"""Numbers of parameters of known models; the layers here are all alike."""
_LAYER = 1024
_TIMEOUT_S = 600.0
_MEBI = 1 << 20


def train(parameters: int, going_on: bool, port: int) -> None:
    """Train as one rank, and print the bytes of its peak above the model and its optimizer."""
    import torch
    from torch import nn
    from torch._C._distributed_c10d import TCPStore

    import gradlane

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = max(1, parameters // (_LAYER * _LAYER))
    model = nn.Sequential(*(nn.Linear(_LAYER, _LAYER, bias=False) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(4, _LAYER)
    model(batch).square().mean().backward()
    optimizer.zero_grad(set_to_none=False)
    before = _resident_bytes()
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    with gradlane.init(
        going_on=going_on,
        rendezvous=gradlane.Rendezvous(store=store),
        network=gradlane.Network(advertise="127.0.0.1"),
        monitoring=gradlane.Monitoring(summary=False),
    ) as session:
        session.prepare(model, optimizer)
        for _ in range(STEPS):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        session.synchronize()
        gradients = sum(4 * one.numel() for one in model.parameters())
        print(json.dumps({"peak": _peak_bytes() - before, "gradients": gradients}))


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    row = next(line for line in lines if line.startswith(f"{name}:"))
    return int(row.split()[1]) * 1024


def _resident_bytes() -> int:
    return _status("VmRSS")


def _peak_bytes() -> int:
    return _status("VmHWM")


def measure(parameters: int, going_on: bool) -> list[dict[str, Any]]:
    """Return what each rank printed."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "benchmarks.going_on_memory", "--rank", str(parameters)]
    command += [str(int(going_on)), str(store.port)]
    ranks = []
    for rank in range(RANKS):
        place = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
        environment = {**os.environ, **place, "OMP_NUM_THREADS": "1"}
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        printed = [rank.communicate(timeout=_TIMEOUT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads(text) for text in printed]


def main() -> None:
    """Measure all sizes, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rank", nargs=3, type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        train(given.rank[0], bool(given.rank[1]), given.rank[2])
        return
    rows = []
    for name, parameters in WIDTHS.items():
        off, on = measure(parameters, False), measure(parameters, True)
        cells = [max(one["peak"] for one in found) / _MEBI for found in (off, on)]
        gradients = off[0]["gradients"] / _MEBI
        rows.append(
            (name, *(f"{cell:.0f} MiB" for cell in (gradients, *cells, cells[1] - cells[0])))
        )
    columns = ("parameters of", "gradients", "session", "with going_on", "more")
    print(markdown_table(columns, rows, numbers="-nnnn"))


if __name__ == "__main__":
    main()
