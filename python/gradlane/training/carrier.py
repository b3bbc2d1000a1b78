"""Bring gradients from autograd to the core and back, for tensors in plain memory.

A carrier keeps nothing itself: the caller keeps every tensor alive from `submit` until the core
says that it is ready. `collect` is called once the core is done with the memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from gradlane.training.core import Channel
from gradlane.training.rendezvous.tensor_table import TensorEntry, without_repeats


class Carrier(Protocol):
    """Brings gradients to a channel and results back."""

    def submit(self, index: int, step: int, gradient: Tensor) -> None:
        """Submit a gradient, laid out like the tensor's table entry."""

    def submit_absent(self, index: int, step: int) -> Tensor:
        """Submit the absence of a gradient; returns the tensor that a result will be in."""

    def collect(self, arrived: Sequence[tuple[int, Tensor]]) -> None:
        """Make results readable: the tensors hold the averaged gradients when it returns."""

    def broadcast_initial(
        self, entries: Sequence[TensorEntry], first: bool, without: Collection[int] = ()
    ) -> None:
        """Run step 0: after it every tensor has rank 0's values.

        Args:
            entries: the whole table.
            first: whether this is rank 0.
            without: numbers of tensors that take no part in step 0.
        """

    def close(self) -> None:
        """Stop using the channel."""


class DirectCarrier:
    """Lends the core the memory of the gradients themselves."""

    def __init__(
        self, channel: Channel, trained: Mapping[int, TensorEntry], *, zeroes: bool = False
    ) -> None:
        """Carry gradients of these tensors over a channel.

        Args:
            channel: the channel.
            trained: table entries by tensor number.
            zeroes: make memory for results zero, parts of which may have none.
        """
        self._zeroes = zeroes
        self._channel = channel
        self._trained = trained

    def submit(self, index: int, step: int, gradient: Tensor) -> None:
        """Lend the core a gradient's memory."""
        self._channel.gradient_ready(index, step, gradient.data_ptr(), self._trained[index].nbytes)

    def submit_absent(self, index: int, step: int) -> Tensor:
        """Lend the core fresh memory for a result."""
        entry = self._trained[index]
        with torch.inference_mode(False):
            landing = torch.empty_strided(
                entry.tensor.shape, entry.stride, dtype=entry.tensor.dtype, device="cpu"
            )
            if self._zeroes:
                landing.zero_()
        self._channel.tensor_absent(index, step, landing.data_ptr(), entry.nbytes)
        return landing

    def collect(self, arrived: Sequence[tuple[int, Tensor]]) -> None:
        """Do nothing: results are in place."""

    def broadcast_initial(
        self, entries: Sequence[TensorEntry], first: bool, without: Collection[int] = ()
    ) -> None:
        """Run step 0 in the tensors' own memory where it is dense, else in copies."""
        broadcast_from_host(self._channel, entries, first, without)

    def close(self) -> None:
        """Do nothing: no thread runs."""


def broadcast_from_host(
    channel: Channel, entries: Sequence[TensorEntry], first: bool, without: Collection[int] = ()
) -> None:
    """Broadcast rank 0's values to all ranks through memory of the host.

    Args:
        channel: a channel on which no step has begun.
        entries: the whole table; tensors may be on any device and in any layout.
        first: whether this is rank 0, whose tensors are not written.
        without: numbers of tensors that take no part in step 0.
    """
    taking_part = [(i, entry) for i, entry in enumerate(entries) if i not in without]
    lent: list[Tensor] = []
    with torch.no_grad():
        for _, entry in taking_part:
            tensor = entry.tensor.detach()
            direct = tensor.device.type == "cpu" and tensor.stride() == entry.stride
            if not direct:
                host = torch.empty_strided(
                    tensor.shape, entry.stride, dtype=tensor.dtype, device="cpu"
                )
                tensor = host.copy_(tensor)
            lent.append(tensor)
        channel.step_begin(0)
        for (index, entry), tensor in zip(taking_part, lent, strict=True):
            channel.gradient_ready(index, 0, tensor.data_ptr(), entry.nbytes)
        channel.step_end(0)
        channel.wait_step(0)
        if not first:
            for (_, entry), tensor in zip(taking_part, lent, strict=True):
                if tensor.data_ptr() != entry.tensor.data_ptr():
                    target, source = without_repeats(entry.tensor, tensor)
                    target.copy_(source)
                else:
                    # The core wrote there: torch has not counted that, and caches go by its count.
                    increment_version(entry.tensor)


def broadcast_nothing(channel: Channel, entries: Sequence[TensorEntry]) -> None:
    """Run step 0 of a channel whose ranks have their values already, or get them elsewhere.

    Args:
        channel: a channel on which no step has begun.
        entries: the whole table.
    """
    channel.step_begin(0)
    for index, entry in enumerate(entries):
        # Rank 0 has nothing to give, so nothing lands.
        channel.tensor_absent(index, 0, entry.tensor.data_ptr(), entry.nbytes)
    channel.step_end(0)
    channel.wait_step(0)
