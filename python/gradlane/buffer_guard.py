"""A module's buffer mapping that waits, where buffers are kept alike on all ranks.

Between `optimizer.step()` and the next forward the ranks' common values may still be on their way;
reading a buffer then waits for them. Copies and pickles of the mapping are plain dictionaries.
"""

from __future__ import annotations

import copy
from collections.abc import ItemsView, Iterator, ValuesView
from typing import Any

from torch import Tensor, nn

from gradlane.steps import Steps

Buffer = Tensor | None


class GuardedBuffers(dict[str, Buffer]):
    """Stands in for `Module._buffers` of one module."""

    __slots__ = ("_steps",)

    def __init__(self, buffers: dict[str, Buffer], steps: Steps) -> None:
        """Guard a module's buffers.

        Args:
            buffers: what the mapping starts with.
            steps: knows what is under way.
        """
        super().__init__(buffers)
        self._steps = steps

    def _wait(self) -> None:
        if self._steps.reads_wait:
            self._steps.before_buffers()

    def __getitem__(self, name: str) -> Buffer:
        """Return a buffer once it is the one that all ranks have."""
        self._wait()
        return dict.__getitem__(self, name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a buffer once it is the one that all ranks have, or the default."""
        return self[name] if name in self else default  # noqa: SIM401

    def items(self) -> ItemsView[str, Buffer]:  # type: ignore[override]
        """List names and buffers once they are those that all ranks have."""
        self._wait()
        return dict.items(self)

    def values(self) -> ValuesView[Buffer]:  # type: ignore[override]
        """List buffers once they are those that all ranks have."""
        self._wait()
        return dict.values(self)

    def __iter__(self) -> Iterator[str]:
        """List names. Being overridden, it makes `dict(self)` read through `__getitem__`."""
        return dict.__iter__(self)

    def copy(self) -> dict[str, Buffer]:
        """Return a plain dictionary with the buffers once they are right."""
        self._wait()
        return dict(dict.items(self))

    def __copy__(self) -> dict[str, Buffer]:
        """Return a plain dictionary."""
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Buffer]:
        """Return a plain dictionary with copies of the buffers."""
        return copy.deepcopy(self.copy(), memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle as a plain dictionary."""
        return dict, (self.copy(),)


def guard_buffers(module: nn.Module, steps: Steps) -> None:
    """Replace a module's buffer mapping by a waiting one."""
    module.__dict__["_buffers"] = GuardedBuffers(module._buffers, steps)


def release_buffers(module: nn.Module) -> None:
    """Give a module a plain buffer mapping again."""
    guarded = module.__dict__.get("_buffers")
    if isinstance(guarded, GuardedBuffers):
        module.__dict__["_buffers"] = dict(dict.items(guarded))
