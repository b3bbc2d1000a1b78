"""An optimizer's state that waits: reading, clearing or copying it acts after the last update.

Copies and pickles of it are plain dictionaries.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch.optim import Optimizer


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

    def __getitem__(self, key: Any) -> Any:
        """Return one parameter's state once it has its update."""
        self._wait()
        return self.plain[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        """Replace one parameter's state once it has its update."""
        self._wait()
        self.plain[key] = value

    def __delitem__(self, key: Any) -> None:
        """Drop one parameter's state once it has its update."""
        self._wait()
        del self.plain[key]

    def __iter__(self) -> Iterator[Any]:
        """Go through the parameters that have a state once all have their update."""
        self._wait()
        return iter(self.plain)

    def __len__(self) -> int:
        """Return how many parameters have a state once all have their update."""
        self._wait()
        return len(self.plain)

    def __contains__(self, key: object) -> bool:
        """Return whether a parameter has a state once all have their update; makes none."""
        self._wait()
        return key in self.plain

    def __repr__(self) -> str:
        """Show the state once all parameters have their update."""
        self._wait()
        return repr(self.plain)

    def copy(self) -> Any:
        """Return a plain copy."""
        self._wait()
        return copy.copy(self.plain)

    def __copy__(self) -> Any:
        """Return a plain copy."""
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a plain deep copy."""
        self._wait()
        return copy.deepcopy(self.plain, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the plain mapping."""
        self._wait()
        return self.plain.__reduce_ex__(protocol)


def guard_state(optimizer: Optimizer, wait: Callable[[], None]) -> None:
    """Have an optimizer's state wait; done again where the program has replaced it."""
    if not isinstance(optimizer.state, LazyState):
        optimizer.state = LazyState(optimizer.state, wait)  # type: ignore[assignment]


def plain_state(optimizer: Optimizer) -> MutableMapping[Any, Any]:
    """Return an optimizer's own mapping, past the guard."""
    state: MutableMapping[Any, Any] = optimizer.state
    return state.plain if isinstance(state, LazyState) else state


def release_state(optimizer: Optimizer) -> None:
    """Give an optimizer its plain state again."""
    optimizer.state = plain_state(optimizer)  # type: ignore[assignment]
