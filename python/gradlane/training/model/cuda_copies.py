"""Copies between CUDA devices and pinned memory of the host, on a side stream of each device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradlane.errors import UsageError
from gradlane.training.rendezvous.tensor_table import TensorEntry


class CudaCopies:
    """Copies CUDA tensors without waiting for a device as a whole.

    Each call takes the interpreter some 25 us, in the middle of backward: events are used again,
    and streams are set without torch's context, which looks at them four times.
    """

    def __init__(self) -> None:
        """Copy nothing yet; a device's stream is made with its first copy."""
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._events: dict[int, tuple[torch.cuda.Event, torch.cuda.Event]] = {}

    def are_for(self, device: torch.device) -> bool:
        """Whether tensors on this device have to be copied."""
        return device.type != "cpu"

    def host_memory(self, entry: TensorEntry) -> Tensor:
        """Return pinned memory with the layout of an entry's gradients."""
        with torch.inference_mode(False):
            return torch.empty_strided(
                entry.tensor.shape,
                entry.stride,
                dtype=entry.tensor.dtype,
                device="cpu",
                pin_memory=True,
            )

    def to_host(
        self, host: Tensor, gradient: Tensor, after: torch.cuda.Event | None
    ) -> torch.cuda.Event:
        """Start a copy on the side stream, behind the current stream's work so far.

        Raises:
            UsageError: a CUDA graph is being captured.
        """
        side = self._stream(gradient.device)
        produced, copied = self._events_of(host)
        with torch.cuda.device(gradient.device):
            _refuse_capture()
            current = torch.cuda.current_stream()
            produced.record(current)
            torch.cuda.set_stream(side)
            try:
                side.wait_event(produced)
                if after is not None:
                    side.wait_event(after)
                host.copy_(gradient, non_blocking=True)
                # The allocator must not give this memory away while the side stream reads it.
                gradient.record_stream(side)
                copied.record(side)
            finally:
                torch.cuda.set_stream(current)
        return copied

    def to_device(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event:
        """Queue copies on the current stream of a device, before all later reads there.

        Raises:
            UsageError: a CUDA graph is being captured.
        """
        with torch.cuda.device(pairs[0][0].device):
            _refuse_capture()
            for gradient, host in pairs:
                gradient.copy_(host, non_blocking=True)
            returned = _blocking_event()
            returned.record(torch.cuda.current_stream())
        return returned

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return stream

    def _events_of(self, host: Tensor) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Return the two events of a buffer, whose last copy to the host has been waited for."""
        events = self._events.get(host.data_ptr())
        if events is None:
            events = torch.cuda.Event(), _blocking_event()  # type: ignore[no-untyped-call]
            self._events[host.data_ptr()] = events
        return events


def _blocking_event() -> torch.cuda.Event:
    """Return an event that lets a thread sleep, instead of spin, while it waits."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


def _refuse_capture() -> None:
    """Refuse copies that a graph would hold: each replay would have to wait for other ranks.

    Raises:
        UsageError: a CUDA graph is being captured.
    """
    if torch.cuda.is_current_stream_capturing():
        raise UsageError(
            "a CUDA graph is being captured while gradients are exchanged, and its replays would "
            "exchange none: capture without backward and optimizer.step(), or give the model to "
            "torch.cuda.make_graphed_callables() before session.prepare()"
        )
