"""FSDP2 within each node, gradlane between them, as a plain training script.

On each of two nodes of two ranks (`--engine hsdp`: torch's own HSDP in place of gradlane):

    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400 fsdp2.py

The lines of gradlane are marked; everything else is torch's.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradlane  # 1


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        """Make a layer of this width."""
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.inner = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the layer's output."""
        y = self.first(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        out: Tensor = x + self.inner(self.second(x))
        return out


class Transformer(nn.Module):
    """A small language model."""

    def __init__(self, words: int, width: int, layers: int, length: int) -> None:
        """Make a model of these sizes."""
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.layers = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the next tokens."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.embed(tokens) + self.position
        for layer in self.layers:
            x = layer(x, mask)
        logits: Tensor = self.head(x)
        return logits


def main() -> None:
    """Train some steps and print the losses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=("gradlane", "hsdp"), default="gradlane")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--width", type=int, default=32)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    local_size = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = dist.get_world_size() // local_size
    mesh = init_device_mesh("cpu", (nodes, local_size), mesh_dim_names=("node", "shard"))
    if options.engine == "gradlane":
        mesh = mesh["shard"]  # 2: torch shards within the node alone
    torch.manual_seed(1)
    model = Transformer(words=32, width=options.width, layers=2, length=16)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if options.engine == "gradlane":
        session = gradlane.init()  # 3
        session.prepare(model, optimizer)  # 4: gradlane averages between the nodes
    draws = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(options.steps):
        start = torch.randint(0, 32, (8, 1), generator=draws)
        tokens = (start + torch.arange(17)) % 32
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"learned {loss.item():.9g}\n", end="", flush=True)
    if options.engine == "gradlane":
        session.close()  # 5
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
