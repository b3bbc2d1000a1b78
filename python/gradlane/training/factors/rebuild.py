"""Sums of gradients from factors and rows: the same bits on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradlane.training.factors.block import Dense, LinearFactors, Part, TouchedRows
from gradlane.training.rendezvous.tensor_table import TensorEntry


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
    exact = _exact(out.dtype)
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


def mean_of_rows(rows: Sequence[TouchedRows], divisor: int, entry: TensorEntry) -> Tensor:
    """Return the mean of sparse gradients: coalesced COO, with the rows that some rank has.

    Each row has the bits of the mean of dense gradients: a sum in rank order, divided once; f16 and
    bf16 are added up in f32 and rounded once.

    Args:
        rows: those of the ranks that have a gradient, in rank order; at least one.
        divisor: number of ranks that the mean is over.
        entry: of the parameter.
    """
    exact = _exact(entry.dtype)
    with torch.no_grad(), torch.inference_mode(False):
        numbers = torch.unique(torch.cat([part.indices for part in rows]))
        total = torch.zeros((numbers.shape[0], *entry.shape[1:]), dtype=exact, device=entry.device)
        for part in rows:
            places = torch.searchsorted(numbers, part.indices).to(entry.device)
            total.index_add_(0, places, part.values.to(entry.device, exact))
        return sparse_of(TouchedRows(numbers, total.div_(divisor).to(entry.dtype)), entry)


def sparse_of(rows: TouchedRows, entry: TensorEntry) -> Tensor:
    """Return rows of a parameter as a coalesced COO tensor on its device."""
    return torch.sparse_coo_tensor(
        rows.indices.unsqueeze(0).to(entry.device),
        rows.values.to(entry.device),
        entry.shape,
        dtype=entry.dtype,
        device=entry.device,
        check_invariants=False,
        is_coalesced=True,
    )


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums are taken in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
