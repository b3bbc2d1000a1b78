"""The mean over the ranks of one node, added up in the order of local ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

Memory = tuple[int, int]
"""An address and a length in bytes."""

_NUMPY = {"f32": np.dtype(np.float32), "f64": np.dtype(np.float64)}
_HALVES = {"f16": torch.float16, "bf16": torch.bfloat16}


def local_mean(dtype: str, present: Sequence[Memory], ranks: int, out: Memory) -> None:
    """Write `((g0 + g1) + ...) / ranks` of the present gradients; absent ones count as zeros.

    f32 and f64 are added in their own precision, halves in f32 and rounded once at the end.

    Args:
        dtype: as the core names it.
        present: memory of the ranks with a gradient, by local rank; at least one.
        ranks: ranks of the node.
        out: memory for the mean; none of `present`.
    """
    if dtype in _NUMPY:
        target, *gradients = (_raw(one).view(_NUMPY[dtype]) for one in (out, *present))
        if len(gradients) == 1:
            np.divide(gradients[0], target.dtype.type(ranks), out=target)
            return
        np.add(gradients[0], gradients[1], out=target)
        for gradient in gradients[2:]:
            np.add(target, gradient, out=target)
        np.divide(target, target.dtype.type(ranks), out=target)
        return
    halves = [torch.from_numpy(_raw(one)).view(_HALVES[dtype]) for one in (out, *present)]
    total = halves[1].float()
    for half in halves[2:]:
        total.add_(half)
    halves[0].copy_(total.div_(ranks))


def copy(source: int, target: int, nbytes: int) -> None:
    """Copy bytes from one address to another, without holding the interpreter's lock."""
    ctypes.memmove(target, source, nbytes)


def read_bytes(pointer: int, nbytes: int) -> bytes:
    """Return a copy of the bytes at an address."""
    return ctypes.string_at(pointer, nbytes)


def _raw(memory: Memory) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return memory as bytes; the caller keeps it alive."""
    pointer, nbytes = memory
    return np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(pointer)), np.uint8)
