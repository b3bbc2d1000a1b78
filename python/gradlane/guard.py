"""A module's parameter mapping that waits: reading a parameter waits for its update.

Hooks see modules that are called. Parameters are also read without a call: attention reads its
output projection's weights, weight norm and EMA copies read them, `parameters()` and
`state_dict()` list them. All of those go through `Module._parameters`, which this replaces.
Copies and pickles of it are plain dictionaries.
"""

from __future__ import annotations

import copy
from collections.abc import ItemsView, Iterator, ValuesView
from typing import Any

from torch import nn

from gradlane.steps import Steps

Parameter = nn.Parameter | None


class GuardedParameters(dict[str, Parameter]):
    """Stands in for `Module._parameters` of one module."""

    __slots__ = ("_steps",)

    def __init__(self, parameters: dict[str, Parameter], steps: Steps) -> None:
        """Guard a module's parameters.

        Args:
            parameters: what the mapping starts with.
            steps: knows what is under way.
        """
        super().__init__(parameters)
        self._steps = steps

    def __getitem__(self, name: str) -> Parameter:
        """Return a parameter once it has its update."""
        parameter = dict.__getitem__(self, name)
        if self._steps.reads_wait and parameter is not None:
            self._steps.before_read(parameter)
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        """Return a parameter once it has its update, or the default."""
        return self[name] if name in self else default  # noqa: SIM401

    def pop(self, name: str, *default: Any) -> Any:
        """Take a parameter out once it has its update."""
        if name in self:
            self[name]
        return dict.pop(self, name, *default)

    def popitem(self) -> tuple[str, Parameter]:
        """Take the last parameter out once it has its update."""
        self._before_list()
        return dict.popitem(self)

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Return a parameter once it has its update, or put the default there."""
        return self[name] if name in self else dict.setdefault(self, name, default)

    def items(self) -> ItemsView[str, Parameter]:  # type: ignore[override]
        """List names and parameters once they are right."""
        self._before_list()
        return dict.items(self)

    def values(self) -> ValuesView[Parameter]:  # type: ignore[override]
        """List parameters once they are right."""
        self._before_list()
        return dict.values(self)

    def __iter__(self) -> Iterator[str]:
        """List names. Being overridden, it makes `dict(self)` read through `__getitem__`."""
        return dict.__iter__(self)

    def copy(self) -> dict[str, Parameter]:
        """Return a plain dictionary with the parameters once they are right."""
        self._before_list()
        return dict(dict.items(self))

    def __or__(self, other: Any) -> Any:
        """Merge into a plain dictionary."""
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        """Merge into a plain dictionary."""
        return other | self.copy()

    def __copy__(self) -> dict[str, Parameter]:
        """Return a plain dictionary."""
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Parameter]:
        """Return a plain dictionary with copies of the parameters."""
        return copy.deepcopy(self.copy(), memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle as a plain dictionary."""
        return dict, (self.copy(),)

    def _before_list(self) -> None:
        if self._steps.lists_wait:
            self._steps.before_list([*super().values()])


def guard_parameters(module: nn.Module, steps: Steps) -> None:
    """Replace a module's parameter mapping by a waiting one."""
    module.__dict__["_parameters"] = GuardedParameters(module._parameters, steps)


def release_parameters(module: nn.Module) -> None:
    """Give a module a plain parameter mapping again."""
    guarded = module.__dict__["_parameters"]
    if isinstance(guarded, GuardedParameters):
        module.__dict__["_parameters"] = dict(dict.items(guarded))
