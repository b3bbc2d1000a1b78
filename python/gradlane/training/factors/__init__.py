"""Sufficient factors: what the gradient of a layer is a product of, sent in its place.

The gradient of a fully connected layer is the product of its output gradients and its inputs; for a
batch of K rows, K (M + N) numbers say what M N numbers say. Every rank sends its factors to every
other one, and all of them rebuild the same sum (Xing et al. 2016; Poseidon, Zhang et al. 2017,
section 3). An embedding's gradient is the rows that were looked up.
"""

from gradlane.training.factors.block import (
    BlockError,
    Dense,
    LinearFactors,
    Part,
    TouchedRows,
    pack,
    unpack,
)
from gradlane.training.factors.capture import FactorHook, can_factor, install, remove
from gradlane.training.factors.rebuild import rebuild

__all__ = [
    "BlockError",
    "Dense",
    "FactorHook",
    "LinearFactors",
    "Part",
    "TouchedRows",
    "can_factor",
    "install",
    "pack",
    "rebuild",
    "remove",
    "unpack",
]
