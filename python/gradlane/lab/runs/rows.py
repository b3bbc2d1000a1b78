"""Rows of the lab: one run of one strategy, measured or simulated, from its making to its page.

A row's times are nominal, dilation divided out, unless their name begins with `wall_`; processor
seconds are real, since the bytes that cause them are. `summarize` fills in whatever compares one
row with others, so text and file show the same numbers.
"""

from __future__ import annotations

import errno
import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from gradlane.formats.atomic_io import atomic_write
from gradlane.formats.rates import format_rate
from gradlane.lab.cluster.errors import LabError
from gradlane.lab.runs.strategy import parse_strategy
from gradlane.lab.runs.traffic import Activity, Balance
from gradlane.training.options.codec_options import RAW

K = TypeVar("K")
T = TypeVar("T")
MEASURED = "measured"
"""Source of a row that was run."""
SIMULATED = "simulated"
"""Source of a row that was not run."""
CEILING = "none"
"""The strategy that measures compute time alone."""
CPU_BOUND_SHARE = 0.8
"""Above this busy share of the machine's processors, a row measures them."""
STOLEN_SHARE_MAX = 0.03
"""Above this share of their time a row measures other virtual machines on the same host: ports are
shaped by timers, and ranks wake up late. With 10 to 25 % the goodput of plain TCP streams was up to
11 % lower, and steps took up to a quarter longer; the remedy is `keep_cpus_awake.py`."""
NO_EVIDENCE = (
    f"over {CPU_BOUND_SHARE:.0%} of this machine's processors busy, or over {STOLEN_SHARE_MAX:.0%} "
    "of their time taken by other virtual machines: no evidence"
)
ROW_COLUMNS = (
    "source",
    "workload",
    "strategy",
    "repeat",
    "workers",
    "rate_bps",
    "dilation",
    "slice_elems",
    "codec",
    "steps",
    "samples_per_s",
    "step_s_median",
    "wall_step_s_median",
    "compute_s",
    "bound_step_s",
    "step_over_bound",
    "tx_bytes_per_step",
    "link_utilization",
    "cpu_s_per_step",
    "cpu_share",
    "stolen_share",
    "cpu_bound",
    "params_equal",
    "param_digest",
)
"""Fields that tables of all rows show first, in this order; one that no row has is left out."""


def text_of_no_evidence(rows: Iterable[Row]) -> str:
    """Return how many of the measured rows are no evidence, and why; empty if all are."""
    runs = [row for row in rows if not row.is_simulated]
    busy = sum(row.cpu_bound for row in runs)
    return f"in {busy} of {len(runs)} runs: {NO_EVIDENCE}" if busy else ""


def by_encoding(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return rows by how gradients travel, raw ones first: each is a table of its own, since
    encoded steps are other steps."""
    return grouped(sorted(rows, key=lambda row: row.encoding != RAW), lambda row: row.encoding)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return items by a key, in the order of first appearance."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def measures_machine(cpu_share: float, stolen_share: float) -> bool:
    """Return whether a row is no evidence.

    Args:
        cpu_share: busy share, 0 to 1, of all processors, by whomever.
        stolen_share: share of their time that the host of this virtual machine gave to others.
    """
    return cpu_share > CPU_BOUND_SHARE or stolen_share > STOLEN_SHARE_MAX


@dataclass(frozen=True)
class OverRepeats:
    """Medians over all repeats of one strategy at one rate.

    Attributes:
        repeats: how many rows went in.
        step_s: nominal step time.
        samples_per_s: samples a nominal second, all workers together.
        speedup_over_ddp: the ratio to the best DDP, taken within each repeat; None without DDP.
        step_over_bound: step time over the bound; 1.05 is 5% above it. None without a bound.
        link_utilization: share of the goodput.
        cpu_share: share of the machine's processors.
    """

    repeats: int
    step_s: float
    samples_per_s: float
    speedup_over_ddp: float | None
    step_over_bound: float | None
    link_utilization: float
    cpu_share: float


class ClusterKey(NamedTuple):
    """The cluster that compared rows have in common."""

    workload: str
    workers: int
    rate_bps: int
    dilation: float

    @property
    def title(self) -> str:
        """The network and the rate of its ports, in words."""
        return f"{self.workload} at {format_rate(self.rate_bps)}"


_ABSENT = frozenset(
    {
        *("preset", "source", "is_real", "io_utilization", "activity", "planned_slice_elems"),
        *("clip_norm", "norms"),
    }
)
"""Fields that the file of a new row lacks until they are set."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run of one strategy.

    Attributes:
        preset: the experiment that it belongs to, or None.
        source: `measured` or `simulated`; None for a run of no experiment.
        workload: its name.
        strategy: as on the command line.
        workers: ranks; 0 in results without them, as in all numbers that are above 0.
        ranks_per_node: how many of them share a node and its port.
        rate_bps: nominal bits a second of each port in each direction.
        dilation: nominal rate over real rate, and real time over nominal time.
        slice_elems: elements a slice at most; None where a strategy has no such size.
        codec: encoding of gradients; `raw` is none.
        steps: measured steps.
        warmup: steps before them.
        repeat: from 0; strategies of one repeat ran after one another.
        seed: of model, batches and gradients.
        batch_size: samples a worker and step.
        samples_per_s: all workers together, over the whole measured window.
        step_s_median: time from one forward's start to the next one's, slowest rank; with local
            updates the mean of whole rounds.
        wall_step_s_median: the same in real seconds.
        step_s: every measured step.
        compute_s: forward and backward: from the `none` row of the repeat, else as planned.
        bound_step_s: perfect-overlap bound on a step; None where compute has no fixed time.
        bound_binding: what binds it.
        goodput_bps: nominal payload bits a second that plain TCP streams reached on the ports.
        tx_bytes_per_step: bytes that left a node's port, mean over nodes and over all steps but
            those in which a plan is found: of the warm-up, too. Of local updates those of turns.
        expected_tx_bytes: those of gradients and factors alone, by the schemes' costs; None where
            nothing is known of them.
        link_utilization: carried bits over goodput, mean over ports and directions.
        utilization_over_time: `time_s`, `transmit` and `receive`, equal bins of the window.
        cpu_s_per_step: real processor seconds of a rank, mean over ranks.
        cpu_share: busy share of all of the machine's processors, by whomever.
        cpu_bound: whether the row measures the machine, as `measures_machine` says.
        wall_lag_s: real time by which the worst rank's pace fell behind, at the end.
        loss: mean over ranks of each step's loss, warm-up included.
        param_digest: SHA-256 of rank 0's parameters after the last step.
        params_equal: whether every rank has that digest.
        verified_tensors: averaged gradients that were compared with their expectation.
        evaluation: quality on held-out samples after the last step, or None.
        metrics: the strategy's own counters on rank 0.
        stolen_share: share of the processors' time that went to other virtual machines, while the
            row or the goodput of its ports was measured; 0 in older results.
        step_s_mean: mean of `step_s`: what steps that wait for a rank add shows here.
        stragglers: what happens to ranks that are late; `wait`: all wait for them.
        late: what becomes of their gradients.
        servers: so many ranks own slices; None: all.
        serving: so many ranks beside the workers own all slices, and only serve.
        straggler: `rank`, `share` and `burst_s` (real seconds) of the rank that was stopped now and
            then, or None. `step_s` and all that follows from it is of the other ranks then.
        clip_norm: the norm that gradients were clipped to, or None.
        norms: those of all averaged gradients before they were clipped, one a step, warm-up
            included, on rank 0; None where the strategy did not compute it.
        speedup_over_ddp: best DDP's step time of this repeat over this one's.
        step_over_bound: step time over the bound.
        over_repeats: medians over the repeats.
        balance: how evenly bytes are spread over nodes and owners, as
            `balance_of` says; None in older results.
        versions: of what was run.
        machine: where it was run.
        is_real: of a simulation: whether the cluster is neither dilated nor shaped.
        io_utilization: of a simulation: busy share of the threads that drive sockets.
        activity: what ports and ranks did, interval after interval, where that was sampled.
        planned_slice_elems: the slice size that the planner chooses for the cluster.
        absent: fields that the row's file lacks; `to_json` leaves those out that are still unset.
        further: what the row's file has beside these fields.
    """

    preset: str | None = None
    source: str | None = None
    workload: str
    strategy: str
    workers: int = 0
    rate_bps: int
    dilation: float = 0.0
    slice_elems: int | None = None
    is_real: bool | None = None
    codec: str = "raw"
    steps: int = 0
    warmup: int = 0
    repeat: int = 0
    seed: int = 0
    batch_size: int = 0
    samples_per_s: float = 0.0
    step_s_median: float
    wall_step_s_median: float | None = None
    step_s: list[float] = field(default_factory=list)
    compute_s: float = 0.0
    bound_step_s: float | None = None
    bound_binding: str | None = None
    goodput_bps: float = 0.0
    tx_bytes_per_step: float = 0.0
    link_utilization: float | None = None
    io_utilization: float | None = None
    utilization_over_time: dict[str, list[float]] = field(default_factory=dict)
    cpu_s_per_step: float | None = None
    cpu_share: float | None = None
    cpu_bound: bool = False
    wall_lag_s: float = 0.0
    loss: list[float] = field(default_factory=list)
    param_digest: str | None = None
    params_equal: bool | None = None
    verified_tensors: int = 0
    evaluation: dict[str, Any] | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    stolen_share: float = 0.0
    step_s_mean: float = 0.0
    stragglers: str = "wait"
    late: str = "discard"
    servers: int | None = None
    serving: int = 0
    straggler: dict[str, Any] | None = None
    clip_norm: float | None = None
    norms: list[float | None] = field(default_factory=list)
    speedup_over_ddp: float | None = None
    step_over_bound: float | None = None
    expected_tx_bytes: float | None = None
    ranks_per_node: int = 1
    over_repeats: OverRepeats | None = None
    balance: Balance | None = None
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    activity: Activity | None = None
    planned_slice_elems: int | None = None
    absent: frozenset[str] = field(default=_ABSENT, repr=False, compare=False)
    further: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(**given: Any) -> Row:
        """Return a row that has these fields alone."""
        return Row(**given, absent=frozenset(FIELDS) - given.keys())

    @staticmethod
    def from_json(content: object) -> Row:
        """Return the row that `to_json` gave, by this version or an older one.

        Raises:
            ValueError: it lacks what every row has, or a field holds something else.
        """
        if not isinstance(content, Mapping):
            raise ValueError("is no object")
        for name in REQUIRED:
            if content.get(name) is None:
                raise ValueError(f"has no '{name}'")
        known = {name: value for name, value in content.items() if name in FIELDS}
        for name, value in known.items():
            wanted = _SCALARS.get(FIELDS[name].partition(" |")[0])
            if wanted and not isinstance(value, wanted) and value is not None:
                raise ValueError(f"has {value!r} for its '{name}'")
        for name, made in _NESTED.items():
            if known.get(name):
                known[name] = made(known[name])
            elif name in known:
                known[name] = None
        further = {name: value for name, value in content.items() if name not in FIELDS}
        return Row.of(**known, further=further)

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name, without those that its file lacked."""
        own = {name: getattr(self, name) for name in FIELDS if self.has(name)}
        nested = {name: asdict(own[name]) for name in _NESTED if own.get(name)}
        return {**own, **nested, **self.further}

    def has(self, name: str) -> bool:
        """Return whether the row's file has a field, or it was set since."""
        return name not in self.absent or getattr(self, name) not in (_DEFAULTS.get(name), {}, [])

    def with_field(self, name: str, value: Any) -> Row:
        """Return the row with a field that its file shall have, also where it is None."""
        return replace(self, absent=self.absent - {name}, **{name: value})

    @property
    def is_simulated(self) -> bool:
        """Whether the row was not run."""
        return self.source == SIMULATED

    @property
    def is_evidence(self) -> bool:
        """Whether the row was measured, and the network more than the machine."""
        return not self.is_simulated and not self.cpu_bound

    @property
    def encoding(self) -> str:
        """How gradients travel: `raw`, the session's codec, or the hook of a DDP strategy."""
        return parse_strategy(self.strategy).hook or self.codec

    @property
    def cluster(self) -> ClusterKey:
        """The cluster that compared rows have in common."""
        return ClusterKey(self.workload, self.workers, self.rate_bps, self.dilation)

    @property
    def communicates(self) -> bool:
        """Whether ranks exchange gradients at all."""
        return self.strategy != CEILING

    @property
    def is_baseline(self) -> bool:
        """Whether this is stock DDP, which others are compared with."""
        return parse_strategy(self.strategy).is_baseline

    @property
    def over_bound(self) -> float | None:
        """Step time over the bound; None without a bound."""
        return self.step_s_median / self.bound_step_s if self.bound_step_s else None

    @property
    def has_losses(self) -> bool:
        """Whether the row has losses worth showing: those of replays are all zero."""
        return any(self.loss)

    @property
    def gbps(self) -> float:
        """Nominal rate of each port, in 10^9 bits a second."""
        return self.rate_bps / 1e9


FIELDS = {one.name: str(one.type) for one in fields(Row) if one.name not in ("absent", "further")}
"""The type of each field that a row's file may have, as it is written above."""
_DEFAULTS = {one.name: one.default for one in fields(Row)}
REQUIRED = ("workload", "strategy", "rate_bps", "step_s_median")
"""Fields of every row of every version."""
_SCALARS: Mapping[str, Any] = {"str": str, "bool": bool, "int": int | float, "float": int | float}
_NESTED: Mapping[str, Callable[[Any], Any]] = {
    "balance": Balance.from_json,
    "activity": Activity.from_json,
    "over_repeats": lambda content: OverRepeats(**content),
}


def median_or_none(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are there; None without any."""
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else None


def summarize(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the ratios of each and the medians over repeats."""

    def with_ratios(row: Row) -> Row:
        baselines = [
            other.step_s_median
            for other in rows
            if (other.workload, other.rate_bps, other.repeat)
            == (row.workload, row.rate_bps, row.repeat)
            and other.is_baseline
        ]
        return replace(
            row,
            speedup_over_ddp=min(baselines) / row.step_s_median if baselines else None,
            step_over_bound=row.over_bound if row.communicates else None,
        )

    def over_repeats(row: Row) -> OverRepeats:
        group = [
            other
            for other in compared
            if (other.workload, other.rate_bps, other.strategy, other.codec)
            == (row.workload, row.rate_bps, row.strategy, row.codec)
        ]
        return OverRepeats(
            repeats=len(group),
            step_s=statistics.median(other.step_s_median for other in group),
            samples_per_s=statistics.median(other.samples_per_s for other in group),
            speedup_over_ddp=median_or_none(other.speedup_over_ddp for other in group),
            step_over_bound=median_or_none(other.step_over_bound for other in group),
            link_utilization=statistics.median(other.link_utilization or 0.0 for other in group),
            cpu_share=statistics.median(other.cpu_share or 0.0 for other in group),
        )

    compared = [with_ratios(row) for row in rows]
    return [replace(row, over_repeats=over_repeats(row)) for row in compared]


def compact(row: Row) -> Row:
    """Return a row without its use of the ports over time, its losses and its command.

    Of its metrics the numbers stay, and of a plan that was found what it chose and expects.
    """
    metrics: dict[str, Any] = {
        name: value
        for name, value in row.metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    plan = row.metrics.get("plan")
    if plan is not None:
        found = {key: plan[key] for key in ("settings", "prediction", "summary")}
        schemes = {choice["setting"]: choice["value"] for choice in plan["choices"]}
        metrics["plan"] = {**found, "schemes": schemes.get("schemes")}
    return replace(
        row,
        utilization_over_time={},
        loss=[],
        norms=[],
        metrics=metrics,
        machine={name: value for name, value in row.machine.items() if name != "command"},
        absent=row.absent | {"utilization_over_time", "loss"},
    )


def read_json(path: Path) -> Any:
    """Return what a file of rows holds; no rows where there is no file yet.

    Raises:
        ValueError: it is not JSON.
    """
    if not path.exists():
        return []
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; move it away to begin anew") from error


def read_rows(path: Path) -> list[Row]:
    """Return the rows that were measured so far; none where there is no file yet.

    Raises:
        ValueError: the file is none of rows.
    """
    content = read_json(path)
    try:
        return rows_of(content)
    except ValueError as error:
        raise ValueError(
            f"{path} holds no rows of a lab run: {error}; move it away to begin anew"
        ) from error


def rows_of(content: object) -> list[Row]:
    """Return the rows of a file's content.

    Raises:
        ValueError: it is no list, or an entry is no row.
    """
    if not isinstance(content, list):
        raise ValueError("it holds no list")
    rows = []
    for number, one in enumerate(content):
        try:
            rows.append(Row.from_json(one))
        except ValueError as error:
            raise ValueError(f"result row {number} {error}") from error
    return rows


def save_rows(rows: Sequence[Row], path: Path) -> None:
    """Write rows as a JSON list; the file is the old one or the new one, and whole.

    Raises:
        LabError: the disk is full, or the file cannot be written.
    """
    save_lines([row.to_json() for row in rows], path)


def save_lines(contents: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a JSON list, an entry a line: to be searched and compared with the tools for lines.

    Raises:
        LabError: the disk is full, or the file cannot be written.
    """

    def write(partial: Path) -> None:
        with partial.open("w", encoding="utf-8") as file:
            file.write("[\n" + ",\n".join(map(json.dumps, contents)) + "\n]\n")
            file.flush()
            os.fsync(file.fileno())

    replace_or_say(path, write)


def replace_or_say(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file whole, as `atomic_write` does.

    Raises:
        LabError: the file cannot be written.
    """
    try:
        atomic_write(path, write)
    except OSError as failure:
        raise write_failure(path, failure) from failure


def write_failure(path: Path, failure: OSError) -> LabError:
    """Return the error for a file that could not be written: what, where, and what to do."""
    what = f"cannot write {path}: {failure.strerror}"
    if failure.errno in (errno.ENOSPC, errno.EDQUOT):
        return LabError(
            f"{what}; make room there, then give the same command again: it goes on after the "
            "last run that was written"
        )
    return LabError(what)
