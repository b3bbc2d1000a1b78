"""Counts of the vectors that linear layers are applied to in a step, and of the rows that sparse
embeddings look up.

Factors of a linear layer's gradient have that many rows: samples, times words or patches if a layer
is applied to each. A sparse gradient has the rows that were looked up, each once; where a weight is
used several times in a step, the counts of the calls add up. Only calls with a backward count.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor, nn

from gradlane.training.modules.compiled import is_tracing
from gradlane.training.torch_internals import graph_task_id, parameters_of


class RowCounts:
    """The rows of each weight in the current step, and in the last one that had any."""

    def __init__(self) -> None:
        self._in_step: dict[int, int] = {}
        self._last: dict[int, int] = {}

    def begin(self) -> None:
        """Begin a step."""
        self._in_step = {}

    def end(self) -> None:
        """End the step."""
        if self._in_step:
            self._last = self._in_step

    def rows_of(self, module: nn.Module, parameter: Tensor) -> int | None:
        """Return the rows of a module's weight; None if the layer was not called."""
        # A layer that replays another one says so.
        replayed: int | None = getattr(module, "factor_rows", None)
        return self._last.get(id(parameter)) if replayed is None else replayed

    def add(self, weight: Tensor, rows: int) -> None:
        """Add the rows of one call of the layer with this weight."""
        self._in_step[id(weight)] = self._in_step.get(id(weight), 0) + rows


class RowCountHook:
    """Forward hook of a linear layer or a sparse embedding that counts rows."""

    __slots__ = ("_counts",)

    def __init__(self, counts: RowCounts) -> None:
        """Add to the given counts."""
        self._counts = counts

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Count the rows of the layer's input."""
        if is_tracing() or graph_task_id() != -1 or not torch.is_grad_enabled():
            return
        # A prepared model's own mapping would wait for the weight.
        weight = dict.get(parameters_of(module), "weight")
        if weight is None or not arguments or not isinstance(arguments[0], Tensor):
            return
        inputs = arguments[0]
        if isinstance(module, nn.Linear):
            rows = inputs.numel() // max(1, inputs.shape[-1])
        else:
            rows = torch.unique(inputs).numel()
        self._counts.add(weight, rows)

    def __reduce__(self) -> Any:
        """Return a hook that does nothing: copies of the model are not recorded."""
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _no_op


def _no_op(*_: Any) -> None:
    pass


def has_rows(module: nn.Module, sparse: Container[int]) -> bool:
    """Return whether a module's weight gradient has rows that can be counted.

    Args:
        module: of the model.
        sparse: `id` of each weight whose gradient is sparse.
    """
    weight = dict.get(parameters_of(module), "weight")
    return isinstance(module, nn.Linear) or id(weight) in sparse
