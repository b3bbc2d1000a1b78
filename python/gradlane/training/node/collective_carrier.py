"""How gradients get to a node's collectives: as they are, on the device that they are on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from gradlane.training.carrier import Carrier
from gradlane.training.node.channel import NodeChannel
from gradlane.training.rendezvous.tensor_table import TensorEntry


class CollectiveCarrier:
    """Gives gradients to the lane of a node's channel, and everything else to another carrier.

    When the channel says that a tensor is ready, its device has done all that there was to do: so
    nothing has to be collected.
    """

    def __init__(
        self, channel: NodeChannel, trained: Mapping[int, TensorEntry], others: Carrier
    ) -> None:
        """Carry the gradients that the channel takes where they are.

        Args:
            channel: a node's, with a lane.
            trained: table entries by tensor number.
            others: carries what takes part in steps beside gradients.
        """
        self._channel = channel
        self._trained = trained
        self._others = others

    def give(self, index: int, step: int, gradient: Tensor) -> None:
        """Hand over a gradient where it is."""
        if index < self._channel.collective_tensors:
            self._channel.submit_on_device(index, step, gradient, absent=False)
        else:
            self._others.give(index, step, gradient)

    def give_nothing(self, index: int, step: int) -> Tensor:
        """Hand over fresh memory for a result, on the tensor's own device."""
        if index >= self._channel.collective_tensors:
            return self._others.give_nothing(index, step)
        entry = self._trained[index]
        with torch.inference_mode(False):
            landing = torch.empty_strided(
                entry.tensor.shape,
                entry.stride,
                dtype=entry.tensor.dtype,
                device=entry.tensor.device,
            )
        self._channel.submit_on_device(index, step, landing, absent=True)
        return landing

    def collect(self, arrived: Sequence[tuple[int, Tensor]]) -> None:
        """Make results of what takes part beside gradients readable."""
        count = self._channel.collective_tensors
        self._others.collect([one for one in arrived if one[0] >= count])

    def spread(
        self, entries: Sequence[TensorEntry], first: bool, without: Collection[int] = ()
    ) -> None:
        """Run step 0 through memory of the host."""
        self._others.spread(entries, first, without)

    def close(self) -> None:
        """Stop the other carrier; the lane ends with its channel."""
        self._others.close()
