"""A training program, one rank of it, that comes to the end that it is told to.

Environment as torchrun sets it, `ADVERTISE`, the address of this rank's node where that is not the
loopback, and `CONNECT_TIMEOUT_S`. With an ending that it does not know it trains for ever. Prints
`step N` lines; what gradlane raises goes to stderr as any uncaught exception does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import torch
from torch import nn

import gradlane

WAITING = {"sigterm-waiting": signal.SIGTERM, "interrupt-waiting": signal.SIGINT}
"""Endings of rank 0 by a signal while it waits for the last rank."""


def main(ending: str) -> None:
    """Train for ever; the last rank, or rank 0, ends in step 4 in the given way."""
    torch.set_num_threads(1)
    address = os.environ.get("ADVERTISE", "127.0.0.1")
    limit_s = float(os.environ.get("CONNECT_TIMEOUT_S", "60"))
    session = gradlane.init(
        network=gradlane.Network(
            silence_timeout_s=3.0, connect_timeout_s=limit_s, advertise=address
        )
    )
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    session.prepare(model, optimizer)
    last = session.rank == session.world_size - 1
    steps = 6 if ending in ("normal", "sys-exit") else 1_000_000
    for step in range(1, steps + 1):
        if last and step == 4:
            # All ranks are in step 3 at least once it is complete here.
            session.synchronize()
            end(ending)
        if session.rank == 0 and step == 4 and ending in WAITING:
            # By then this rank waits for the last one.
            threading.Timer(0.5, os.kill, (os.getpid(), WAITING[ending])).start()
        model(torch.ones(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
        if step <= 6:
            print(f"step {step}", flush=True)
    if ending == "sys-exit":
        sys.exit(3)


def end(ending: str) -> None:
    """Come to an end, or wait for the one that the test brings."""
    if ending == "exception":
        raise ArithmeticError("the loss is not a number")
    if ending == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "sigstop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if ending == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
    if ending == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
    if ending in WAITING:
        time.sleep(60)
    if ending == "finish-early":
        sys.exit(0)
    if ending == "exit-early":
        sys.exit(3)
    if ending == "exit-early-in-words":
        sys.exit("no more data")


if __name__ == "__main__":
    main(sys.argv[1])
