"""What tests must know of older torches: which one is here, and what it calls differently."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed.checkpoint as dcp


def parse_release(text: str) -> tuple[int, int]:
    """Return a release as two numbers: `2.4.0+cu121` is (2, 4)."""
    major, minor, *_ = text.split(".")
    return int(major), int(minor)


def torch_release() -> tuple[int, int]:
    """Return the release of the installed torch."""
    return parse_release(torch.__version__)


NO_DIST: dict[str, Any] = (
    {"no_dist": True} if "no_dist" in inspect.signature(dcp.save).parameters else {}
)
"""How torch.distributed.checkpoint is told that there is one process; torch 2.4 sees it itself."""
