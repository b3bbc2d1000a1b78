"""Observation of a session's models while they train: counters, step times, and their outputs.

All methods may be called from any thread. No failure here ends a training: an output that fails is
warned of once and dropped.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from gradlane.errors import RendezvousError, SessionClosedError
from gradlane.formats.untrusted import escaped
from gradlane.training.core import Channel
from gradlane.training.log import log
from gradlane.training.monitoring.endpoint import Endpoint
from gradlane.training.monitoring.metrics import (
    Metrics,
    Reading,
    join_readings,
    metrics_of,
    renumber_steps,
)
from gradlane.training.monitoring.prometheus import serve, wanted_address
from gradlane.training.monitoring.step_timer import StepTimer
from gradlane.training.monitoring.summary import LateRank, late_ranks, summary_line
from gradlane.training.monitoring.tensorboard import ScalarFunction, ScalarLog, ScalarWriter
from gradlane.training.options.options import Options
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.rendezvous import RendezvousScope


class StepNumbers(Protocol):
    """Step numbers of a model."""

    @property
    def step(self) -> int:
        """Number of the current training step."""

    def training_step_of(self, step: int) -> int:
        """Return the training step that a step of the channel was, or came after."""


AfterStep = Callable[[int], None]
"""Called with the number of a finished training step, before the next one begins."""


class ModelWatch:
    """The observation of one model, across channels."""

    def __init__(self, number: int, after_step: Callable[[ModelWatch, int], None]) -> None:
        """Start without a channel.

        Args:
            number: of the model, in the order of preparation, from 1.
            after_step: called with this and the number of each finished training step.
        """
        self.number = number
        self.step_timer = StepTimer()
        self.peer_reports: list[Reading] = []
        """The other ranks' reports at their close, on rank 0."""
        self._after_step = after_step
        self._channel: Channel | None = None
        self._steps: StepNumbers | None = None
        self._earlier: Reading = {}

    def follow(self, channel: Channel, steps: StepNumbers) -> None:
        """Observe a channel in place of the previous one, which must be closed."""
        self._earlier = self.reading()
        self._channel, self._steps = channel, steps
        self.step_timer.use_channel(channel.waited_ns)

    def step_begins(self, step: int) -> None:
        """Record that a training step begins; all earlier ones are finished."""
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
        """Publish for rank 0 how late contributions to this rank's slices were."""
        if scope.rank_info.world_size == 1:
            return
        reading = self.reading()
        record = {name: reading.get(name) for name in ("stragglers", "gathered_slices")}
        with contextlib.suppress(RendezvousError):
            scope.put(f"metrics/{scope.rank_info.rank}", json.dumps(record))

    def collect_lateness(self, scope: RendezvousScope) -> None:
        """Collect the other ranks' reports on rank 0, once they have said goodbye."""
        if scope.rank_info.rank != 0 or scope.rank_info.world_size == 1:
            return
        self.peer_reports = []
        with contextlib.suppress(RendezvousError):
            for rank in range(scope.rank_info.world_size):
                record = scope.peek(f"metrics/{rank}")
                # Any process may have written it: an invalid report is dropped.
                with contextlib.suppress(Exception):
                    peer_reports = json.loads(record or b"")
                    late_ranks([peer_reports])
                    self.peer_reports.append(peer_reports)


class Observer:
    """The observation of all models of one session."""

    def __init__(self, rank_info: RankInfo, *, prints_summary: bool) -> None:
        """Start without models.

        Args:
            rank_info: this rank.
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
        """Observe a model, or arrays, on a channel; also one that was on another channel before."""
        watch = self._numbers.get(model)
        if watch is None:
            watch = ModelWatch(len(self._watches) + 1, self._after_step)
            self._numbers[model] = watch
            self._watches.append(watch)
        watch.follow(channel, steps)
        return watch

    def add_step_listener(self, after_step: AfterStep) -> None:
        """Call a function after each training step of the first model."""
        self._listeners.append(after_step)

    def metrics(self) -> Metrics:
        """Return all metrics.

        Raises:
            SessionClosedError: in a forked child, which has no counters.
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

    def log_to(self, writer: ScalarWriter | ScalarFunction, every: int) -> None:
        """Write scalars after every so many training steps of the first model.

        Raises:
            ValueError: `every` is below 1.
            TypeError: the writer is no function and has no `add_scalar`.
        """
        self.add_step_listener(ScalarLog(writer, every, self.metrics).after_step)

    def serve(self, host: str, port: int) -> None:
        """Serve the metrics to Prometheus.

        Raises:
            ValueError: the address cannot be listened on.
        """
        self._endpoint = serve(host, port, self.metrics)

    @property
    def prometheus_port(self) -> int | None:
        """Port of the Prometheus endpoint, or None."""
        return self._endpoint.port if self._endpoint is not None else None

    def close(self) -> None:
        """Close the endpoint and print the summary line, if it is enabled and there were steps."""
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
                log.info("%s", escaped(line))

    def forget_in_child(self) -> None:
        """Disable all outputs in a forked child."""
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
    """Return the observer of a session, with a Prometheus endpoint if the options ask for one.

    Raises:
        ValueError: the address of `options.monitoring.prometheus` cannot be listened on.
    """
    observer = Observer(rank_info, prints_summary=options.monitoring.summary)
    address = wanted_address(options.monitoring.prometheus, os.environ)
    if address is not None:
        observer.serve(*address)
    return observer
