"""Counts to how many vectors each linear layer is applied in a step: the rows of its factors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from gradlane.compiled import is_tracing
from gradlane.profiler.tape import Tape


class RowCount:
    """Rows of the inputs of all linear layers of a model, by the `id` of their weight."""

    def __init__(self, tape: Tape) -> None:
        """Count while a tape runs."""
        self._tape = tape
        self._now: dict[int, int] = {}
        self._seen: dict[int, int] = {}

    def attach(self, modules: Iterable[nn.Module]) -> list[Any]:
        """Hang hooks onto the layers; returns their handles."""
        hook = _RowHook(self)
        return [
            nn.Module.register_forward_pre_hook(module, hook)
            for module in modules
            if isinstance(module, nn.Linear)
        ]

    def begin(self) -> None:
        """Begin a step."""
        self._now.clear()

    def end(self) -> None:
        """End a step: the largest number of rows is kept."""
        for key, rows in self._now.items():
            self._seen[key] = max(rows, self._seen.get(key, 0))

    def of(self, module: nn.Module, weight: torch.Tensor) -> int | None:
        """Return the rows of a layer in a step; None where it has none, or none were seen."""
        # A layer that replays another one says so.
        replayed: int | None = getattr(module, "factor_rows", None)
        return replayed if replayed is not None else self._seen.get(id(weight))

    def note(self, module: nn.Module, arguments: Any) -> None:
        """Count the rows of one call; those of a forward inside backward are there already."""
        if not self._tape.runs or is_tracing() or not torch.is_grad_enabled():
            return
        if torch._C._current_graph_task_id() != -1 or not arguments:
            return
        inputs = arguments[0]
        if isinstance(inputs, torch.Tensor) and inputs.dim() and inputs.shape[-1]:
            parameters: Any = module._parameters
            key = id(dict.get(parameters, "weight"))
            self._now[key] = self._now.get(key, 0) + inputs.numel() // inputs.shape[-1]


class _RowHook:
    """The hook of all layers; copies and pickles of the model carry one that does nothing."""

    def __init__(self, count: RowCount) -> None:
        self._count = count

    def __call__(self, module: nn.Module, arguments: Any) -> None:
        self._count.note(module, arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> Any:
        return _no_hook, ()


def _nothing(*_: Any) -> None:
    """The hook of a copy."""


def _no_hook() -> Callable[..., None]:
    return _nothing
