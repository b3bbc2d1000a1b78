"""A module's mapping of tensors that waits before it is read: for parameters and buffers.

Copies and pickles of it are plain dictionaries.
"""

from __future__ import annotations

import copy
from collections.abc import ItemsView, Iterator, ValuesView
from typing import Any, TypeVar

from torch import Tensor

Value = TypeVar("Value", bound=Tensor | None)


class LazyDict(dict[str, Value]):
    """Stands in for one of the mappings of a module, such as `Module._parameters`."""

    __slots__ = ()

    def _before_list(self) -> None:
        """Wait until all values are right; there is nothing to wait for by itself."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return a tensor once it is right, or the default."""
        return self[name] if name in self else default  # noqa: SIM401

    def pop(self, name: str, *default: Any) -> Any:
        """Take a tensor out once it is right."""
        if name in self:
            self[name]
        return dict.pop(self, name, *default)

    def popitem(self) -> tuple[str, Value]:
        """Take the last tensor out once it is right."""
        self._before_list()
        return dict.popitem(self)

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Return a tensor once it is right, or put the default there."""
        return self[name] if name in self else dict.setdefault(self, name, default)

    def items(self) -> ItemsView[str, Value]:  # type: ignore[override]
        """List names and tensors once they are right."""
        self._before_list()
        return dict.items(self)

    def values(self) -> ValuesView[Value]:  # type: ignore[override]
        """List tensors once they are right."""
        self._before_list()
        return dict.values(self)

    def __iter__(self) -> Iterator[str]:
        """List names. Being overridden, it makes `dict(self)` read through `__getitem__`."""
        return dict.__iter__(self)

    def copy(self) -> dict[str, Value]:
        """Return a plain dictionary with the tensors once they are right."""
        self._before_list()
        return dict(dict.items(self))

    def __or__(self, other: Any) -> Any:
        """Merge into a plain dictionary."""
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        """Merge into a plain dictionary."""
        return other | self.copy()

    def __copy__(self) -> dict[str, Value]:
        """Return a plain dictionary."""
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Value]:
        """Return a plain dictionary with copies of the tensors."""
        self._before_list()
        return copy.deepcopy(dict(dict.items(self)), memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle as a plain dictionary."""
        self._before_list()
        return dict, (dict(dict.items(self)),)
