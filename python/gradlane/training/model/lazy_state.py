"""An optimizer's state that waits: reading, clearing or copying it acts after the last update.

Copies and pickles of it are plain dictionaries.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from typing import Any

from torch.optim import Optimizer


def _after_waiting(name: str) -> Any:
    """Return a method that waits, and then calls the plain mapping's own of that name."""

    def method(self: LazyState, *arguments: Any, **options: Any) -> Any:
        self._wait()
        return getattr(self.plain, name)(*arguments, **options)

    method.__name__ = name
    return method


class LazyState(MutableMapping[Any, Any]):
    """Stands in for `Optimizer.state`."""

    def __init__(self, plain: MutableMapping[Any, Any], wait: Callable[[], None]) -> None:
        """Guard a state.

        Args:
            plain: the optimizer's own mapping, which goes on being written by its steps.
            wait: called before every access; may raise.
        """
        self.plain = plain
        self._wait = wait

    __getitem__ = _after_waiting("__getitem__")
    __setitem__ = _after_waiting("__setitem__")
    __delitem__ = _after_waiting("__delitem__")
    __iter__ = _after_waiting("__iter__")
    __reversed__ = _after_waiting("__reversed__")
    __len__ = _after_waiting("__len__")
    __contains__ = _after_waiting("__contains__")
    __eq__ = _after_waiting("__eq__")
    __or__ = _after_waiting("__or__")
    __ror__ = _after_waiting("__ror__")
    __repr__ = _after_waiting("__repr__")
    __reduce_ex__ = _after_waiting("__reduce_ex__")
    __copy__ = _after_waiting("__copy__")
    copy = _after_waiting("copy")
    # A mapping's own would make an empty state where there is none.
    get = _after_waiting("get")
    pop = _after_waiting("pop")
    popitem = _after_waiting("popitem")
    setdefault = _after_waiting("setdefault")
    update = _after_waiting("update")
    clear = _after_waiting("clear")
    keys = _after_waiting("keys")
    values = _after_waiting("values")
    items = _after_waiting("items")
    __hash__ = None  # type: ignore[assignment]

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        """Merge another mapping into the state once it has its update."""
        self.update(other)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a plain deep copy."""
        self._wait()
        return copy.deepcopy(self.plain, memo)

    def __getattr__(self, name: str) -> Any:
        """Return anything else that the plain mapping has, such as `default_factory`."""
        if name.startswith("__") or name == "plain":
            raise AttributeError(name)
        self._wait()
        return getattr(self.plain, name)


def install_lazy_state(optimizer: Optimizer, wait: Callable[[], None]) -> None:
    """Have an optimizer's state wait; done again where the program has replaced it."""
    if not isinstance(optimizer.state, LazyState):
        optimizer.state = LazyState(optimizer.state, wait)  # type: ignore[assignment]


def plain_state(optimizer: Optimizer) -> MutableMapping[Any, Any]:
    """Return an optimizer's own mapping, past the guard."""
    state: MutableMapping[Any, Any] = optimizer.state
    return state.plain if isinstance(state, LazyState) else state


def remove_lazy_state(optimizer: Optimizer) -> None:
    """Give an optimizer its plain state again."""
    optimizer.state = plain_state(optimizer)  # type: ignore[assignment]
