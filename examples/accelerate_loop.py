"""Hugging Face Accelerate: `torchrun --nproc-per-node=2 examples/accelerate_loop.py`.

The session prepares model and optimizer, Accelerate everything else: the loader, the optimizer's
wrapper, mixed precision, metrics. `attach` has the accelerator leave models unwrapped, and clip and
accumulate through the session.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

import gradlane
from common import arguments, build_data, build_model, digest, leave
from gradlane.integrations.accelerate import attach


def main() -> None:
    """Train two epochs and print a hash of what was learned."""
    engine = arguments().engine
    accelerator = Accelerator(cpu=True)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(build_data(), batch_size=8)
    session = gradlane.init() if engine == "gradlane" else None
    if session is not None:
        attach(accelerator, session)
        session.prepare(model, optimizer)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for points, labels in loader:
            accelerator.backward(nn.functional.cross_entropy(model(points), labels))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    print(f"learned {digest(list(model.parameters()))}\n", end="", flush=True)
    if session is not None:
        session.close()
    accelerator.end_training()
    leave(engine)


if __name__ == "__main__":
    main()
