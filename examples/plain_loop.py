"""A loop of one's own: `torchrun --nproc-per-node=2 examples/plain_loop.py [--engine ddp]`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import gradlane
from common import arguments, build_data, build_model, digest, leave


def main() -> None:
    """Train two epochs and print a hash of what was learned."""
    engine = arguments().engine
    dist.init_process_group("gloo")
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = gradlane.init() if engine == "gradlane" else None
    forward: nn.Module = model
    if session is not None:
        session.prepare(model, optimizer)
    else:
        forward = nn.parallel.DistributedDataParallel(model)
    data = build_data()
    sampler = DistributedSampler(data, dist.get_world_size(), dist.get_rank(), seed=2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for points, labels in DataLoader(data, batch_size=8, sampler=sampler):
            nn.functional.cross_entropy(forward(points), labels).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    print(f"learned {digest(list(model.parameters()))}\n", end="", flush=True)
    if session is not None:
        session.close()
    # Nobody leaves while another rank is still talking to it.
    dist.barrier()
    dist.destroy_process_group()
    leave(engine)


if __name__ == "__main__":
    main()
