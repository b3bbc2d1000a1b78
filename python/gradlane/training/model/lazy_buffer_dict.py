"""A module's buffer mapping that waits, where buffers are kept alike on all ranks.

Between `optimizer.step()` and the next forward the ranks' common values may still be on their way;
reading a buffer, or putting another in its place, then waits for them. Copies and pickles of the
mapping are plain dictionaries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from gradlane.training.model.kernel.gate import Gate
from gradlane.training.model.kernel.phases import Phases
from gradlane.training.model.lazy_dict import LazyDict
from gradlane.training.model.training_steps import TrainingSteps
from gradlane.training.torch_internals import BUFFERS, buffers_of

Buffer = Tensor | None


class LazyBufferDict(LazyDict[Buffer]):
    """Stands in for `Module._buffers` of one module."""

    __slots__ = ("_gate", "_own", "_phases")

    def __init__(self, buffers: Mapping[str, Buffer], phases: Phases, gate: Gate) -> None:
        """Guard a module's buffers.

        Args:
            buffers: the module's own mapping.
            phases: of the model's steps.
            gate: waits.
        """
        # A scripted module's own mapping is none of Python's.
        super().__init__(buffers.items())
        self._own = buffers
        self._phases, self._gate = phases, gate

    def _before_list(self) -> None:
        if self._phases.reads_wait:
            self._gate.before_buffers()

    def __getitem__(self, name: str) -> Buffer:
        """Return a buffer once it is the one that all ranks have."""
        self._before_list()
        return dict.__getitem__(self, name)

    def __setitem__(self, name: str, buffer: Buffer) -> None:
        """Put a buffer there; what all ranks have agreed on is not written over it later."""
        self._before_list()
        dict.__setitem__(self, name, buffer)

    def __delitem__(self, name: str) -> None:
        """Take a buffer out once nothing is to be written into it any more."""
        self._before_list()
        dict.__delitem__(self, name)

    def update(self, *others: Any, **named: Any) -> None:
        """Put several buffers there."""
        self._before_list()
        dict.update(self, *others, **named)

    def __ior__(self, others: Any) -> LazyBufferDict:  # type: ignore[override]
        """Put several buffers there."""
        self.update(others)
        return self

    def clear(self) -> None:
        """Take all buffers out once nothing is to be written into them any more."""
        self._before_list()
        dict.clear(self)

    def plain(self) -> Mapping[str, Buffer]:
        """Return a mapping that does not wait: a scripted module's own, else a dictionary."""
        return dict(dict.items(self)) if isinstance(self._own, dict) else self._own


def install_lazy_buffers(module: nn.Module, steps: TrainingSteps) -> None:
    """Replace a module's buffer mapping by a waiting one."""
    module.__dict__[BUFFERS] = LazyBufferDict(buffers_of(module), steps.phases, steps.gate)


def remove_lazy_buffers(module: nn.Module) -> None:
    """Give a module a plain buffer mapping again."""
    guarded = module.__dict__.get(BUFFERS)
    if isinstance(guarded, LazyBufferDict):
        module.__dict__[BUFFERS] = guarded.plain()
