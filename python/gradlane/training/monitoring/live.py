"""The state of a session for its live page, made when someone looks and never otherwise.

Each reading is kept as a sample for some seconds, so that the next one has rates and recent waits.
Events are noted as they happen: records of the logger `gradlane`, models that were connected,
checkpoints, and the end; refused connections when someone looks.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gradlane.formats.live_state import (
    STATE_FORMAT,
    STATE_VERSION,
    CodecRow,
    Event,
    LayerRow,
    LiveState,
    RankRow,
    ResidualRow,
    WaitNow,
    Window,
)
from gradlane.formats.untrusted import escaped
from gradlane.formats.version import __version__
from gradlane.training.log import log
from gradlane.training.monitoring.metrics import Metrics, waited_s
from gradlane.training.monitoring.step_timer import StepTimer
from gradlane.training.options.codec_choice import CodecChoice
from gradlane.training.options.codec_options import RAW
from gradlane.training.options.options import Options
from gradlane.training.rendezvous.environment import RankInfo

WINDOW_S = 10.0
"""Length of the window of rates, if someone looked so long ago."""
EVENTS_MAX = 200
ROWS_MAX = 32
"""Most rows of layers and of residuals."""
_TEXT_CHARS = 500
_STALL_MIN_S = 10.0
_STALL_STEPS = 10
"""A step that takes this many median steps, and `_STALL_MIN_S`, counts as stalled."""

LayerKey = tuple[int, str]


@dataclass(frozen=True)
class LiveNumbers:
    """What a session knows of itself now, as far as its live state is made of it."""

    metrics: Metrics
    timer: StepTimer
    """Step times of the model with the most steps."""
    last_step_begin_ns: int | None
    """When the last step of any model began, on the timers' clock."""
    wait: WaitNow | None
    """The wait that the program is in."""
    codecs: Mapping[LayerKey, CodecChoice]
    """Codec of each trained tensor, by model and name."""
    residual_norms: Mapping[LayerKey, float]
    """Norms of residuals that are known, by model and tensor."""


@dataclass(frozen=True)
class _Sample:
    """The counters that rates are taken of."""

    at_s: float = 0.0
    steps: int = 0
    stepping_s: float = 0.0
    waiting_s: float = 0.0
    layers: Mapping[LayerKey, float] = field(default_factory=dict)
    tx_bytes: Sequence[int] = ()
    rx_bytes: Sequence[int] = ()
    last_counts: Sequence[int] = ()
    late_s: Sequence[float] = ()
    gathered: int = 0


class LiveView:
    """Makes the live state of one session."""

    def __init__(
        self,
        read: Callable[[], LiveNumbers],
        options: Options,
        rank_info: RankInfo,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """Start with the session; records of the logger are events until `end`.

        Args:
            read: returns the numbers of now.
            options: the session's.
            rank_info: this rank.
            clock_ns: the clock of the step timers.
        """
        self._read = read
        self._options = options
        self._rank_info = rank_info
        self._clock_ns = clock_ns
        self._start_ns = clock_ns()
        self._ending = ""
        self._refused = 0
        self._events: deque[Event] = deque(maxlen=EVENTS_MAX)
        self._samples: deque[_Sample] = deque([_Sample()])
        self._handler = _EventHandler(self.add_event)
        log.addHandler(self._handler)

    def use_rank_info(self, rank_info: RankInfo) -> None:
        """Be this rank from now on."""
        self._rank_info = rank_info

    def add_event(self, text: str, level: str = "info") -> None:
        """Note an event of now; from any thread.

        Args:
            text: one line; what a terminal would obey is escaped.
            level: `info`, `warning` or `error`.
        """
        text = escaped(text, _TEXT_CHARS)
        self._events.append({"at_s": self._uptime_s(), "level": level, "text": text})

    def end(self, ending: str) -> None:
        """Note how the session has ended: `closed`, or the reason that it was given up for."""
        self.forget()
        self.add_event(f"session {ending}", "info" if ending == "closed" else "error")
        self._ending = escaped(ending, _TEXT_CHARS)

    def forget(self) -> None:
        """Take no further records of the logger."""
        log.removeHandler(self._handler)

    def state(self) -> LiveState:
        """Return the state of now; called by one thread, at most once a second."""
        numbers = self._read()
        metrics, timer, norms = numbers.metrics, numbers.timer, numbers.residual_norms
        self._note_refusals(metrics)
        now = self._sample(metrics)
        before = self._before(now)
        begin_ns = numbers.last_step_begin_ns
        quiet_s = now.at_s if begin_ns is None else (self._clock_ns() - begin_ns) / 1e9
        limit_s = max(_STALL_MIN_S, _STALL_STEPS * metrics["steps"]["median_s"])
        layers = _layer_rows(metrics, before, now)
        residuals: list[ResidualRow] = [
            {"model": model, "name": _shown(name), "norm": norm}
            for (model, name), norm in sorted(norms.items(), key=lambda one: -one[1])
        ]
        rank_info, options = self._rank_info, self._options
        return {
            "format": STATE_FORMAT,
            "version": STATE_VERSION,
            "gradlane": __version__,
            "job": _shown(rank_info.job),
            "restart": rank_info.restart,
            "rank": rank_info.rank,
            "world_size": rank_info.world_size,
            "serving": rank_info.serving,
            "strategy": options.strategy.name,
            "update": options.update_place,
            "stragglers": options.stragglers.rule,
            "uptime_s": now.at_s,
            "ending": self._ending,
            "step": metrics["step"],
            "quiet_s": quiet_s,
            "is_stalled": not self._ending and quiet_s > limit_s,
            "wait": numbers.wait,
            "steps": metrics["steps"],
            "window": _window(before, now),
            "recent": timer.recent_rows(self._start_ns),
            "history": timer.history_rows(self._start_ns),
            "layers": layers[:ROWS_MAX],
            "layer_count": len(layers),
            "ranks": self._rank_rows(metrics, before, now),
            "codecs": _codec_rows(numbers.codecs, norms),
            "codec_ratio": metrics["codec_ratio"],
            "raw_bytes": metrics["raw_bytes"],
            "encoded_bytes": metrics["encoded_bytes"],
            "residuals": residuals[:ROWS_MAX],
            "residual_count": len(residuals),
            "clip_steps": metrics["clip_steps"],
            "clipped_steps": metrics["clipped_steps"],
            "clip_factor": metrics["clip_factor"],
            "queued_bytes": metrics["queued_bytes"],
            "queued_jobs": metrics["queued_jobs"],
            "scratch_bytes": metrics["scratch_bytes"],
            "io_cpu_s": metrics["io_cpu_s"],
            "work_cpu_s": metrics["work_cpu_s"],
            "plan_version": metrics["plan_version"],
            "refused_connections": metrics["refused_connections"],
            "events": list(self._events),
        }

    def _uptime_s(self) -> float:
        return (self._clock_ns() - self._start_ns) / 1e9

    def _sample(self, metrics: Metrics) -> _Sample:
        steps = metrics["steps"]
        elapsed_s = steps["mean_s"] * steps["count"]
        layers = {(one["model"], one["name"]): waited_s(one) for one in metrics["layer_waits"]}
        return _Sample(
            self._uptime_s(),
            steps["count"],
            elapsed_s,
            steps["wait_share"] * elapsed_s,
            layers,
            [one["tx_bytes"] for one in metrics["peers"]],
            [one["rx_bytes"] for one in metrics["peers"]],
            [one["last_count"] for one in metrics["stragglers"]],
            [one["late_s"] for one in metrics["stragglers"]],
            metrics["gathered_slices"],
        )

    def _before(self, now: _Sample) -> _Sample:
        """Return the sample that the window begins with, and keep the one of now."""
        while len(self._samples) > 1 and self._samples[1].at_s <= now.at_s - WINDOW_S:
            self._samples.popleft()
        before = self._samples[0]
        self._samples.append(now)
        return before

    def _note_refusals(self, metrics: Metrics) -> None:
        """Note connections that the core has refused since someone last looked."""
        count = metrics["refused_connections"] - self._refused
        if count < 1:
            return
        self._refused = metrics["refused_connections"]
        last = [refusal for one in metrics["channels"] for refusal in one.get("refusals", ())][-1:]
        named = "".join(f"; the last one from {one['address']}: {one['reason']}" for one in last)
        self.add_event(f"connections refused: {count}{named}", "warning")

    def _rank_rows(self, metrics: Metrics, before: _Sample, now: _Sample) -> list[RankRow]:
        length_s = now.at_s - before.at_s
        gathered = now.gathered - before.gathered
        rows: list[RankRow] = []
        for rank in range(self._rank_info.ranks):

            def grown(name: str, rank: int = rank) -> float:
                """Return the growth of a rank's counter in the window."""
                return _at(getattr(now, name), rank) - _at(getattr(before, name), rank)

            peer = metrics["peers"][rank] if rank < len(metrics["peers"]) else None
            late = metrics["stragglers"][rank] if rank < len(metrics["stragglers"]) else None
            out = metrics["left_out"][rank] if rank < len(metrics["left_out"]) else None
            count = grown("last_counts")
            rows.append(
                {
                    "rank": rank,
                    "role": self._role_of(rank),
                    "tx_bytes": peer["tx_bytes"] if peer else 0,
                    "rx_bytes": peer["rx_bytes"] if peer else 0,
                    "tx_bytes_per_s": grown("tx_bytes") / length_s if length_s > 0 else 0.0,
                    "rx_bytes_per_s": grown("rx_bytes") / length_s if length_s > 0 else 0.0,
                    "queued_bytes": peer["queued_bytes"] if peer else 0,
                    "in_flight_bytes": peer["in_flight_bytes"] if peer else 0,
                    "owned_bytes": peer["owned_bytes"] if peer else 0,
                    "last_share": late["last_share"] if late else 0.0,
                    "late_s_mean": late["late_s_mean"] if late else 0.0,
                    "recent_last_share": count / gathered if gathered > 0 else 0.0,
                    "recent_late_s_mean": grown("late_s") / count if count > 0 else 0.0,
                    "left_out_steps": out["left_out_steps"] if out else 0,
                }
            )
        return rows

    def _role_of(self, rank: int) -> str:
        if rank == self._rank_info.rank:
            return "self"
        return "trains" if rank < self._rank_info.world_size else "serves"


class _EventHandler(logging.Handler):
    """Turns records of the logger into events."""

    def __init__(self, add_event: Callable[[str, str], None]) -> None:
        super().__init__()
        self._add_event = add_event

    def emit(self, record: logging.LogRecord) -> None:
        """Note one record."""
        level = "info"
        if record.levelno >= logging.WARNING:
            level = "error" if record.levelno >= logging.ERROR else "warning"
        self._add_event(record.getMessage(), level)


def _at(counters: Sequence[float], rank: int) -> float:
    return counters[rank] if rank < len(counters) else 0


def _shown(name: str) -> str:
    return escaped(name, _TEXT_CHARS)


def _window(before: _Sample, now: _Sample) -> Window:
    steps = now.steps - before.steps
    stepping_s = now.stepping_s - before.stepping_s
    waiting_s = now.waiting_s - before.waiting_s
    return {
        "length_s": now.at_s - before.at_s,
        "steps": steps,
        "step_s": stepping_s / steps if steps > 0 else 0.0,
        "wait_share": min(1.0, max(0.0, waiting_s / stepping_s)) if stepping_s > 0 else 0.0,
    }


def _layer_rows(metrics: Metrics, before: _Sample, now: _Sample) -> list[LayerRow]:
    """Return the layers that were waited for, those with the longest recent waits first."""
    steps = max(1, now.steps - before.steps)
    recent = {key: wait_s - before.layers.get(key, 0.0) for key, wait_s in now.layers.items()}
    all_recent_s = sum(recent.values())
    rows: list[LayerRow] = []
    for one in metrics["layer_waits"]:
        wait_s = recent[one["model"], one["name"]]
        rows.append(
            {
                "model": one["model"],
                "name": _shown(one["name"]),
                "wait_s": waited_s(one),
                "wait_share": one["wait_share"],
                "wait_s_max": one["wait_s_max"],
                "max_step": one["max_step"],
                "recent_wait_s": wait_s / steps,
                "recent_share": wait_s / all_recent_s if all_recent_s > 0 else 0.0,
            }
        )
    return sorted(rows, key=lambda row: (row["recent_wait_s"], row["wait_s"]), reverse=True)


def _codec_rows(
    choices: Mapping[LayerKey, CodecChoice], norms: Mapping[LayerKey, float]
) -> list[CodecRow]:
    by_codec: dict[str, list[LayerKey]] = {}
    for key, choice in choices.items():
        by_codec.setdefault(choice.codec, []).append(key)
    rows: list[CodecRow] = []
    for codec, keys in by_codec.items():
        squares = [norms[key] ** 2 for key in keys if key in norms]
        norm = sum(squares) ** 0.5 if squares else None
        rows.append({"codec": codec, "tensors": len(keys), "residual_norm": norm})
    return sorted(rows, key=lambda row: row["codec"] == RAW)
