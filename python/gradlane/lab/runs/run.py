"""Run a workload under several strategies on the emulated cluster, and measure.

Strategies are interleaved: each repeat runs all of them one after another, starting with another
one each time, and ratios are taken within a repeat. Options and results are nominal; the cluster
and the clocks are real, and the dilation lies between them.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from gradlane.formats.provenance import machine_facts, package_versions
from gradlane.formats.timeline.chrome import read_chrome, write_chrome
from gradlane.formats.timeline.merge import merge
from gradlane.lab.cluster.counters import (
    Recording,
    TrafficRecord,
    TrafficSampler,
    read_processor_ticks,
)
from gradlane.lab.cluster.errors import LabError
from gradlane.lab.cluster.keep_cpus_awake import cpus_kept_awake
from gradlane.lab.cluster.namespaces import EmulatedCluster
from gradlane.lab.cluster.ranks import RankPool
from gradlane.lab.cluster.straggling import Bursts
from gradlane.lab.runs.messages import TrialRequest, TrialResult
from gradlane.lab.runs.options import LabOptions
from gradlane.lab.runs.rows import STOLEN_SHARE_MAX, Row, measures_machine, summarize
from gradlane.lab.runs.strategy import LabStrategy, parse_strategy
from gradlane.lab.runs.traffic import OwnerCounters, balance_of
from gradlane.planning.models.timings import TensorTiming
from gradlane.planning.simulation.bound import Bound, bound_step_s, port_bytes
from gradlane.planning.simulation.local_updates import (
    INSTANT_S,
    fragment_tensors,
    local_step_s,
)
from gradlane.training.monitoring.recorded import rank_path
from gradlane.training.options.codec_options import RAW
from gradlane.training.options.strategy import ASGD

STREAM_RAMP_S = 1.0
STREAM_WINDOW_S = 2.0
_SERIES_POINTS = 240
GOODPUT_TRIES = 5
"""Nothing that is measured on these ports is evidence where their goodput is not."""


class LabProgress:
    """Receives the progress of a lab run; this class shows none."""

    def phase(self, text: str) -> None:
        """Begin a phase; `text` names it."""

    def advance(self, steps: int) -> None:
        """Add finished steps to those of `LabOptions.steps_in_total`."""


@dataclass(frozen=True)
class Goodput:
    """The rate that plain TCP streams reached on the ports.

    Attributes:
        bps: nominal payload bits a second of a port in each direction.
        stolen_share: share of the processors' time that went to other virtual machines meanwhile.
    """

    bps: float
    stolen_share: float


def run_lab(
    options: LabOptions,
    *,
    progress: LabProgress | None = None,
    on_rows: Callable[[list[Row]], None] | None = None,
    on_recording: Callable[[Row, Recording], Row] | None = None,
) -> list[Row]:
    """Build the cluster, measure its goodput, run everything and return a row for each run.

    Args:
        options: what to run.
        progress: told about steps and phases.
        on_rows: called with all finished rows after each run, so that none is lost.
        on_recording: called with each row and what was sampled for it; returns the row to keep.

    Raises:
        LabError: the cluster could not be built, or a rank failed.
    """
    progress = progress or LabProgress()
    rows: list[Row] = []
    real_rates_bps = [round(rate_bps / options.dilation) for rate_bps in options.rates_bps]
    progress.phase("building the cluster")
    with (
        tempfile.TemporaryDirectory(prefix="gradlane-lab-") as scratch,
        EmulatedCluster(options.nodes, real_rates_bps[0]) as cluster,
        RankPool(cluster, ranks_per_node=options.ranks_per_node) as pool,
        cpus_kept_awake(),
    ):
        runner = _Runner(options, cluster, pool, progress, Path(scratch))
        for rate_bps, real_rate_bps in zip(options.rates_bps, real_rates_bps, strict=True):
            cluster.set_rate(real_rate_bps)
            progress.phase("measuring the goodput of the ports")
            goodput = least_disturbed(
                lambda: pool.stream_bps(STREAM_RAMP_S, STREAM_WINDOW_S), options.dilation
            )
            for repeat in range(options.repeat):
                first = repeat % len(options.strategies)
                order = [*options.strategies[first:], *options.strategies[:first]]
                repeat_rows: list[Row] = []
                for strategy in order:
                    progress.phase(f"{options.workload} with {strategy.text}")
                    row = runner.run(strategy, rate_bps, repeat, goodput)
                    if on_recording is not None and runner.recording is not None:
                        row = on_recording(row, runner.recording)
                    repeat_rows = runner.with_bounds([*repeat_rows, row])
                    finished = summarize([*rows, *repeat_rows])
                    if on_rows is not None:
                        on_rows(finished)
                rows = finished
    return rows


def least_disturbed(stream_bps: Callable[[], float], dilation: float) -> Goodput:
    """Measure what a port carries; again, where others took this machine's processors.

    Args:
        stream_bps: measures real payload bits a second once.
        dilation: nominal over real rate.
    """
    tries = []
    for _ in range(GOODPUT_TRIES):
        _, total, stolen = read_processor_ticks()
        real_bps = stream_bps()
        _, total_after, stolen_after = read_processor_ticks()
        share = (stolen_after - stolen) / max(total_after - total, 1)
        tries.append(Goodput(dilation * real_bps, share))
        if share <= STOLEN_SHARE_MAX:
            break
    return min(tries, key=lambda one: one.stolen_share)


@dataclass
class _Runner:
    """One lab run's cluster, ranks and counters of ports and jobs."""

    options: LabOptions
    cluster: EmulatedCluster
    pool: RankPool
    progress: LabProgress
    scratch: Path
    recording: Recording | None = None

    def __post_init__(self) -> None:
        self._timings: list[TensorTiming] = []
        self._wire_bytes: dict[str, list[int]] = {}
        self._schemes: dict[str, list[str]] = {}
        self._session = secrets.token_hex(4)
        self._versions = package_versions()
        self._machine = machine_facts()
        self._trace_path = self.scratch / "trace.json"

    def run(self, strategy: LabStrategy, rate_bps: int, repeat: int, goodput: Goodput) -> Row:
        """Run one strategy once and return its row, without bound and ratios."""
        options = self.options
        port = self.cluster.next_port()
        addresses = [
            address for address in self.cluster.addresses for _ in range(options.ranks_per_node)
        ]
        serving = options.serving if strategy.family == "gradlane" else 0
        traced = options.trace_path is not None and strategy.family == "gradlane"
        request = TrialRequest(
            job=f"lab-{self._session}-{port}",
            workload=options.workload_spec,
            strategy=strategy.text,
            addresses=addresses[: options.workers],
            server_addresses=addresses[options.workers :],
            store_port=port,
            steps=options.steps,
            warmup=options.warmup_of(strategy),
            slice_elems=options.slice_elems,
            trace_path=str(self._trace_path) if traced else None,
            codec=options.codec_of(strategy),
            servers=options.servers,
            serving=serving,
            straggles=options.straggler is not None,
            rate_bps=rate_bps,
            clip_norm=options.clip_norm,
        )
        reported = 0
        processes = self.pool.processes()
        spec = options.straggler
        bursts = Bursts(spec, processes[spec.rank]) if spec is not None else None

        def advance(rank: int, done_steps: int) -> None:
            nonlocal reported
            if bursts is not None and done_steps > 0:
                bursts.begin()
            if rank == 0:
                self.progress.advance(done_steps - reported)
                reported = done_steps

        descriptors = self.cluster.counter_descriptors()
        with (
            bursts or contextlib.nullcontext(),
            TrafficSampler(descriptors, processes=processes) as sampler,
        ):
            asked = asdict(request)
            trial = {**asked, "kind": "trial"}
            served = {**asked, "kind": "serve"} if serving else {"kind": "rest"}
            requests = [trial] * options.workers + [served] * options.serving
            everyone = self.pool.ask(requests, advance, sampler.count)
        results = [TrialResult.from_json(one) for one in everyone[: options.workers]]
        owners = [result.owner for result in results]
        owners += map(OwnerCounters.from_json, everyone[options.workers :] if serving else ())
        self.progress.advance(options.warmup_of(strategy) + options.steps - reported)
        self._timings = results[0].timings
        self._wire_bytes[strategy.text] = results[0].wire_bytes
        self._schemes[strategy.text] = results[0].schemes
        digests = {result.param_digest for result in results}
        rounds = strategy.rounds is not None
        if (rounds or options.codec_of(strategy) != RAW) and len(digests) > 1:
            raise LabError(
                f"{strategy.text} with codec {options.codec}: the ranks hold different parameters"
            )
        if traced:
            self._join_timelines(rate_bps)
        own = [owner for owner in owners if owner is not None]
        return self._row(strategy, rate_bps, repeat, goodput, results, own, sampler.record)

    def _join_timelines(self, rate_bps: int) -> None:
        """Write one timeline of all ranks, as fast as it nominally was."""
        options = self.options
        assert options.trace_path is not None
        paths = [rank_path(self._trace_path, rank) for rank in range(options.workers)]
        whole = merge([read_chrome(path) for path in paths]).stretched(1 / options.dilation)
        facts = {**whole.facts, "workload": options.workload, "dilation": options.dilation}
        notes = (*whole.notes, f"times are nominal, {options.dilation:g} times as fast as it was")
        write_chrome(
            replace(whole, rate_bps=rate_bps, facts=facts, notes=notes), options.trace_path
        )

    def _row(
        self,
        strategy: LabStrategy,
        rate_bps: int,
        repeat: int,
        goodput: Goodput,
        results: Sequence[TrialResult],
        owners: Sequence[OwnerCounters],
        record: TrafficRecord,
    ) -> Row:
        options = self.options
        dilation = options.dilation
        # A step begins when its slowest rank begins it; of the others, where one is stopped.
        slow = None if options.straggler is None else options.straggler.rank
        others = [result for rank, result in enumerate(results) if rank != slow]
        boundaries_s = [
            max(times) for times in zip(*(one.boundaries_s for one in others), strict=True)
        ]
        boundaries_s = boundaries_s[options.warmup_of(strategy) :]
        start_s, end_s = boundaries_s[0], boundaries_s[-1]
        wall_steps_s = [b - a for a, b in itertools.pairwise(boundaries_s)]
        # Steps of a round differ: its mean is what they come to.
        middle = statistics.median if strategy.rounds is None else statistics.fmean
        wall_step_s_median = middle(wall_steps_s)
        real_goodput_bps = goodput.bps / dilation
        self.recording = Recording(record, boundaries_s)
        cpu_share = record.processor_share(start_s, end_s)
        stolen_share = max(record.stolen_share(start_s, end_s), goodput.stolen_share)
        series = record.series(start_s, end_s, real_goodput_bps, _SERIES_POINTS)
        series["time_s"] = [time_s / dilation for time_s in series["time_s"]]
        batch_size = results[0].batch_size
        nominal_window_s = (end_s - start_s) / dilation
        codec = results[0].codec
        ports = record.counted_bytes()
        counted_steps = results[0].counted_steps
        tx_bytes = statistics.fmean(tx for _, tx in ports[: options.nodes - options.serving])
        return Row(
            workload=options.workload,
            strategy=strategy.text,
            workers=options.workers,
            ranks_per_node=options.ranks_per_node,
            rate_bps=rate_bps,
            dilation=dilation,
            slice_elems=strategy.slice_elems(options.slice_elems, encoded=codec != RAW),
            codec=codec,
            steps=options.steps,
            warmup=options.warmup_of(strategy),
            repeat=repeat,
            seed=options.seed,
            batch_size=batch_size,
            samples_per_s=options.workers * batch_size * options.steps / nominal_window_s,
            step_s_median=wall_step_s_median / dilation,
            wall_step_s_median=wall_step_s_median,
            step_s=[wall_step_s / dilation for wall_step_s in wall_steps_s],
            compute_s=results[0].compute_s,
            goodput_bps=goodput.bps,
            tx_bytes_per_step=tx_bytes / counted_steps,
            link_utilization=record.utilization(start_s, end_s, real_goodput_bps),
            utilization_over_time=series,
            cpu_s_per_step=statistics.fmean(r.cpu_s for r in results) / options.steps,
            cpu_share=cpu_share,
            cpu_bound=measures_machine(cpu_share, stolen_share),
            stolen_share=stolen_share,
            wall_lag_s=max(r.wall_lag_s for r in results),
            loss=[
                statistics.fmean(loss for loss in losses if loss is not None)
                for losses in zip(*(one.losses for one in results), strict=True)
            ],
            param_digest=results[0].param_digest,
            params_equal=len({r.param_digest for r in results}) == 1,
            verified_tensors=sum(r.verified_tensors for r in results),
            evaluation=results[0].evaluation,
            metrics=results[0].metrics,
            balance=balance_of(ports, owners, counted_steps),
            step_s_mean=statistics.fmean(wall_steps_s) / dilation,
            stragglers=strategy.stragglers.rule,
            late=strategy.stragglers.late,
            servers=options.servers if strategy.family == "gradlane" else None,
            serving=options.serving if strategy.family == "gradlane" else 0,
            straggler=None if options.straggler is None else options.straggler.to_json(),
            clip_norm=options.clip_norm,
            norms=results[0].norms,
            versions=self._versions,
            machine=self._machine,
        )

    def with_bounds(self, rows: Sequence[Row]) -> list[Row]:
        """Return a repeat's rows with compute time and bound, from its `none` row if it has one."""
        ceilings = [row.step_s_median for row in rows if not row.communicates]
        return [
            self._with_bound(replace(row, compute_s=ceilings[0]) if ceilings else row)
            for row in rows
        ]

    def _with_bound(self, row: Row) -> Row:
        strategy = parse_strategy(row.strategy)
        wire_bytes = self._wire_bytes.get(row.strategy)
        schemes = self._schemes.get(row.strategy, [])
        if strategy.local.mode != "off":
            schemes = ["hierarchical"] * len(self._timings)
        if wire_bytes and row.strategy != ASGD:
            expected_bytes = sum(
                port_bytes(
                    size_bytes,
                    workers=row.workers,
                    scheme=scheme,
                    local_ranks=row.ranks_per_node,
                    answer_bytes=timing.size_bytes,
                )
                if scheme != "ps" or not row.serving
                # All of a worker's gradients leave it, and nothing else does.
                else size_bytes
                for timing, size_bytes, scheme in zip(
                    self._timings, wire_bytes, schemes, strict=True
                )
            )
            each = 1 if strategy.rounds is None else strategy.rounds.steps
            row = replace(row, expected_tx_bytes=expected_bytes / each)
        # What a hook of DDP's sends is not known here: the bound is that of full precision.
        if row.compute_s <= 0 or not self._timings or strategy.hook:
            return row

        def bound_of(timings: Sequence[TensorTiming], compute_s: float, at: Sequence[int]) -> Bound:
            return bound_step_s(
                timings,
                workers=row.workers,
                goodput_bps=row.goodput_bps,
                compute_s=compute_s,
                wire_bytes=[wire_bytes[one] for one in at] if wire_bytes else None,
                schemes=[schemes[one] for one in at] if schemes else (),
                local_ranks=row.ranks_per_node,
                servers=row.servers,
                serving=row.serving,
                clips=row.clip_norm is not None,
            )

        if strategy.rounds is not None:
            # What an exchange sends is ready at once, and nothing is computed meanwhile.
            together = [replace(one, need_s=0.0, ready_s=INSTANT_S) for one in self._timings]
            sizes = [one.size_bytes for one in together]
            fragments = fragment_tensors([one.name for one in together], sizes, strategy.rounds)
            exchanges_s = [
                bound_of([together[one] for one in held], INSTANT_S, held).step_s
                for held in fragments
            ]
            return replace(
                row, bound_step_s=local_step_s(row.compute_s, exchanges_s, strategy.rounds)
            )
        bound = bound_of(self._timings, row.compute_s, range(len(self._timings)))
        return replace(row, bound_step_s=bound.step_s, bound_binding=bound.binding)
