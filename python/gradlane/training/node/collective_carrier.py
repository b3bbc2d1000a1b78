"""Submission of gradients to a node's collectives, on the device that they are on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from gradlane.training.carrier import Carrier
from gradlane.training.node.channel import NodeChannel
from gradlane.training.rendezvous.tensor_table import TensorEntry


class CollectiveCarrier:
    """Submits gradients to a node's collectives, and all other tensors to another carrier.

    Once the channel reports a tensor as ready, its device has finished all work on it, so there is
    nothing to collect.
    """

    def __init__(
        self, channel: NodeChannel, trained: Mapping[int, TensorEntry], others: Carrier
    ) -> None:
        """Submit the gradients that the channel takes on their device.

        Args:
            channel: a node's, with a collective queue.
            trained: table entries by tensor number.
            others: carries all other tensors of a step.
        """
        self._channel = channel
        self._trained = trained
        self._others = others

    def submit(self, index: int, step: int, gradient: Tensor) -> None:
        """Submit a gradient on its device."""
        if index < self._channel.collective_tensors:
            self._channel.submit_on_device(index, step, gradient, absent=False)
        else:
            self._others.submit(index, step, gradient)

    def submit_absent(self, index: int, step: int) -> Tensor:
        """Submit fresh memory for a result, on the tensor's own device."""
        if index >= self._channel.collective_tensors:
            return self._others.submit_absent(index, step)
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
        """Make the results of tensors other than gradients readable."""
        count = self._channel.collective_tensors
        self._others.collect([one for one in arrived if one[0] >= count])

    def broadcast_initial(
        self, entries: Sequence[TensorEntry], first: bool, without: Collection[int] = ()
    ) -> None:
        """Run step 0 through the host's memory."""
        self._others.broadcast_initial(entries, first, without)

    def close(self) -> None:
        """Close the other carrier; the collective queue ends with its channel."""
        self._others.close()
