"""What tests must know of older torches: which one is here, and what it calls differently."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch

# Torch exports its functions in a way that type checkers do not see.
_CHECKPOINTS: Any = importlib.import_module("torch.distributed.checkpoint")


def parse_release(text: str) -> tuple[int, int]:
    """Return a release as two numbers: `2.4.0+cu121` is (2, 4)."""
    major, minor, *_ = text.split(".")
    return int(major), int(minor)


def torch_release() -> tuple[int, int]:
    """Return the release of the installed torch."""
    return parse_release(torch.__version__)


NO_DIST: dict[str, Any] = (
    {"no_dist": True} if "no_dist" in inspect.signature(_CHECKPOINTS.save).parameters else {}
)
"""How torch.distributed.checkpoint is told that there is one process; torch 2.4 sees it itself."""
in_threads = pytest.mark.skipif(
    torch_release() in ((2, 7), (2, 11)),
    reason="torch 2.7 and 2.11 cannot compile in two threads at once",
)
"""Of tests whose ranks are threads that compile. Torch 2.11 crashes at times, in the guard of CUDA
devices that it puts in for the whole process where there is none."""
