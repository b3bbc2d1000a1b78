"""A group's list of parameters that waits: reads through the optimizer are right, too.

`GradScaler`, clipping by `optimizer.param_groups` and logging read parameters there. Copies and
pickles of the list are plain ones.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gradlane.training.model.kernel.phases import Phase
from gradlane.training.model.training_steps import TrainingSteps
from gradlane.training.torch_internals import unscale_code


class LazyParameterList(list[Tensor]):
    """Stands in for `group["params"]` of one group of an optimizer."""

    __slots__ = ("_gate", "_phases", "_scaler")

    def __init__(self, parameters: list[Tensor], steps: TrainingSteps) -> None:
        """Guard a group's parameters.

        Args:
            parameters: the group's own list.
            steps: those of the model.
        """
        super().__init__(parameters)
        self._phases, self._gate, self._scaler = steps.phases, steps.gate, steps.scaler

    def _wait(self) -> None:
        if self._phases.lists_wait:
            self._gate.before_list(list(super().__iter__()))

    def __iter__(self) -> Iterator[Tensor]:
        """Go through the parameters once they are right, or through what `GradScaler` needs."""
        unscales = sys._getframe(1).f_code is _UNSCALES
        if not (unscales and self._scaler.is_open(super().__iter__())):
            self._wait()
            if unscales and self._phases.phase is Phase.ATTACHED:
                self._scaler.see(self)
                unscales = False
        return iter(self._scaler.unscale(self)) if unscales else super().__iter__()

    def __reversed__(self) -> Iterator[Tensor]:
        """Go through them backwards once they are right."""
        self._wait()
        return super().__reversed__()

    def __getitem__(self, position: Any) -> Any:
        """Return some of them once they are right."""
        self._wait()
        return super().__getitem__(position)

    def __add__(self, other: Any) -> Any:
        """Return a plain list."""
        return self.copy() + other

    def __radd__(self, other: Any) -> Any:
        """Return a plain list."""
        return other + self.copy()

    def __mul__(self, count: Any) -> Any:
        """Return a plain list."""
        return self.copy() * count

    def copy(self) -> list[Tensor]:
        """Return a plain list once the parameters are right."""
        self._wait()
        return list(super().__iter__())

    def __copy__(self) -> list[Tensor]:
        """Return a plain list."""
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Tensor]:
        """Return a plain list with copies of the parameters."""
        return copy.deepcopy(self.copy(), memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle as a plain list."""
        return list, (self.copy(),)


_UNSCALES = unscale_code


def plain(parameters: list[Tensor]) -> Iterator[Tensor]:
    """Go through a group's parameters without waiting: their values are not read."""
    return list.__iter__(parameters)


def install_lazy_groups(optimizer: Optimizer, steps: TrainingSteps) -> None:
    """Replace the lists of parameters in an optimizer's groups by waiting ones."""
    for group in optimizer.param_groups:
        if not isinstance(group["params"], LazyParameterList):
            group["params"] = LazyParameterList(group["params"], steps)


def remove_lazy_groups(optimizer: Optimizer) -> None:
    """Give an optimizer's groups plain lists again."""
    for group in optimizer.param_groups:
        if isinstance(group["params"], LazyParameterList):
            group["params"] = list(plain(group["params"]))
