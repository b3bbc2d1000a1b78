"""Order of collectives against the work on a gradient: on the host, or on streams of a CUDA device.

A collective must follow the computation of its gradient, and readers of its result must follow the
collective. On the host a gradient is complete when it is submitted, and the thread waits for each
collective. On a CUDA device nothing waits: a side stream follows the stream that the gradient was
submitted on, collectives and copies follow on it, and an event at its end marks completion. The
host polls that event and never waits inside the driver, where it would not notice a lost rank.
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
    """The session failed elsewhere while a collective was in flight."""


class DeviceOrder(Protocol):
    """The order of work on one device, for one thread that issues it."""

    needs_pinned_memory: bool
    """True if copies to the host need pinned memory."""

    def mark(self) -> Any:
        """Return a mark behind the current work on a gradient, on any thread; for `after`."""

    def after(self, mark: Any) -> AbstractContextManager[None]:
        """Return a context whose work follows a mark."""

    def wait_for(self, work: Work) -> None:
        """Make all following work wait for a collective; may raise its error."""

    def completion(self) -> Callable[[], bool]:
        """Return a function that tells whether all work so far is done."""


class HostOrder:
    """Host memory: the thread waits for each collective."""

    needs_pinned_memory = False

    def __init__(self, is_cancelled: Callable[[], bool]) -> None:
        """Wait only while the session is alive.

        Args:
            is_cancelled: whether the session has failed elsewhere.
        """
        self._is_cancelled = is_cancelled

    def mark(self) -> None:
        """Return no mark: a submitted gradient is complete."""

    def after(self, mark: Any) -> AbstractContextManager[None]:
        """Return a context without effect."""
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
        """Return a function that returns True: all collectives were waited for."""
        return lambda: True


class CudaOrder:
    """A CUDA device: a side stream and events."""

    needs_pinned_memory = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    @contextlib.contextmanager
    def after(self, mark: torch.cuda.Event) -> Iterator[None]:
        """Return a context on the side stream, behind the gradient's own stream."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield

    def wait_for(self, work: Work) -> None:
        """Make the side stream wait for a collective, without blocking the host."""
        work.wait()

    def completion(self) -> Callable[[], bool]:
        """Return a function that queries an event at the end of the side stream."""
        event: torch.cuda.Event = self._stream.record_event()
        return event.query


def order_on(device: torch.device, is_cancelled: Callable[[], bool]) -> DeviceOrder:
    """Return the order of work on a device."""
    return HostOrder(is_cancelled) if device.type == "cpu" else CudaOrder(device)
