"""Whether this torch has the FSDP2 that sharded models are tested with."""

from __future__ import annotations

import pytest
import torch

needs_fsdp2 = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15),
    reason="sharded models need torch 2.15",
)
