"""Shared parts of the examples: a small task, and the hash by which results are compared."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def arguments() -> argparse.Namespace:
    """Read the command line: `--engine gradlane` (the default), or `ddp` to compare with."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=("gradlane", "ddp"), default="gradlane")
    return parser.parse_args()


def build_model() -> nn.Module:
    """Return a small classifier, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 3))


def build_data(count: int = 64) -> TensorDataset:
    """Return random points and the third of the plane that each of them is in."""
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(count, 8, generator=generator)
    return TensorDataset(points, points[:, :3].argmax(1))


def digest(tensors: list[Tensor]) -> str:
    """Return a hash of the bits of some tensors, and their norm with five digits."""
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    norm = torch.cat([tensor.detach().double().flatten() for tensor in tensors]).norm()
    return f"{state.hexdigest()[:16]} {norm:.5g}"


def leave(engine: str) -> None:
    """End a rank; with DDP, past the end of the interpreter.

    DistributedDataParallel keeps Gloo's threads alive after `destroy_process_group()` (seen with
    torch 2.15). Such a thread may want the interpreter while that ends, and then aborts the
    program. Without DDP nothing of the kind is left, and the program ends as usual.
    """
    if engine == "ddp":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
