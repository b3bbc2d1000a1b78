"""A module's buffer mapping that waits, where buffers are kept alike on all ranks.

Between `optimizer.step()` and the next forward the ranks' common values may still be on their way;
reading a buffer then waits for them. Copies and pickles of the mapping are plain dictionaries.
"""

from __future__ import annotations

from torch import Tensor, nn

from gradlane.adapter.steps import Steps
from gradlane.adapter.waiting_dict import WaitingDict

Buffer = Tensor | None


class GuardedBuffers(WaitingDict[Buffer]):
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

    def _before_list(self) -> None:
        if self._steps.reads_wait:
            self._steps.before_buffers()

    def __getitem__(self, name: str) -> Buffer:
        """Return a buffer once it is the one that all ranks have."""
        self._before_list()
        return dict.__getitem__(self, name)


def guard_buffers(module: nn.Module, steps: Steps) -> None:
    """Replace a module's buffer mapping by a waiting one."""
    module.__dict__["_buffers"] = GuardedBuffers(module._buffers, steps)


def release_buffers(module: nn.Module) -> None:
    """Give a module a plain buffer mapping again."""
    guarded = module.__dict__.get("_buffers")
    if isinstance(guarded, GuardedBuffers):
        module.__dict__["_buffers"] = dict(dict.items(guarded))
