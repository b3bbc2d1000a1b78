"""A training program for torchrun whose second rank fails in the first attempt."""

from __future__ import annotations

import os
import sys

import torch
from torch import nn

import gradlane


def main() -> None:
    """Train five steps; print what was learned."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with gradlane.init(advertise="127.0.0.1", silence_timeout_s=5.0) as session:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        for step in range(5):
            if attempt == 0 and session.rank == 1 and step == 2:
                sys.exit(7)
            model(torch.full((2, 4), float(session.rank))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weight = model.weight.sum().item()
        # In one write: the ranks share a pipe, and their lines must not mix.
        os.write(1, f"rank {session.rank} attempt {attempt} weight {weight:.6f}\n".encode())


if __name__ == "__main__":
    main()
