"""One rank of a short training, with the launcher's variables; prints a digest of its parameters.

A refusal is printed, and ends with status 3.
"""

from __future__ import annotations

import sys
import zlib

import torch
from torch import nn

import gradlane
from gradlane.errors import GradlaneError


def main() -> None:
    """Train three steps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitoring = gradlane.Monitoring(summary=False)
    network = gradlane.Network(connect_timeout_s=60.0, silence_timeout_s=20.0)
    with gradlane.init(local="off", network=network, monitoring=monitoring) as session:
        session.prepare(model, optimizer)
        for _ in range(3):
            model(torch.full((4, 64), float(session.rank + 1))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.synchronize()
        values = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    print(f"trained {zlib.crc32(values)}")


if __name__ == "__main__":
    try:
        main()
    except GradlaneError as error:
        print(f"{type(error).__name__}: {error}")
        sys.exit(3)
