"""How gradients on an accelerator get to the core and back: pinned memory and a side stream.

Nothing here waits for the device as a whole, and the training thread does not wait for copies to
the host: a small thread waits for the event behind each copy and then hands the memory over. Pinned
memory is kept, one buffer a tensor, and is written again only after its last copy to the device.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradlane.carrier import DirectCarrier, spread_from_host
from gradlane.core import Channel
from gradlane.table import Entry


@dataclass
class _Copy:
    """A copy to the host that is under way."""

    copied: torch.cuda.Event
    index: int
    step: int


class StagedCarrier:
    """Carries gradients of CUDA tensors; tensors in plain memory go directly."""

    def __init__(
        self,
        channel: Channel,
        trained: Mapping[int, Entry],
        report: Callable[[Exception], None],
    ) -> None:
        """Carry gradients of these tensors over a channel.

        Args:
            channel: the channel.
            trained: table entries by tensor number.
            report: told when handing over has failed on the small thread.
        """
        self._channel = channel
        self._trained = trained
        self._report = report
        self._direct = DirectCarrier(channel, trained)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pinned: dict[int, Tensor] = {}
        self._returned: dict[int, torch.cuda.Event] = {}
        self._copies: deque[_Copy] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(
            target=self._hand_over, name="gradlane-staging", daemon=True
        )
        self._thread.start()

    def give(self, index: int, step: int, gradient: Tensor) -> None:
        """Start the copy to the host; the memory is handed over when it is done."""
        if gradient.device.type == "cpu":
            self._direct.give(index, step, gradient)
            return
        stream = self._stream(gradient.device)
        produced = torch.cuda.current_stream(gradient.device).record_event()
        with torch.cuda.stream(stream):
            stream.wait_event(produced)
            returned = self._returned.get(index)
            if returned is not None:
                stream.wait_event(returned)
            self._host(index).copy_(gradient, non_blocking=True)
            # The allocator must not give this memory away while the side stream reads it.
            gradient.record_stream(stream)
            copied = _blocking_event()
            copied.record(stream)
        with self._wake:
            self._copies.append(_Copy(copied, index, step))
            self._wake.notify()

    def give_nothing(self, index: int, step: int) -> Tensor:
        """Hand over pinned memory; returns a fresh tensor on the tensor's own device."""
        entry = self._trained[index]
        if entry.tensor.device.type == "cpu":
            return self._direct.give_nothing(index, step)
        returned = self._returned.get(index)
        if returned is not None:
            # The copy out of this buffer is a step old; this waits for it alone.
            returned.synchronize()
        host = self._host(index)
        self._channel.tensor_absent(index, step, host.data_ptr(), entry.nbytes)
        with torch.inference_mode(False):
            return torch.empty_strided(
                entry.tensor.shape,
                entry.stride,
                dtype=entry.tensor.dtype,
                device=entry.tensor.device,
            )

    def collect(self, arrived: Sequence[tuple[int, Tensor]]) -> None:
        """Queue copies back to the device on the current stream, before whatever reads them."""
        with torch.no_grad(), torch.inference_mode(False):
            for index, gradient in arrived:
                if gradient.device.type == "cpu":
                    continue
                gradient.copy_(self._host(index), non_blocking=True)
                stream = torch.cuda.current_stream(gradient.device)
                self._returned[index] = stream.record_event(_blocking_event())

    def spread(self, entries: Sequence[Entry], first: bool, without: Collection[int] = ()) -> None:
        """Run step 0 through copies in the host's memory."""
        spread_from_host(self._channel, entries, first, without)

    def close(self) -> None:
        """Stop the small thread; copies that are under way are waited for, not handed over."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _hand_over(self) -> None:
        while True:
            with self._wake:
                while not self._copies and not self._closing:
                    self._wake.wait()
                if self._closing:
                    return
                copy = self._copies.popleft()
            try:
                copy.copied.synchronize()
                host = self._host(copy.index)
                nbytes = self._trained[copy.index].nbytes
                self._channel.gradient_ready(copy.index, copy.step, host.data_ptr(), nbytes)
            except Exception as error:
                self._report(error)
                return

    def _host(self, index: int) -> Tensor:
        host = self._pinned.get(index)
        if host is None:
            entry = self._trained[index]
            with torch.inference_mode(False):
                host = torch.empty_strided(
                    entry.tensor.shape, entry.stride, dtype=entry.tensor.dtype, pin_memory=True
                )
            self._pinned[index] = host
        return host

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return stream


def _blocking_event() -> torch.cuda.Event:
    """Return an event that lets a thread sleep, instead of spin, while it waits."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
