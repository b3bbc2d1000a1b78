"""The norm of gradients, from exact sums of squares that are rounded once.

The owners of slices add up the squares of the means that they have made, and tell all ranks one
number each (`engine/src/gradient_norm.rs`): neither plan, slice size nor order of arrival changes a
bit. Means of factors and rows have no owner: each rank adds their squares once all blocks are here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gradlane.training.core import CoreModule, SquareSum
from gradlane.training.torch_internals import values_of_sparse

_CORE_NAMES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
}


def exact_norm(core: CoreModule, gradients: Sequence[Tensor]) -> float:
    """Return the norm of gradients that are here, rounded once at the end.

    Args:
        core: adds up squares.
        gradients: of any shapes and layouts; sparse ones count as dense ones.
    """
    squares = core.SquareSum()
    for gradient in gradients:
        add_squares(squares, gradient)
    return squares.root()


def add_squares(squares: SquareSum, gradient: Tensor) -> None:
    """Add the squares of a gradient of any shape and layout, exactly."""
    dense = gradient.detach()
    if dense.layout is torch.sparse_coo:
        dense = values_of_sparse(dense.coalesce())
    elif dense.layout is not torch.strided:
        dense = dense.to_dense()
    if dense.is_complex():
        dense = torch.view_as_real(dense.resolve_conj())
    dense = dense.cpu().contiguous()
    squares.add(_CORE_NAMES[dense.dtype], dense.data_ptr(), dense.nbytes)


def norm_dtype(gradients: Iterable[torch.dtype]) -> torch.dtype:
    """Return the dtype of a norm: f64 if a gradient has it, and f32 otherwise."""
    wide = {torch.float64, torch.complex128}
    return torch.float64 if wide & set(gradients) else torch.float32
