"""Sums of gradients from factors: the same bits on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradlane.training.factors.block import Dense, LinearFactors, Part, TouchedRows


def rebuild(contributions: Sequence[Sequence[Part]], divisor: int, out: Tensor) -> None:
    """Write the mean of all ranks' gradients.

    The factors of all ranks are put below one another in rank order and multiplied once; whole
    gradients and rows are added after that, in rank order. f16 and bf16 are added up in f32 and
    rounded once. Every rank that calls this with the same contributions gets the same bits, if
    their matrix products agree: the same build of torch, processors and number of threads.

    Args:
        contributions: the parts of each rank, in rank order; none is no gradient.
        divisor: number of ranks that the mean is over.
        out: of the parameter's shape and dtype; overwritten.
    """
    parts = [part for contribution in contributions for part in contribution]
    exact = torch.float64 if out.dtype == torch.float64 else torch.float32
    factors = [part for part in parts if isinstance(part, LinearFactors)]
    total = out if out.dtype == exact else torch.empty_like(out, dtype=exact)
    with torch.no_grad():
        if factors:
            inputs = torch.cat([part.inputs.to(out.device, exact) for part in factors])
            output_gradients = torch.cat(
                [part.output_gradients.to(out.device, exact) for part in factors]
            )
            if total.is_contiguous():
                torch.mm(output_gradients.t(), inputs, out=total)
            else:
                total.copy_(output_gradients.t() @ inputs)
        else:
            total.zero_()
        for part in parts:
            if isinstance(part, Dense):
                total.add_(part.values.to(out.device))
            elif isinstance(part, TouchedRows):
                rows = part.values.to(out.device, exact)
                total.index_add_(0, part.indices.to(out.device), rows)
        total.div_(divisor)
        if total is not out:
            out.copy_(total)
