"""Bring gradients on an accelerator to the core and back, through memory of the host.

The training thread does not wait for copies to the host: a small thread waits for each of them,
and then lends the memory to the core. There is one buffer a tensor, which is written again only
after its last copy to the device.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradlane.training.carrier import Carrier, DirectCarrier, broadcast_from_host
from gradlane.training.core import Channel
from gradlane.training.model.cuda_copies import CudaCopies
from gradlane.training.rendezvous.tensor_table import TensorEntry

CLOSE_TIMEOUT_S = 10.0
"""How long closing waits for the copy that is being waited for."""


@dataclass
class _Copy:
    """A copy to the host that is under way."""

    copied: torch.cuda.Event
    index: int
    step: int


class StagedCarrier:
    """Carries gradients of tensors on devices; tensors in plain memory go directly."""

    def __init__(
        self,
        channel: Channel,
        trained: Mapping[int, TensorEntry],
        report: Callable[[Exception], None],
        copies: CudaCopies,
        *,
        zeroes: bool = False,
    ) -> None:
        """Carry gradients of these tensors over a channel.

        Args:
            channel: the channel.
            trained: table entries by tensor number.
            report: called with an error of the small thread.
            copies: makes the copies.
            zeroes: as for `carrier_for`.
        """
        self._channel = channel
        self._trained = trained
        self._report = report
        self._copies = copies
        self._zeroes = zeroes
        self._direct = DirectCarrier(channel, trained, zeroes=zeroes)
        self._hosts: dict[int, Tensor] = {}
        self._returned: dict[int, torch.cuda.Event] = {}
        self._under_way: deque[_Copy] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(
            target=self._submit_copies, name="gradlane-staging", daemon=True
        )
        self._thread.start()

    def submit(self, index: int, step: int, gradient: Tensor) -> None:
        """Start the copy to the host; its memory is lent to the core when it is done."""
        if not self._copies.are_for(gradient.device):
            self._direct.submit(index, step, gradient)
            return
        copied = self._copies.to_host(self._host(index), gradient, self._returned.get(index))
        with self._wake:
            self._under_way.append(_Copy(copied, index, step))
            self._wake.notify()

    def submit_absent(self, index: int, step: int) -> Tensor:
        """Lend the core memory of the host; returns a fresh tensor on the tensor's own device."""
        entry = self._trained[index]
        if not self._copies.are_for(entry.tensor.device):
            return self._direct.submit_absent(index, step)
        returned = self._returned.get(index)
        if returned is not None:
            # The copy out of this buffer is a step old; this waits for it alone.
            returned.synchronize()
        host = self._host(index)
        if self._zeroes:
            host.zero_()
        self._channel.tensor_absent(index, step, host.data_ptr(), entry.nbytes)
        with torch.inference_mode(False):
            return torch.empty_strided(
                entry.tensor.shape,
                entry.stride,
                dtype=entry.tensor.dtype,
                device=entry.tensor.device,
            )

    def collect(self, arrived: Sequence[tuple[int, Tensor]]) -> None:
        """Queue copies back to the devices, before whatever reads them."""
        by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for index, gradient in arrived:
            if self._copies.are_for(gradient.device):
                by_device.setdefault(gradient.device, []).append((index, gradient))
        with torch.no_grad(), torch.inference_mode(False):
            for copied in by_device.values():
                pairs = [(gradient, self._host(index)) for index, gradient in copied]
                returned = self._copies.to_device(pairs)
                self._returned.update((index, returned) for index, _ in copied)

    def broadcast_initial(
        self, entries: Sequence[TensorEntry], first: bool, without: Collection[int] = ()
    ) -> None:
        """Run step 0 through copies in the host's memory."""
        broadcast_from_host(self._channel, entries, first, without)

    def close(self) -> None:
        """Stop the small thread; the core does not get copies that are under way."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not threading.current_thread():
            # A device that hangs must not keep the program from leaving.
            self._thread.join(CLOSE_TIMEOUT_S)

    def _submit_copies(self) -> None:
        while True:
            with self._wake:
                while not self._under_way and not self._closing:
                    self._wake.wait()
                if self._closing:
                    return
                copy = self._under_way.popleft()
            try:
                copy.copied.synchronize()
                if self._closing:
                    return
                host, entry = self._host(copy.index), self._trained[copy.index]
                self._channel.gradient_ready(copy.index, copy.step, host.data_ptr(), entry.nbytes)
            except Exception as error:
                self._report(error)
                return

    def _host(self, index: int) -> Tensor:
        host = self._hosts.get(index)
        if host is None:
            host = self._hosts[index] = self._copies.host_memory(self._trained[index])
        return host


def carrier_for(
    channel: Channel,
    carried: Mapping[int, TensorEntry],
    report: Callable[[Exception], None],
    *,
    zeroes: bool = False,
) -> Carrier:
    """Return a carrier for these tensors, on the host or on devices.

    Args:
        channel: the channel.
        carried: table entries by tensor number.
        report: called with an error of another thread.
        zeroes: make memory for results zero, parts of which may have none.
    """
    copies = CudaCopies()
    if any(copies.are_for(entry.device) for entry in carried.values()):
        return StagedCarrier(channel, carried, report, copies, zeroes=zeroes)
    return DirectCarrier(channel, carried, zeroes=zeroes)
