"""Measures the transport: goodput, processor time and urgency of exchanges without compute.

Everything runs on one emulated cluster, interleaved: plain TCP streams, gradlane and Gloo take
turns on the same shaped ports with the same gradients, and ratios are taken within a repeat. Each
turn has processes of its own: where their memory lies moves processor time by several per cent for
as long as they live, and threads of the one that rests are not always at rest (Gloo's wake up a
hundred times a second). Rates and times are real: nothing is dilated.
"""

from __future__ import annotations

import os
import secrets
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any

from gradlane.lab.cluster.keep_cpus_awake import cpus_kept_awake
from gradlane.lab.cluster.namespaces import EmulatedCluster
from gradlane.lab.cluster.ranks import RankPool
from gradlane.lab.runs.rows import measures_machine
from gradlane.lab.transport.options import FLOAT_BYTES, TransportOptions
from gradlane.lab.transport.trace import UrgentSlice, urgent_slices
from gradlane.planning.simulation.bound import port_bytes
from gradlane.planning.simulation.grid import GOODPUT_SHARE

GOODPUT_SHARE_TARGET = 0.97
CPU_RATIO_TARGET = 1.25
URGENT_MS_TARGET = 5.0

URGENT_ELEMS = 50_000
URGENT_PER_STEP = 4

_PROGRAM = "gradlane.lab.transport.node"
_GB = 1e9
_STREAM = {"ramp_s": 0.5, "window_s": 1.5}
_URGENT_FIRST_SHARE, _URGENT_LAST_SHARE = 0.15, 0.6

_SPANS = (
    "first_left_ms",
    "last_left_ms",
    "received_ms",
    "less_urgent_same_peer",
    "less_urgent_any_peer",
    "less_urgent_within",
    "less_urgent_until_last",
)
"""Fields of `UrgentSlice` whose median and maximum a row has."""


@dataclass(frozen=True)
class Turn:
    """Measured steps of one implementation, over all ranks.

    Attributes:
        step_s: mean time of a step, from the slowest rank's first start to its last end.
        port_bytes_per_step: payload and headers of gradlane's frames in a step, mean over ports
            and directions; for Gloo, which counts none, the payload.
        goodput_bps: those bits over that time.
        cpu_s_per_gb: user and system seconds of a rank's process for each 10^9 payload bytes
            that it sends, mean over ranks.
        user_s_per_gb: the user part.
        system_s_per_gb: the system part.
        machine_s_per_gb: busy seconds of the whole machine, others' work included, over the same
            bytes of all ranks.
        softirq_s_per_gb: the part of it that the kernel spent in network interrupts on nobody's
            account.
        cpu_share: share of the machine's processors that was busy.
        stolen_share: share of their time that went to other virtual machines.
        wire_bytes_per_step: bytes that the kernel counted on a port, in one direction.
    """

    step_s: float
    port_bytes_per_step: float
    goodput_bps: float
    cpu_s_per_gb: float
    user_s_per_gb: float
    system_s_per_gb: float
    machine_s_per_gb: float
    softirq_s_per_gb: float
    cpu_share: float
    stolen_share: float
    wire_bytes_per_step: float


@dataclass(frozen=True)
class RunConditions:
    """The cluster and the machine of a measurement."""

    workers: int
    rate_bps: int
    settings: dict[str, Any]
    load_average: float

    @staticmethod
    def of(options: TransportOptions) -> RunConditions:
        """Return those of now."""
        return RunConditions(
            options.workers, options.rate_bps, options.effective_settings, os.getloadavg()[0]
        )


@dataclass(frozen=True)
class ExchangeRow:
    """One repeat of streams, gradlane and Gloo, or the medians over repeats.

    Attributes:
        conditions: of the repeat.
        repeat: its number; None: these are medians.
        stream_goodput_bps: what plain TCP streams carried.
        goodput_share: gradlane's goodput over that of the streams.
        gloo_goodput_share: Gloo's.
        cpu_ratio: gradlane's processor seconds a gigabyte over Gloo's.
        cpu_bound: whether the machine was measured, as `measures_machine` says.
        gradlane: its turn.
        gloo: its turn.
    """

    conditions: RunConditions
    repeat: int | None
    stream_goodput_bps: float
    goodput_share: float
    gloo_goodput_share: float
    cpu_ratio: float
    cpu_bound: bool
    gradlane: Turn
    gloo: Turn

    @staticmethod
    def of(
        conditions: RunConditions, repeat: int, gradlane: Turn, gloo: Turn, stream_bps: float
    ) -> ExchangeRow:
        """Return a repeat's numbers; ratios are taken within it."""
        return ExchangeRow(
            conditions=conditions,
            repeat=repeat,
            stream_goodput_bps=stream_bps,
            goodput_share=gradlane.goodput_bps / stream_bps,
            gloo_goodput_share=gloo.goodput_bps / stream_bps,
            cpu_ratio=gradlane.cpu_s_per_gb / gloo.cpu_s_per_gb,
            cpu_bound=any(
                measures_machine(turn.cpu_share, turn.stolen_share) for turn in (gradlane, gloo)
            ),
            gradlane=gradlane,
            gloo=gloo,
        )

    @staticmethod
    def median(repeats: Sequence[ExchangeRow]) -> ExchangeRow:
        """Return the medians over repeats, of ratios too."""
        middle: ExchangeRow = _median(repeats)
        return replace(middle, repeat=None)

    @property
    def goodput_share_met(self) -> bool:
        """Whether gradlane's goodput is near enough to that of the streams."""
        return self.goodput_share >= GOODPUT_SHARE_TARGET

    @property
    def cpu_ratio_met(self) -> bool:
        """Whether gradlane takes little enough processor time."""
        return self.cpu_ratio <= CPU_RATIO_TARGET

    def to_json(self) -> dict[str, Any]:
        """Return the row of the file; medians are held against the targets."""
        content = asdict(self)
        row: dict[str, Any] = {
            "measurement": "exchange" if self.repeat is not None else "exchange_median",
            **content.pop("conditions"),
        }
        turns = {name: content.pop(name) for name in ("gradlane", "gloo")}
        row |= content
        for name, turn in turns.items():
            row |= {f"{name}_{key}": value for key, value in turn.items()}
        if self.repeat is not None:
            return row
        return {
            **row,
            "goodput_share_target": GOODPUT_SHARE_TARGET,
            "goodput_share_met": self.goodput_share_met,
            "cpu_ratio_target": CPU_RATIO_TARGET,
            "cpu_ratio_met": self.cpu_ratio_met,
        }


def _median(values: Sequence[Any]) -> Any:
    """Return the medians of all numbers of some rows; of flags whether one is set."""
    first = values[0]
    if is_dataclass(first) and not isinstance(first, type):
        names = [one.name for one in fields(first)]
        middle = {name: _median([getattr(value, name) for value in values]) for name in names}
        return replace(first, **middle)
    if isinstance(first, bool):
        return any(values)
    return float(statistics.median(values)) if isinstance(first, float) else first


@dataclass(frozen=True)
class UrgencyRow:
    """Urgent slices handed over in one way, seen in one direction."""

    conditions: RunConditions
    way: str
    direction: str
    samples: Sequence[UrgentSlice]

    @property
    def saturated(self) -> list[UrgentSlice]:
        """Slices that found their port saturated."""
        return [item for item in self.samples if item.saturated]

    def middle_and_most(self, name: str) -> tuple[float | None, float | None]:
        """Return median and maximum of one of the slices' numbers over saturated ports."""
        values = [value for item in self.saturated if (value := getattr(item, name)) is not None]
        return (statistics.median(values), max(values)) if values else (None, None)

    def to_json(self) -> dict[str, Any]:
        """Return the row of the file."""
        spans: dict[str, float | None] = {}
        for name in _SPANS:
            spans[f"{name}_median"], spans[f"{name}_max"] = self.middle_and_most(name)
        return {
            "measurement": "urgency",
            **asdict(self.conditions),
            "way": self.way,
            "direction": self.direction,
            "slices": len(self.samples),
            "saturated_slices": len(self.saturated),
            **spans,
            "left_ms_target": URGENT_MS_TARGET,
            "samples": [asdict(item) for item in self.samples],
        }


TransportRow = ExchangeRow | UrgencyRow


def summarize_turn(
    results: Sequence[dict[str, Any]], implementation: str, steps: int, sent_bytes_per_step: float
) -> Turn:
    """Compute a turn's numbers from what the ranks counted.

    Args:
        results: one a rank, as `node.Exchange.run` returns them.
        implementation: `gradlane` or `gloo`.
        steps: measured steps.
        sent_bytes_per_step: payload bytes that a rank sends in a step.
    """
    start_s = max(result["boundaries_s"][0] for result in results)
    end_s = max(result["boundaries_s"][-1] for result in results)
    step_s = (end_s - start_s) / steps

    def mean(name: str) -> float:
        return statistics.fmean(result[name] for result in results)

    carried_bytes = sent_bytes_per_step
    if implementation == "gradlane":
        carried_bytes = (mean("gradlane_tx_bytes") + mean("gradlane_rx_bytes")) / 2 / steps
    sent_gb = steps * sent_bytes_per_step / _GB
    machine = results[0]
    return Turn(
        step_s=step_s,
        port_bytes_per_step=carried_bytes,
        goodput_bps=8 * carried_bytes / step_s,
        cpu_s_per_gb=(mean("user_s") + mean("system_s")) / sent_gb,
        user_s_per_gb=mean("user_s") / sent_gb,
        system_s_per_gb=mean("system_s") / sent_gb,
        machine_s_per_gb=machine["machine_busy_s"] / sent_gb / len(results),
        softirq_s_per_gb=machine["machine_softirq_s"] / sent_gb / len(results),
        cpu_share=machine["machine_busy_s"] / max(machine["machine_total_s"], 1e-9),
        stolen_share=machine["machine_stolen_s"] / max(machine["machine_total_s"], 1e-9),
        wire_bytes_per_step=(mean("sent_bytes") + mean("received_bytes")) / 2 / steps,
    )


def run_transport(
    options: TransportOptions, on_phase: Callable[[str], None] = lambda text: None
) -> list[TransportRow]:
    """Measure everything and return the rows, those that compare last.

    Args:
        options: what to measure.
        on_phase: told what is being done.

    Raises:
        LabError: the cluster could not be built, or a rank failed.
    """
    exchanges: list[ExchangeRow] = []
    urgent: list[UrgencyRow] = []
    on_phase("building the cluster")
    with cpus_kept_awake(), EmulatedCluster(options.workers, options.rate_bps) as cluster:
        for repeat in range(options.repeat):
            exchanges.append(_exchange(options, cluster, on_phase, repeat))
        if options.urgent_trials:
            on_phase(f"urgent slices, {options.urgent_trials} a rank")
            with RankPool(cluster, program=_PROGRAM) as pool:
                urgent = _Measurement(options, cluster, pool).urgency()
    medians = [ExchangeRow.median(exchanges)] if exchanges else []
    return [*exchanges, *medians, *urgent]


def _exchange(
    options: TransportOptions,
    cluster: EmulatedCluster,
    on_phase: Callable[[str], None],
    repeat: int,
) -> ExchangeRow:
    """Let streams, gradlane and Gloo take turns, once."""
    about = f"repeat {repeat + 1} of {options.repeat}"
    on_phase(f"{about}: TCP streams")
    with RankPool(cluster, program=_PROGRAM) as pool:
        stream_bps = pool.stream_bps(**_STREAM)
    turns: dict[str, Turn] = {}
    # Who comes second finds the machine as the first one left it: they alternate.
    for implementation in ("gradlane", "gloo") if repeat % 2 == 0 else ("gloo", "gradlane"):
        on_phase(f"{about}: {implementation}")
        with RankPool(cluster, program=_PROGRAM) as pool:
            turns[implementation] = _Measurement(options, cluster, pool).turn(implementation)
    conditions = RunConditions.of(options)
    return ExchangeRow.of(conditions, repeat, turns["gradlane"], turns["gloo"], stream_bps)


@dataclass(frozen=True)
class _Measurement:
    """The ranks of one cluster, asked one thing after another."""

    options: TransportOptions
    cluster: EmulatedCluster
    pool: RankPool

    def _open(self, implementation: str, tensor_elems: Sequence[int], **named: Any) -> None:
        self.pool.ask_all(
            "open",
            implementation=implementation,
            job=f"transport-{secrets.token_hex(4)}",
            addresses=self.cluster.addresses,
            store_port=self.cluster.next_port(),
            tensor_elems=list(tensor_elems),
            **named,
        )

    def turn(self, implementation: str) -> Turn:
        """Exchange the gradients with one implementation."""
        options = self.options
        named = {"settings": options.settings or {}} if implementation == "gradlane" else {}
        self._open(implementation, options.tensor_elems, **named)
        results = self.pool.ask_all("run", steps=options.steps, warmup=options.warmup)
        self.pool.ask_all("close")
        return summarize_turn(results, implementation, options.steps, options.sent_bytes_per_step)

    def urgency(self) -> list[UrgencyRow]:
        """Hand over urgent slices while a large tensor saturates the ports."""
        options = self.options
        large_elems = round(options.urgent_megabytes * 1e6 / FLOAT_BYTES)
        tensor_elems = [URGENT_ELEMS] * URGENT_PER_STEP + [large_elems]
        self._open(
            "gradlane", tensor_elems, settings={**(options.settings or {}), "frame_trace": True}
        )
        sent_bytes = port_bytes(large_elems * FLOAT_BYTES, workers=options.workers)
        busy_s = 8 * sent_bytes / (options.rate_bps * GOODPUT_SHARE)
        gap_share = (_URGENT_LAST_SHARE - _URGENT_FIRST_SHARE) / (URGENT_PER_STEP - 1)
        # The last tensor's gradient comes first, as in backward.
        shares = [_URGENT_LAST_SHARE - gap_share * tensor for tensor in range(URGENT_PER_STEP)]
        rows: list[UrgencyRow] = []
        for way, stagger_s in (
            ("one rank at a time", gap_share * busy_s / options.workers),
            ("all ranks at once", 0.0),
        ):
            results = self.pool.ask_all(
                "urgency",
                steps=-(-options.urgent_trials // URGENT_PER_STEP),
                busy_s=busy_s,
                ready_shares=shares,
                stagger_s=stagger_s,
            )
            slices = urgent_slices(
                [list(map(tuple, result["trace"])) for result in results],
                [list(map(tuple, result["ready_ns"])) for result in results],
            )
            conditions = RunConditions.of(options)
            for direction in ("push", "reply"):
                chosen = [item for item in slices if item.direction == direction]
                rows.append(UrgencyRow(conditions, way, direction, chosen))
        self.pool.ask_all("close")
        return rows
