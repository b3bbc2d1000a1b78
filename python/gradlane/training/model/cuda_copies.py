"""Copies between CUDA devices and pinned memory of the host, on a side stream of each device."""

from __future__ import annotations

import torch
from torch import Tensor

from gradlane.training.rendezvous.tensor_table import TensorEntry


class CudaCopies:
    """Copies CUDA tensors without waiting for a device as a whole."""

    def __init__(self) -> None:
        """Copy nothing yet; a device's stream is made with its first copy."""
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

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
        """Start a copy on the side stream, behind the current stream's work so far."""
        stream = self._stream(gradient.device)
        produced = torch.cuda.current_stream(gradient.device).record_event()
        with torch.cuda.stream(stream):
            stream.wait_event(produced)
            if after is not None:
                stream.wait_event(after)
            host.copy_(gradient, non_blocking=True)
            # The allocator must not give this memory away while the side stream reads it.
            gradient.record_stream(stream)
            copied = _blocking_event()
            copied.record(stream)
        return copied

    def to_device(self, gradient: Tensor, host: Tensor) -> torch.cuda.Event:
        """Queue a copy on the current stream, before all later reads there."""
        gradient.copy_(host, non_blocking=True)
        returned = _blocking_event()
        returned.record(torch.cuda.current_stream(gradient.device))
        return returned

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return stream


def _blocking_event() -> torch.cuda.Event:
    """Return an event that lets a thread sleep, instead of spin, while it waits."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
