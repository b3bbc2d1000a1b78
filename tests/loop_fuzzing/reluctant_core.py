"""The core as unhelpful as its contract allows, by a seed.

Memory that it was lent is overwritten with NaN at once. A result lands on a rank only when that
rank waits for it, or, drawn from the seed, along with others that it waits for. So whoever reads
too early, or reads memory that is not his, does not get away with it, and runs repeat exactly: what
lands when does not hang on which thread is faster.
"""

from __future__ import annotations

import ctypes
import random
from typing import Any

from tests.training.model.held_core import HeldCore
from tests.training.model.late_core import LateChannel

_NAN_BYTE = 0xFF


class ReluctantChannel(LateChannel):
    """One rank's end."""

    core: ReluctantCore

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.random = random.Random(self.core.seed * 31 + self.rank)
        self.eagerness = self.random.choice((0.0, 0.3, 1.0))
        self.has_ended = False

    def step_begin(self, step: int) -> None:
        self.has_ended = False
        super().step_begin(step)

    def step_end(self, step: int) -> None:
        self.has_ended = True
        self.channel.step_end(step)

    def lend(self, tensor: int, step: int, pointer: int, nbytes: int) -> int:
        lent = super().lend(tensor, step, pointer, nbytes)
        if step > 0 and nbytes:
            ctypes.memset(pointer, _NAN_BYTE, nbytes)
        return lent

    def needed(self, tensor: int, step: int) -> None:
        self.channel.needed(tensor, step)
        if self.channel.is_ready(tensor, step):
            self.awaited.add(tensor)

    def wait(self, tensors: list[int], step: int) -> None:
        wanted = set(tensors)
        if self.has_ended:
            # Nothing more is asked of this rank in this step, so the others will speak.
            others = [one for one in self.members if one not in wanted]
            wanted.update(one for one in others if self.random.random() < self.eagerness)
        super().wait(sorted(wanted), step)


class ReluctantCore(HeldCore):
    """Stands in for the compiled core; shared by the ranks of one loop."""

    channel_type = ReluctantChannel

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
