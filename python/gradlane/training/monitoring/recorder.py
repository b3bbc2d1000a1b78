"""Recording of a real run, written as a timeline at the end: one file a rank.

Recording is off unless requested (`gradlane.init(trace_path=...)`, `GRADLANE_TRACE`). Its memory is
bounded: the last spans are kept, and the file holds the number of those that were dropped.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradlane.formats.timeline.chrome import write_chrome
from gradlane.training.core import Channel, rank_channel
from gradlane.training.modules.compiled import is_tracing, register_pre_hook_first
from gradlane.training.modules.forward_order import inside_backward
from gradlane.training.monitoring.recorded import Mark, ModelRecord, rank_path, recorded_timeline
from gradlane.training.options.options import Options
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.torch_internals import queue_callback

MARKS_MAX = 1 << 18
"""Most marks kept of a model; a mark is some hundred bytes."""
WAIT_MIN_NS = 10_000
"""Shorter waits are not recorded: the tensor was ready."""
_OUTPUTS_MAX = 16


class SessionRecorder:
    """Records all models of a session."""

    def __init__(self, path: Path, rank: int, facts: dict[str, Any]) -> None:
        """Start without models.

        Args:
            path: the user's path; each rank writes `rank_path` of it.
            rank: this rank.
            facts: for the file.
        """
        self._path = rank_path(path, rank)
        self._rank = rank
        self._facts = facts
        self._recordings: list[ModelRecording] = []

    def record(
        self,
        channel: Channel,
        names: Sequence[str],
        members: Mapping[int, Sequence[str]] = MappingProxyType({}),
    ) -> ModelRecording:
        """Start to record a model.

        Args:
            channel: the model's.
            names: of its tensors, by number.
            members: names of the gradients that travel together, by their group's number.
        """
        recording = ModelRecording(channel, names, members)
        self._recordings.append(recording)
        return recording

    def write(self) -> None:
        """Write the file; an error is a warning, since the run itself is not affected."""
        try:
            records = [recording.read() for recording in self._recordings]
            timeline = recorded_timeline(self._rank, records, self._facts)
            write_chrome(timeline, self._path)
        except OSError as error:
            warnings.warn(
                f"the timeline of rank {self._rank} cannot be written to {self._path}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )


def make_recorder(options: Options, rank_info: RankInfo) -> SessionRecorder | None:
    """Return the recorder of a session; None if it is not to be recorded."""
    if options.monitoring.trace is None:
        return None
    facts = {
        "strategy": options.strategy.name,
        "workers": rank_info.world_size,
        "job": rank_info.job,
        "slice_elems": options.strategy.slice_elems,
        "update": options.update_place,
    }
    return SessionRecorder(Path(options.monitoring.trace), rank_info.rank, facts)


class ModelRecording:
    """Records one model."""

    def __init__(
        self, channel: Channel, names: Sequence[str], members: Mapping[int, Sequence[str]]
    ) -> None:
        """Wrap a channel."""
        self.names = names
        self.members = members
        self.channel = cast(Channel, _RecordingChannel(channel, self))
        self._core = channel
        self._marks: deque[Mark] = deque(maxlen=MARKS_MAX)
        self._dropped = 0
        self._step = 0
        self._forward_since_ns: int | None = None
        self._backward_since_ns: int | None = None
        self._step_before_backward = 0
        self._handles: list[Any] = []
        self._counters: Callable[[], dict[str, float]] = dict

    def watch(self, model: nn.Module, counters: Callable[[], dict[str, float]]) -> None:
        """Record forward and backward of the whole model.

        Args:
            model: the user's.
            counters: returns what an update is noted with, if it is clipped.
        """
        self._counters = counters
        before, after = _Hook(self._before_forward), _Hook(self._after_forward)
        self._handles += [
            register_pre_hook_first(model, before),
            model.register_forward_hook(after),
        ]

    def remove_hooks(self) -> None:
        """Remove the model's hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def timed_update(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the optimizer's step function, with its time recorded."""

        @functools.wraps(step)
        def timed(*arguments: Any, **options: Any) -> Any:
            begin_ns = time.monotonic_ns()
            try:
                return step(*arguments, **options)
            finally:
                counters = self._counters()
                factor = counters["clip_factor"] if counters.get("clip_steps") else None
                end_ns = time.monotonic_ns()
                self.note(Mark("update", begin_ns, end_ns, self._step, clip_factor=factor))

        return timed

    def begin_step(self, step: int) -> None:
        """Record that a step has begun on the channel."""
        self._step = step

    def note(self, mark: Mark) -> None:
        """Add a mark."""
        if len(self._marks) == MARKS_MAX:
            self._dropped += 1
        self._marks.append(mark)

    def read(self) -> ModelRecord:
        """Return all that was recorded; the core's rows are taken, and come once."""
        rows, dropped = self._core.take_timeline()
        return ModelRecord(
            self.names, self.members, list(self._marks), rows, self._dropped + dropped
        )

    def _before_forward(self, module: nn.Module, arguments: Any) -> None:
        if module.training and torch.is_grad_enabled() and not inside_backward():
            self._forward_since_ns = time.monotonic_ns()

    def _after_forward(self, module: nn.Module, arguments: Any, output: Any) -> None:
        since_ns, self._forward_since_ns = self._forward_since_ns, None
        if since_ns is None:
            return
        self.note(Mark("forward", since_ns, time.monotonic_ns(), self._step + 1))
        for number, tensor in enumerate(_tensors_in(output, depth=3)):
            if number < _OUTPUTS_MAX and tensor.requires_grad:
                tensor.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]

    def _begin_backward(self, gradient: Tensor) -> None:
        if self._backward_since_ns is None:
            self._backward_since_ns = time.monotonic_ns()
            self._step_before_backward = self._step
            queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        since_ns, self._backward_since_ns = self._backward_since_ns, None
        if since_ns is not None:
            step = max(self._step, self._step_before_backward + 1)
            self.note(Mark("backward", since_ns, time.monotonic_ns(), step))


class _RecordingChannel:
    """A channel that records when the program begins steps and waits."""

    def __init__(self, channel: Channel, recording: ModelRecording) -> None:
        self._channel = channel
        self._recording = recording

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def step_begin(self, step: int) -> None:
        self._channel.step_begin(step)
        self._recording.begin_step(step)

    def step_pass(self, step: int) -> None:
        rank_channel(self._channel, "leaving out late ranks").step_pass(step)
        self._recording.begin_step(step)

    def step_barrier(self, step: int) -> None:
        rank_channel(self._channel, "leaving out late ranks").step_barrier(step)
        self._recording.begin_step(step)

    def wait(self, tensors: list[int], step: int) -> None:
        begin_ns = time.monotonic_ns()
        try:
            self._channel.wait(tensors, step)
        finally:
            self._note_wait(begin_ns, step, tuple(tensors))

    def wait_step(self, step: int) -> None:
        begin_ns = time.monotonic_ns()
        try:
            self._channel.wait_step(step)
        finally:
            self._note_wait(begin_ns, step, ())

    def _note_wait(self, begin_ns: int, step: int, tensors: tuple[int, ...]) -> None:
        end_ns = time.monotonic_ns()
        if end_ns - begin_ns >= WAIT_MIN_NS:
            self._recording.note(Mark("wait", begin_ns, end_ns, step, tensors))


class _Hook:
    """A module hook that does nothing in copies and pickles of the module."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        if not is_tracing():
            self._call(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _no_op

    def __reduce__(self) -> Any:
        return _return_no_op, ()


def _no_op(*arguments: Any) -> None:
    """The hook of a copy."""


def _return_no_op() -> Callable[..., None]:
    return _no_op


def _tensors_in(output: Any, depth: int) -> Iterator[Tensor]:
    """Yield the tensors in a model's output."""
    if isinstance(output, Tensor):
        yield output
    elif depth > 0 and isinstance(output, (list, tuple, dict)):
        for member in output.values() if isinstance(output, dict) else output:
            yield from _tensors_in(member, depth - 1)
