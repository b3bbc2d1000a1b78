"""The flags of all modules of a model, for compiled code."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from gradlane.training.modules.compiled import StaleFlag


class StaleFlags:
    """Has compiled code of a model wait, or raise, before it uses any parameter again."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Make a flag for each module."""
        self._flags = {module: StaleFlag() for module in modules}

    def of(self, module: nn.Module) -> StaleFlag:
        """Return the flag of a module."""
        return self._flags[module]

    def mark(self) -> None:
        """Put all flags up."""
        for flag in self._flags.values():
            flag.stale = True
