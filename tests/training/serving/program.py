"""One rank of a program of three, the last of which only serves; it trains until it is ended.

Environment as torchrun sets it. Prints `step N` lines.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import gradlane


def main(steps: int, update: str, strategy: str) -> None:
    """Train so many steps, or serve those who do."""
    torch.set_num_threads(1)
    session = gradlane.init(
        workers=2,
        update=update,
        strategy=strategy,
        network=gradlane.Network(
            silence_timeout_s=3.0, connect_timeout_s=60.0, advertise="127.0.0.1"
        ),
    )
    if session.serves:
        session.serve()
        return
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    session.prepare(model, optimizer)
    for step in range(1, steps + 1):
        model(torch.ones(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
        if step <= 6:
            session.synchronize()
            print(f"step {step}", flush=True)
    session.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
