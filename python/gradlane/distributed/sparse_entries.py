"""The entries of a sparse tensor, as they travel to be added up on every rank."""

from __future__ import annotations

import torch
from torch.distributed import DistBackendError

_REDUCTIONS = ("sum", "mean")


class SparseEntries:
    """One rank's part of a sum of sparse tensors: indices, values, and how many there are.

    Every rank gets the entries of all ranks and adds them up, as Gloo does.

    Args:
        tensor: of layout `sparse_coo` on the CPU; it is given the result.
        ranks: of the group.
        reduction: `"sum"` or `"mean"`.

    Attributes:
        shape: int64 of [dimensions that indices have, entries, sizes of all dimensions].
        indices: int64 of [dimensions, entries].
        values: of [entries, sizes of the dense dimensions].

    Raises:
        ValueError: another reduction, a mean of integers, or the tensor is not on the CPU.
    """

    def __init__(self, tensor: torch.Tensor, ranks: int, reduction: str) -> None:
        if reduction not in _REDUCTIONS:
            raise ValueError(f"all_reduce of a sparse tensor is its sum or mean, not {reduction}")
        if reduction == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(f"all_reduce of a sparse tensor: there is no mean of {tensor.dtype}")
        if not tensor.is_cpu:
            raise ValueError(f"all_reduce of a sparse tensor on {tensor.device}: give a CPU tensor")
        self._tensor, self._ranks, self._reduction = tensor, ranks, reduction
        own = tensor.detach().coalesce()
        self.indices, self.values = own.indices().contiguous(), own.values().contiguous()
        sizes = [own.sparse_dim(), own.indices().shape[1], *own.shape]
        self.shape = torch.tensor(sizes, dtype=torch.int64, device="cpu")

    def places(self, shapes: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return room for the indices and the values of each rank.

        Args:
            shapes: of every rank, in order.

        Raises:
            DistBackendError: a rank's tensor has another shape.
        """
        for rank, shape in enumerate(shapes):
            if shape[0] != self.shape[0] or not torch.equal(shape[2:], self.shape[2:]):
                raise DistBackendError(
                    f"all_reduce of a sparse tensor of {self.shape[2:].tolist()} with indices of "
                    f"{int(self.shape[0])} dimensions: rank {rank} has {shape[2:].tolist()} with "
                    f"{int(shape[0])}"
                )
        counts = [int(shape[1]) for shape in shapes]
        sizes = self.values.shape[1:]
        return (
            [self.indices.new_empty(self.indices.shape[0], count) for count in counts],
            [self.values.new_empty(count, *sizes) for count in counts],
        )

    def add(self, indices: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        """Put the sum or mean of all ranks' entries into the tensor."""
        with torch.no_grad():
            # Indices are other processes' bytes.
            total = torch.sparse_coo_tensor(
                torch.cat(indices, 1),
                torch.cat(values),
                self._tensor.shape,
                dtype=self._tensor.dtype,
                device="cpu",
                check_invariants=True,
            ).coalesce()
            if self._reduction == "mean":
                total = total / self._ranks
            self._tensor.copy_(total)
