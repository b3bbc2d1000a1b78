"""Tensors in the inputs and outputs of models: tuples, dictionaries, data classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(nested: Any) -> Iterator[Tensor]:
    """Yield all tensors of nested containers, in order; other objects hold none."""
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, Mapping):
        for value in nested.values():
            yield from tensors_in(value)
    elif isinstance(nested, list | tuple):
        for value in nested:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(nested) and not isinstance(nested, type):
        for field in dataclasses.fields(nested):
            yield from tensors_in(getattr(nested, field.name))


def with_tensors(nested: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return tuples, lists and dictionaries with their tensors changed; other objects unchanged."""
    if isinstance(nested, Tensor):
        return change(nested)
    if type(nested) is dict:
        return {key: with_tensors(value, change) for key, value in nested.items()}
    if type(nested) in (list, tuple):
        return type(nested)(with_tensors(value, change) for value in nested)
    return nested


def samples_in(batch: Any) -> int | None:
    """Return the first dimension of the first tensor that has one; None where there is none."""
    return next((int(tensor.shape[0]) for tensor in tensors_in(batch) if tensor.ndim), None)
