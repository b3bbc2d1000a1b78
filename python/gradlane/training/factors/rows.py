"""Which parameters have sparse gradients, and how these travel: as the rows that were touched.

Every rank sends the numbers and values of its rows to every other one, and all of them add up the
same rows in rank order. Torch says beforehand which gradients are sparse: those of embeddings with
`sparse=True`, and of whatever `SparseAdam` steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradlane.errors import RefusedError
from gradlane.training.core import BLOCK_MOST_BYTES
from gradlane.training.factors.block import Part, TouchedRows, can_travel, most_rows_bytes
from gradlane.training.factors.factored_weights import Factored
from gradlane.training.factors.rebuild import mean_of_rows, sparse_of
from gradlane.training.log import log
from gradlane.training.options.compatibility import Feature, conflict
from gradlane.training.options.options import Options
from gradlane.training.options.strategy import ROWS
from gradlane.training.rendezvous.tensor_table import TensorEntry, names_of


@dataclass(frozen=True)
class RowSparse(Factored):
    """A parameter whose sparse gradient travels as rows.

    Attributes:
        keeps_sparse: whether the mean is sparse; otherwise it is dense, for optimizers that take
            no other.
        is_needed: whether the optimizer takes nothing else than a sparse mean.
    """

    layers: tuple[nn.Module, ...] = ()
    scheme: str = ROWS
    keeps_sparse: bool = True
    is_needed: bool = False
    parts: ClassVar[str] = "rows"

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest block: that of all rows, as far as blocks go."""
        return min(most_rows_bytes(self.entry.shape, self.entry.dtype), BLOCK_MOST_BYTES)

    def no_rows(self) -> Tensor:
        """Return a sparse gradient without a row."""
        shape, dtype = self.entry.shape, self.entry.dtype
        with torch.inference_mode(False):
            numbers = torch.empty(0, dtype=torch.int64, device="cpu")
            values = torch.empty((0, *shape[1:]), dtype=dtype, device="cpu")
            return sparse_of(TouchedRows(numbers, values), self.entry)

    def mean(
        self,
        contributions: Sequence[Sequence[Part]],
        divisor: int,
        memory: Callable[[], Tensor],
    ) -> Tensor:
        """Return the mean of all ranks' gradients: dense if that of some rank is, as in torch."""
        rows = [part for parts in contributions for part in parts if isinstance(part, TouchedRows)]
        if self.keeps_sparse and len(rows) == sum(map(len, contributions)):
            return mean_of_rows(rows, divisor, self.entry)
        return super().mean(contributions, divisor, memory)


def choose_row_sparse(
    model: nn.Module,
    trained: Sequence[TensorEntry],
    options: Options,
    *,
    rank: int,
    needing_sparse: Collection[int],
    takes_sparse: Callable[[Tensor], bool],
) -> dict[int, RowSparse]:
    """Choose the parameters whose gradients travel as rows.

    Args:
        model: the user's.
        trained: table entries of its trained parameters.
        options: in force for the model.
        rank: this rank; rank 0 says which gradients are made dense, and why.
        needing_sparse: `id` of each parameter whose optimizer takes sparse gradients alone.
        takes_sparse: whether a parameter's optimizer takes sparse gradients.

    Returns:
        By tensor number.

    Raises:
        ValueError: the optimizer takes sparse gradients alone, and they cannot travel; the message
            names the parameter and the reason.
    """
    found = conflict({Feature.ROWS: "rows"}, options.features)
    refusal = "" if found is None else found.why
    by_embeddings = sparse_weights(model)
    chosen = {}
    dense = []
    for index, entry in enumerate(trained):
        is_needed = id(entry.tensor) in needing_sparse
        if not (is_needed or id(entry.tensor) in by_embeddings):
            continue
        why = refusal
        if not (can_travel(entry.dtype) and entry.shape):
            why = why or f"{entry.dtype} of shape {tuple(entry.shape)} has no rows that travel"
        dense += [entry] if why else []
        if not why:
            chosen[index] = RowSparse(
                entry, keeps_sparse=takes_sparse(entry.tensor), is_needed=is_needed
            )
        elif is_needed:
            raise RefusedError(
                f"the optimizer of {entry.name!r} takes sparse gradients alone, and their mean is "
                f"made dense: {why}"
            )
    if dense and rank == 0:
        log.info(
            "the sparse gradients of %s are made dense before they travel: %s",
            names_of(dense),
            refusal or "their rows have no dtype or dimension that travels",
        )
    return chosen


def sparse_weights(model: nn.Module) -> set[int]:
    """Return the `id` of each weight that no modules but embeddings with sparse gradients use."""
    uses: dict[int, bool] = {}
    for module in model.modules():
        is_sparse = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        for name, parameter in module.named_parameters(recurse=False):
            own = is_sparse and name == "weight"
            uses[id(parameter)] = uses.get(id(parameter), True) and own
    return {identity for identity, is_sparse in uses.items() if is_sparse}
