"""Buffers that are kept alike: each rank's values out at the end of a step, common ones back."""

from __future__ import annotations

from torch import Tensor

from gradlane.training.carrier import Carrier
from gradlane.training.model.buffers import BufferPack


class BufferExchange:
    """Submits the packed buffers of a model, and writes what comes back into them."""

    def __init__(self, carrier: Carrier, pack: BufferPack, index: int) -> None:
        """Start with nothing under way.

        Args:
            carrier: brings them to the channel and back.
            pack: the buffers.
            index: their tensor number.
        """
        self._carrier = carrier
        self._pack = pack
        self.index = index
        """Their tensor number."""
        self.is_submitted = True
        """Whether they were submitted in this step."""
        self._packed: Tensor | None = None

    def begin(self, *, shadow: bool) -> None:
        """Begin a step; `shadow`: this rank goes along without data."""
        self.is_submitted = False
        self._pack.begin_step(shadow=shadow)

    def submit(self, step: int, *, silent: bool) -> None:
        """Submit the buffers, if they were not yet; `silent`: this rank has none to tell."""
        if self.is_submitted:
            return
        packed = self._pack.pack(step, silent=silent)
        if packed is None:
            packed = self._carrier.submit_absent(self.index, step)
        else:
            self._carrier.submit(self.index, step, packed)
        self._packed = packed
        self.is_submitted = True

    def land(self, *, absent: bool) -> None:
        """Write the values that all ranks share after a step into the buffers.

        Raises:
            UsageError: the program has changed the buffers' form.
            SessionFailedError: buffers were changed before the step, and not alike on all ranks.
        """
        packed, self._packed = self._packed, None
        if packed is not None and not absent:
            self._carrier.collect([(self.index, packed)])
        self._pack.land(None if absent else packed)
