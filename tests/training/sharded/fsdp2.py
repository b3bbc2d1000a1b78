"""Whether this torch has the FSDP2 that sharded models are tested with."""

from __future__ import annotations

import pytest
import torch

FSDP_MODULES = (
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.utils.checkpoint",
)
"""Modules of torch that all programs of sharded models have."""
needs_fsdp2 = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15),
    reason="sharded models need torch 2.15",
)
