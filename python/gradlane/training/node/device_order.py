"""What follows what where collectives run: in plain memory, or on the streams of a CUDA device.

A collective has to come after whatever computes the gradient, and what reads its result after the
collective. In plain memory gradients are there when they are given, and a collective is waited for.
On a device nothing is waited for until the end: a stream of our own comes behind the stream that
the gradient was given on, collectives and copies behind that, and an event at the end says that all
of it is done. The host looks at the event; it never waits inside the driver, which would not hear
of a rank that was lost.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from gradlane.training.node.group import Work

_PAUSE_MIN_S = 20e-6
_PAUSE_MAX_S = 1e-3


class CollectiveCancelledError(Exception):
    """The session has failed elsewhere while a collective was under way."""


class DeviceOrder(Protocol):
    """The order of work on one device, for one thread that issues it."""

    needs_pinned_memory: bool
    """Whether the host's end of copies has to be pinned memory."""

    def mark(self) -> Any:
        """Note, on any thread, what the current work on a gradient is; for `after`."""

    def after(self, mark: Any) -> AbstractContextManager[None]:
        """Return a context in which everything comes behind what was noted."""

    def wait_for(self, work: Work) -> None:
        """Make everything that follows come behind a collective; may raise its error."""

    def completion(self) -> Callable[[], bool]:
        """Return what says whether everything up to here has been done."""


class HostOrder:
    """Plain memory: collectives are waited for."""

    needs_pinned_memory = False

    def __init__(self, is_cancelled: Callable[[], bool]) -> None:
        """Wait only as long as nothing is lost.

        Args:
            is_cancelled: whether the session has failed elsewhere.
        """
        self._is_cancelled = is_cancelled

    def mark(self) -> None:
        """Nothing is under way: whoever gives a gradient has computed it."""

    def after(self, mark: Any) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def wait_for(self, work: Work) -> None:
        """Wait for a collective.

        Raises:
            CollectiveCancelledError: the session has failed elsewhere.
            RuntimeError: the collective has failed.
        """
        pause_s = _PAUSE_MIN_S
        while not work.is_completed():
            if self._is_cancelled():
                raise CollectiveCancelledError
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)
        work.wait()

    def completion(self) -> Callable[[], bool]:
        """Everything was waited for."""
        return lambda: True


class CudaOrder:
    """A CUDA device: a side stream, and events."""

    needs_pinned_memory = True

    def __init__(self, device: torch.device) -> None:
        """Make the stream."""
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        """Note where the current stream is."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    @contextlib.contextmanager
    def after(self, mark: torch.cuda.Event) -> Iterator[None]:
        """Return a context on the side stream, which waits for a gradient's own stream."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield

    def wait_for(self, work: Work) -> None:
        """Make the side stream wait for a collective; the host goes on."""
        work.wait()

    def completion(self) -> Callable[[], bool]:
        """Return what looks at an event at the end of the side stream."""
        event: torch.cuda.Event = self._stream.record_event()
        return event.query


def order_on(device: torch.device, is_cancelled: Callable[[], bool]) -> DeviceOrder:
    """Return the order of work on a device."""
    return HostOrder(is_cancelled) if device.type == "cpu" else CudaOrder(device)
