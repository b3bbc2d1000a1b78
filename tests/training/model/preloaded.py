"""What a process loads before ranks are forked from it: torch alone takes seconds, for each rank.

Torch's compiler is loaded by the first step of any optimizer, so it is part of it.
"""

from __future__ import annotations

import gc

import torch._dynamo
import torch.nn.parallel

from tests.training.model import scenarios

__all__ = ["scenarios", "torch"]

# Ranks that collect garbage pass over what is loaded here.
gc.freeze()
