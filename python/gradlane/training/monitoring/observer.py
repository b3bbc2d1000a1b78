"""What a session knows of its models while they train: counters, step times, who is told of them.

Everything here may be called from any thread. Nothing here ends a training: what cannot be
reported is warned of once and left out.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from gradlane.errors import RendezvousError, SessionClosedError
from gradlane.formats.untrusted import escaped
from gradlane.training.core import Channel
from gradlane.training.monitoring.endpoint import Endpoint
from gradlane.training.monitoring.metrics import (
    Metrics,
    Reading,
    join_readings,
    metrics_of,
    renumber_steps,
)
from gradlane.training.monitoring.prometheus import serve
from gradlane.training.monitoring.step_timer import StepTimer
from gradlane.training.monitoring.summary import LateRank, late_ranks, summary_line
from gradlane.training.monitoring.tensorboard import ScalarLog, ScalarWriter
from gradlane.training.options.options import Options
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.rendezvous import RendezvousScope


class StepNumbers(Protocol):
    """A model's steps as this file sees them."""

    @property
    def step(self) -> int:
        """Number of the current training step."""

    def training_step_of(self, step: int) -> int:
        """Number of the training step that a step of the channel was, or came after."""


AfterStep = Callable[[int], None]
"""Called with the number of a training step that is done with, between it and the next one."""


class ModelWatch:
    """One model, on whatever channel it is."""

    def __init__(self, number: int, after_step: Callable[[ModelWatch, int], None]) -> None:
        """Watch nothing yet.

        Args:
            number: of the model, in the order of preparation, from 1.
            after_step: called with this and the number of each training step that is done with.
        """
        self.number = number
        self.step_timer = StepTimer()
        self.peer_reports: list[Reading] = []
        """What the other ranks said when they closed; rank 0's alone has it."""
        self._after_step = after_step
        self._channel: Channel | None = None
        self._steps: StepNumbers | None = None
        self._earlier: Reading = {}

    def follow(self, channel: Channel, steps: StepNumbers) -> None:
        """Watch a channel, in place of the one before, which must be closed."""
        self._earlier = self.reading()
        self._channel, self._steps = channel, steps
        self.step_timer.use_channel(channel.waited_ns)

    def step_begins(self, step: int) -> None:
        """Note that a training step begins; all before it are done with."""
        self.step_timer.step_begins()
        if step > 1:
            self._after_step(self, self._earlier.get("step", 0) + step - 1)

    def reading(self) -> Reading:
        """Return the counters since the model was first prepared."""
        if self._channel is None or self._steps is None:
            return {}
        now: Reading = json.loads(self._channel.metrics_json())
        now = renumber_steps(now, self._steps.training_step_of)
        now["step"] = self._steps.step
        return join_readings(self._earlier, now) if self._earlier else now

    def publish_lateness(self, scope: RendezvousScope) -> None:
        """Leave word for rank 0 of what this rank's slices have waited for."""
        if scope.rank_info.world_size == 1:
            return
        reading = self.reading()
        record = {name: reading.get(name) for name in ("stragglers", "gathered_slices")}
        with contextlib.suppress(RendezvousError):
            scope.put(f"metrics/{scope.rank_info.rank}", json.dumps(record))

    def collect_lateness(self, scope: RendezvousScope) -> None:
        """Read what the other ranks have left, on rank 0, once they have said goodbye."""
        if scope.rank_info.rank != 0 or scope.rank_info.world_size == 1:
            return
        self.peer_reports = []
        with contextlib.suppress(RendezvousError):
            for rank in range(scope.rank_info.world_size):
                record = scope.peek(f"metrics/{rank}")
                # Anybody may have written it: a report that is none is left out, and ends nothing.
                with contextlib.suppress(Exception):
                    peer_reports = json.loads(record or b"")
                    late_ranks([peer_reports])
                    self.peer_reports.append(peer_reports)


class Observer:
    """All models of one session."""

    def __init__(self, rank_info: RankInfo, *, prints_summary: bool) -> None:
        """Watch nothing yet.

        Args:
            rank_info: this rank's.
            prints_summary: whether rank 0 prints a line at the end.
        """
        self._rank_info = rank_info
        self._prints_summary = prints_summary and rank_info.rank == 0
        self._watches: list[ModelWatch] = []
        self._numbers: WeakKeyDictionary[object, ModelWatch] = WeakKeyDictionary()
        self._listeners: list[AfterStep] = []
        self._endpoint: Endpoint | None = None
        self._is_forked_child = False

    def watch(self, model: object, channel: Channel, steps: StepNumbers) -> ModelWatch:
        """Watch a model, or arrays, on a channel; also what was on another one before."""
        watch = self._numbers.get(model)
        if watch is None:
            watch = ModelWatch(len(self._watches) + 1, self._after_step)
            self._numbers[model] = watch
            self._watches.append(watch)
        watch.follow(channel, steps)
        return watch

    def add_step_listener(self, after_step: AfterStep) -> None:
        """Have something called after each training step of the first model."""
        self._listeners.append(after_step)

    def metrics(self) -> Metrics:
        """Return all numbers as they are now.

        Raises:
            SessionClosedError: in a forked child, where nobody counts.
        """
        if self._is_forked_child:
            raise SessionClosedError(
                "the session was left behind in the parent of this forked child"
            )
        watches = list(self._watches)
        step_times = [watch.step_timer.times() for watch in watches]
        steps = max(step_times, key=lambda times: times["count"], default=StepTimer().times())
        rank_info = self._rank_info
        readings = [watch.reading() for watch in watches]
        return metrics_of(rank_info.rank, rank_info.world_size, steps, readings)

    def log_to(self, writer: ScalarWriter, every: int) -> None:
        """Write scalars after every so many training steps of the first model.

        Raises:
            ValueError: `every` is below 1.
            TypeError: the writer has no `add_scalar`.
        """
        self.add_step_listener(ScalarLog(writer, every, self.metrics).after_step)

    def serve(self, host: str, port: int) -> None:
        """Answer Prometheus.

        Raises:
            ValueError: the address cannot be listened on.
        """
        self._endpoint = serve(host, port, self.metrics)

    @property
    def prometheus_port(self) -> int | None:
        """Port that is answered at, or None."""
        return self._endpoint.port if self._endpoint is not None else None

    def close(self) -> None:
        """Stop answering; print the line at the end, if it is wanted and there is one to print."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()
        if not self._prints_summary:
            return
        metrics = self.metrics()
        if metrics["steps"]["count"] > 0:
            # The end may come in a signal handler, in the middle of another print.
            with contextlib.suppress(RuntimeError, OSError, ValueError):
                line = summary_line(metrics, self._late_ranks(metrics))
                print(escaped(line), file=sys.stderr, flush=True)

    def forget_in_child(self) -> None:
        """Report nothing in a forked child."""
        self._is_forked_child = True
        self._prints_summary = False
        self._listeners.clear()
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.forget_in_child()

    def _late_ranks(self, metrics: Metrics) -> Sequence[LateRank]:
        peer_reports = [record for watch in self._watches for record in watch.peer_reports]
        if not peer_reports:
            peer_reports = [{"stragglers": None, "gathered_slices": metrics["gathered_slices"]}]
            peer_reports[0]["stragglers"] = metrics["stragglers"]
        return late_ranks(peer_reports)

    def _after_step(self, watch: ModelWatch, step: int) -> None:
        if watch is not self._watches[0]:
            return
        for listener in tuple(self._listeners):
            try:
                listener(step)
            except Exception as error:
                self._listeners.remove(listener)
                what: Any = getattr(listener, "__self__", listener)
                warnings.warn(
                    f"{type(what).__name__} failed after step {step} and is left out from now on: "
                    f"{type(error).__name__}: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )


def make_observer(options: Options, rank_info: RankInfo) -> Observer:
    """Return the observer of a session, answering Prometheus where that is asked for.

    Raises:
        ValueError: the address of `options.prometheus` cannot be listened on.
    """
    observer = Observer(rank_info, prints_summary=options.summary)
    if options.prometheus is not None:
        observer.serve(*options.prometheus)
    return observer
