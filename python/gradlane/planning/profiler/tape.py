"""Marks of moments, and the clocks that they are read from.

A mark costs one reading of a clock and one entry in a list; its meaning is computed when a profile
is requested. On CUDA a moment is an event on the current stream, which the device passes after its
queued work: nothing waits for it inside the step.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

STEP_BEGIN = -1
STEP_END = -2
WAIT_BEGIN = -3
WAIT_END = -4
EVALUATION = -5

Mark = tuple[int, Any]
"""A code (of this file, or of the tape's owner) and its moment."""


class Clock(ABC):
    """Reads moments now, and converts them to seconds later."""

    now: Callable[[], Any]
    """Returns a moment; called in every hook."""

    @abstractmethod
    def seconds(self, marks: Sequence[Mark]) -> list[tuple[int, float]]:
        """Return the marks of one step with seconds (from anywhere) in place of moments."""


class HostClock(Clock):
    """The time of this machine, for models that compute on the CPU."""

    def __init__(self) -> None:
        """Use the monotonic clock with the highest resolution."""
        self.now = time.perf_counter

    def seconds(self, marks: Sequence[Mark]) -> list[tuple[int, float]]:
        """Return the marks unchanged."""
        return list(marks)


class CudaClock(Clock):
    """The time of one CUDA device, by events."""

    def __init__(self, device: torch.device) -> None:
        """Record events on the current stream of a device."""
        self._device = device
        self.now = self._record

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, marks: Sequence[Mark]) -> list[tuple[int, float]]:
        """Wait until the device has passed the marks, and return their times."""
        for _, event in marks:
            event.synchronize()
        first = marks[0][1]
        return [(code, first.elapsed_time(event) / 1e3) for code, event in marks]


class Tape:
    """Records marks during a step, and ignores them otherwise."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.now = clock.now
        self.append: Callable[[Mark], None] = _ignore
        self._marks: list[Mark] = []

    @property
    def is_recording(self) -> bool:
        """True while a step is being recorded."""
        return self.append is not _ignore

    def begin(self) -> None:
        """Begin a step."""
        self._marks = [(STEP_BEGIN, self.now())]
        self.append = self._marks.append

    def end(self) -> list[Mark]:
        """End the step and return its marks."""
        self.append((STEP_END, self.now()))
        self.append = _ignore
        return self._marks

    def wait_begins(self) -> None:
        """Record the begin of a wait for other ranks."""
        if self.is_recording:
            self.append((WAIT_BEGIN, self.now()))

    def wait_ends(self) -> None:
        """Record the end of a wait."""
        if self.is_recording:
            self.append((WAIT_END, self.now()))


def _ignore(mark: Mark) -> None:
    return None
