"""Observation of a session's models while they train: counters, step times, and their outputs.

All methods may be called from any thread. No failure here ends a training: an output that fails is
warned of once and dropped.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from gradlane.errors import RefusedError, RendezvousError, SessionClosedError
from gradlane.formats.live_state import WaitNow
from gradlane.formats.untrusted import escaped
from gradlane.training.core import Channel
from gradlane.training.log import log
from gradlane.training.monitoring.dashboard import serve_dashboard, url_of
from gradlane.training.monitoring.endpoint import Endpoint, wanted_address
from gradlane.training.monitoring.live import LiveNumbers, LiveView
from gradlane.training.monitoring.metrics import (
    Metrics,
    Reading,
    join_readings,
    metrics_of,
    renumber_steps,
)
from gradlane.training.monitoring.prometheus import serve
from gradlane.training.monitoring.residual_norms import ResidualNorms
from gradlane.training.monitoring.step_timer import StepTimer
from gradlane.training.monitoring.summary import LateRank, late_ranks, summary_line
from gradlane.training.monitoring.tensorboard import ScalarFunction, ScalarLog, ScalarWriter
from gradlane.training.options.codec_choice import CodecChoice
from gradlane.training.options.options import Options
from gradlane.training.rendezvous.deadlock import Wait
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.membership import Membership
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from gradlane.training.rendezvous.signatures import StoreValueRefusedError


class StepNumbers(Protocol):
    """Step numbers of a model."""

    @property
    def step(self) -> int:
        """Number of the current training step."""

    def training_step_of(self, step: int) -> int:
        """Return the training step that a step of the channel was, or came after."""


Counters = Callable[[], dict[str, float]]
AfterStep = Callable[[int], None]
"""Called with the number of a finished training step, before the next one begins."""

_WAITS_SHOWN = 8
"""Most names of tensors that a wait is shown with."""


class ModelWatch:
    """The observation of one model, across channels."""

    def __init__(
        self,
        number: int,
        after_step: Callable[[ModelWatch, int], None],
        *,
        keeps_history: bool = False,
    ) -> None:
        """Start without a channel.

        Args:
            number: of the model, in the order of preparation, from 1.
            after_step: called with this and the number of each finished training step.
            keeps_history: whether the step times of the whole run are kept.
        """
        self.number = number
        self.step_timer = StepTimer(keeps_history=keeps_history)
        self.peer_reports: list[Reading] = []
        """The other ranks' reports at their close, on rank 0."""
        self.name = ""
        """Of the model among those that wait."""
        self.tensors: Sequence[str] = ()
        """Names of the channel's tensors, by number."""
        self.codecs: Sequence[CodecChoice] = ()
        self.residuals: ResidualNorms | None = None
        """Norms of what was not sent yet, where a codec keeps that."""
        self._after_step = after_step
        self._channel: Channel | None = None
        self._steps: StepNumbers | None = None
        self._earlier: Reading = {}
        self._counters: Counters = dict

    def follow(
        self,
        channel: Channel,
        steps: StepNumbers,
        *,
        name: str = "",
        tensors: Sequence[str] = (),
        codecs: Sequence[CodecChoice] = (),
        counters: Counters = dict,
    ) -> None:
        """Observe a channel in place of the previous one, which must be closed.

        Args:
            channel: the model's current one.
            steps: its step numbers.
            name: of the model in a `Wait`.
            tensors: names of the channel's tensors, by number.
            codecs: of the trained tensors.
            counters: returns what is counted beside the channel.
        """
        self._earlier = self.reading()
        self._counters = counters
        self._channel, self._steps = channel, steps
        self.name, self.tensors, self.codecs = name, tensors, codecs
        keeps = any(choice.facts is not None and choice.facts.residual_width for choice in codecs)
        self.residuals = ResidualNorms(channel, tensors) if keeps else None
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
        now: Reading = json.loads(self._channel.metrics_json()) | self._counters()
        now = renumber_steps(now, self._steps.training_step_of)
        now["step"] = self._steps.step
        return join_readings(self._earlier, now) if self._earlier else now

    def training_step_of(self, step: int) -> int:
        """Return the training step that a step of the channel was, or came after."""
        return 0 if self._steps is None else self._steps.training_step_of(step)

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
        try:
            for rank in range(scope.rank_info.world_size):
                record = scope.peek(f"metrics/{rank}", rank)
                # Without a secret any process may have written it: an invalid report is dropped.
                with contextlib.suppress(Exception):
                    peer_reports = json.loads(record or b"")
                    late_ranks([peer_reports])
                    self.peer_reports.append(peer_reports)
        except StoreValueRefusedError as error:
            log.warning("%s; the line at the end lacks it", error)
        except RendezvousError:
            # The store may end with the last training rank.
            return


class Observer:
    """The observation of all models of one session."""

    def __init__(
        self,
        rank_info: RankInfo,
        *,
        prints_summary: bool,
        current_wait: Callable[[], Wait | None] = lambda: None,
        membership: Membership,
    ) -> None:
        """Start without models.

        Args:
            rank_info: this rank.
            prints_summary: whether the first rank prints a line at the end.
            current_wait: returns the wait that the program is in.
            membership: the ranks that train.
        """
        self._rank_info = rank_info
        self._membership = membership
        membership.on_event = self.add_event
        self._prints_summary = prints_summary
        self._watches: list[ModelWatch] = []
        self._numbers: WeakKeyDictionary[object, ModelWatch] = WeakKeyDictionary()
        self._listeners: list[AfterStep] = []
        self._current_wait = current_wait
        self._endpoint: Endpoint | None = None
        self._dashboard: Endpoint | None = None
        self._live: LiveView | None = None
        self._is_forked_child = False

    def watch(
        self,
        model: object,
        channel: Channel,
        steps: StepNumbers,
        *,
        name: str = "",
        tensors: Sequence[str] = (),
        codecs: Sequence[CodecChoice] = (),
        counters: Counters = dict,
    ) -> ModelWatch:
        """Observe a model, or arrays, on a channel; also one that was on another channel before.

        Other arguments as for `ModelWatch.follow`.
        """
        watch = self._numbers.get(model)
        if watch is None:
            watch = ModelWatch(
                len(self._watches) + 1, self._after_step, keeps_history=self._live is not None
            )
            self._numbers[model] = watch
            self._watches.append(watch)
        watch.follow(channel, steps, name=name, tensors=tensors, codecs=codecs, counters=counters)
        self.add_event(f"model {watch.number} is connected: {len(codecs)} tensors", "info")
        return watch

    def add_event(self, text: str, level: str) -> None:
        """Note an event for the live page, if there is one; `level` is as in `Event`."""
        if self._live is not None:
            self._live.add_event(text, level)

    def use_rank_info(self, rank_info: RankInfo) -> None:
        """Be this rank from now on: a rank has joined, and all are numbered anew."""
        self._rank_info = rank_info
        if self._live is not None:
            self._live.use_rank_info(rank_info)

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
        steps = self._main_timer().times()
        rank_info = self._rank_info
        readings = [watch.reading() for watch in list(self._watches)]
        rank, world_size = rank_info.rank, rank_info.world_size
        facts = [choice.facts for choice in self._codec_choices().values()]
        residuals = sum(one is not None and one.residual_width > 0 for one in facts)
        return metrics_of(rank, world_size, steps, readings, self._membership, residuals)

    def _main_timer(self) -> StepTimer:
        """Return the step times of the model with the most steps."""
        timers = [watch.step_timer for watch in list(self._watches)]
        return max(timers, key=lambda timer: timer.count, default=StepTimer())

    def _last_step_begin_ns(self) -> int | None:
        """Return when the last step of any model began, on the timers' clock."""
        begins = [watch.step_timer.last_begin_ns for watch in list(self._watches)]
        return max((begin for begin in begins if begin is not None), default=None)

    def _wait_now(self) -> WaitNow | None:
        """Return the wait that the program is in, or None."""
        wait = self._current_wait()
        watch = next((one for one in list(self._watches) if wait and one.name == wait.model), None)
        if wait is None or watch is None:
            return None
        needed = wait.needed or ()
        names = [watch.tensors[one] for one in needed[:_WAITS_SHOWN] if one < len(watch.tensors)]
        step = watch.training_step_of(wait.step)
        tensors = [escaped(name) for name in names]
        return {"step": step, "tensors": tensors, "tensor_count": len(needed)}

    def _codec_choices(self) -> Mapping[tuple[int, str], CodecChoice]:
        """Return the codec of each trained tensor, by model and name."""
        return {
            (watch.number, choice.tensor): choice
            for watch in list(self._watches)
            for choice in watch.codecs
        }

    def _residual_norms(self) -> Mapping[tuple[int, str], float]:
        """Return the norms of residuals that are known, by model and tensor."""
        return {
            (watch.number, tensor): norm
            for watch in list(self._watches)
            if watch.residuals is not None
            for tensor, norm in watch.residuals.read().items()
        }

    def _live_numbers(self) -> LiveNumbers:
        return LiveNumbers(
            self.metrics(),
            self._main_timer(),
            self._last_step_begin_ns(),
            self._wait_now(),
            self._codec_choices(),
            self._residual_norms(),
        )

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
        self._endpoint = serve(host, port, self.metrics, self._residual_norm)

    def _residual_norm(self) -> float | None:
        norms = self._residual_norms().values()
        return math.hypot(*norms) if norms else None

    @property
    def prometheus_port(self) -> int | None:
        """Port of the Prometheus endpoint, or None."""
        return self._endpoint.port if self._endpoint is not None else None

    def show(self, host: str, port: int, options: Options) -> None:
        """Serve a live page.

        Raises:
            ValueError: the address cannot be listened on.
        """
        view = LiveView(self._live_numbers, options, self._rank_info)
        try:
            self._dashboard = serve_dashboard(host, port, view, self._rank_info.rank)
        except ValueError:
            view.forget()
            raise
        self._live = view

    @property
    def dashboard_url(self) -> str | None:
        """URL of the live page, or None."""
        return url_of(self._dashboard) if self._dashboard is not None else None

    def close(self, ending: str, ddp_s: float | None = None) -> None:
        """Close the endpoints and print the summary line, if it is enabled and there were steps.

        Args:
            ending: `closed`, or the reason that the session was given up for.
            ddp_s: seconds of a step with DDP, as simulated for the plan, or None.
        """
        if self._live is not None:
            self._live.end(ending)
        self._close_endpoints(Endpoint.close)
        if not (self._prints_summary and self._membership.leads):
            return
        metrics = self.metrics()
        if metrics["steps"]["count"] > 0:
            # The end may come in a signal handler, in the middle of another print.
            with contextlib.suppress(RuntimeError, OSError, ValueError):
                line = summary_line(metrics, self._late_ranks(metrics), ddp_s)
                log.info("%s", escaped(line))

    def forget_in_child(self) -> None:
        """Disable all outputs in a forked child."""
        self._is_forked_child = True
        self._prints_summary = False
        self._listeners.clear()
        if self._live is not None:
            self._live.forget()
        self._close_endpoints(Endpoint.forget_in_child)

    def _close_endpoints(self, close: Callable[[Endpoint], None]) -> None:
        endpoints = (self._dashboard, self._endpoint)
        self._dashboard = self._endpoint = None
        for endpoint in endpoints:
            if endpoint is not None:
                close(endpoint)

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


def make_observer(
    options: Options,
    rank_info: RankInfo,
    current_wait: Callable[[], Wait | None],
    membership: Membership,
) -> Observer:
    """Return the observer of a session, with the endpoints that the options ask for.

    Args:
        options: the session's.
        rank_info: this rank.
        current_wait: returns the wait that the program is in.
        membership: the ranks that train.

    Raises:
        ValueError: an address of `options.monitoring` cannot be listened on, or is missing.
    """
    monitoring = options.monitoring
    if monitoring.dashboard_everywhere and monitoring.dashboard is None:
        raise RefusedError(
            "dashboard_everywhere is on and there is no dashboard: give its port, too"
        )
    observer = Observer(
        rank_info,
        prints_summary=monitoring.summary,
        current_wait=current_wait,
        membership=membership,
    )
    address = wanted_address(monitoring.prometheus, os.environ, "prometheus")
    if address is not None:
        observer.serve(*address)
    # Rank 0 has the port as it is given; else ranks of a node take one each.
    environment = os.environ if monitoring.dashboard_everywhere else {}
    address = wanted_address(monitoring.dashboard, environment, "dashboard")
    if address is not None and (rank_info.rank == 0 or monitoring.dashboard_everywhere):
        try:
            observer.show(*address, options)
        except ValueError:
            observer.close("not begun")
            raise
    return observer
