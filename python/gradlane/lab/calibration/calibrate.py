"""Measures the simulator's constants on this machine, by running gradlane's own transport.

Two runs that differ in the size of frames tell what a frame and what a byte costs the I/O thread;
two that differ in the size of slices tell what a job and what a byte of a contribution costs the
work thread. Latencies are those of single tensors on idle ports. Rates and times are real.
"""

from __future__ import annotations

import datetime
import math
import os
import platform
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from gradlane.lab.calibration import node_costs
from gradlane.lab.calibration.options import FLOAT_BYTES, CalibrationOptions
from gradlane.lab.cluster.keep_cpus_awake import cpus_kept_awake
from gradlane.lab.cluster.namespaces import EmulatedCluster
from gradlane.lab.cluster.ranks import RankPool
from gradlane.lab.runs.fitting import non_negative
from gradlane.lab.runs.rows import NO_EVIDENCE, measures_machine
from gradlane.planning.simulation.codec_costs import CALIBRATED_CODECS, measure_cost
from gradlane.report.console import text_table
from gradlane.training.options.option_groups import Network

FORMAT = "gradlane-costs"
VERSION = 1
WORKERS = 4
SMALL_FRAME_BYTES = 8_192
LARGE_FRAME_BYTES = Network.frame_bytes
SMALL_SLICE_ELEMS = 20_000
LARGE_SLICE_ELEMS = 500_000
LATENCY_ELEMS = 10_000
"""One frame, and more bytes than are reduced on the I/O thread itself."""
ASKED_BUFFER_BYTES = 72 << 10
"""Bytes of send buffer that `gradlane-net` asks for where the path is short."""

_PROGRAM = "gradlane.lab.calibration.rank_program"
STREAM = {"ramp_s": 1.0, "window_s": 3.0}


@dataclass(frozen=True)
class Constant:
    """One constant, how it was found, and how far its repeats lie apart."""

    value: float
    how: str
    spread: float | None = None
    """Largest over smallest of its repeats; None where it was measured once."""


@dataclass(frozen=True)
class Load:
    """Load of one run on a rank's threads and their processor time, mean over ranks.

    Attributes:
        frames: sent and received.
        frame_bytes: sent and received, payload and headers.
        jobs: reductions.
        contribution_bytes: bytes of all contributions that were reduced.
        io_s: processor time of the I/O thread.
        work_s: processor time of the work thread.
    """

    frames: float
    frame_bytes: float
    jobs: float
    contribution_bytes: float
    io_s: float
    work_s: float


def load_of(
    results: Sequence[dict[str, Any]], tensor_elems: Sequence[int], slice_elems: int, steps: int
) -> Load:
    """Return the load of a run.

    Args:
        results: one a rank, as `GradlaneExchange.run` of `lab/transport/node.py` returns them.
        tensor_elems: elements of every tensor.
        slice_elems: elements of a slice at most.
        steps: steps of the run.
    """

    def mean(name: str) -> float:
        return statistics.fmean(result[name] for result in results)

    ranks = len(results)
    slices = sum(math.ceil(elems / slice_elems) for elems in tensor_elems)
    return Load(
        frames=2 * mean("gradlane_tx_frames"),
        frame_bytes=mean("gradlane_tx_bytes") + mean("gradlane_rx_bytes"),
        jobs=steps * slices / ranks,
        # Each owner reads all ranks' contributions to its share.
        contribution_bytes=steps * sum(tensor_elems) * FLOAT_BYTES,
        io_s=mean("gradlane_io_cpu_s"),
        work_s=mean("gradlane_work_cpu_s"),
    )


def run_calibration(
    options: CalibrationOptions, on_phase: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Measure everything.

    Args:
        options: what with.
        on_phase: told what is being done.

    Returns:
        The contents of a costs file: `constants`, each with `value` and `how`, `codecs`, and
        `measured`.

    Raises:
        LabError: the cluster could not be built, or a rank failed.
    """
    start_s = time.monotonic()
    on_phase("encoding and decoding")
    codecs = {codec: asdict(measure_cost(codec)) for codec in CALIBRATED_CODECS}
    on_phase("copies and sums on a node")
    local = local_costs(options.repeat, options.trials)
    on_phase("building the cluster")
    with (
        EmulatedCluster(WORKERS, options.rate_bps) as cluster,
        RankPool(cluster, program=_PROGRAM) as pool,
        cpus_kept_awake(),
    ):
        calibration = _Calibration(options, cluster, pool, on_phase)
        constants = {
            "goodput_share": calibration.goodput_share(),
            **calibration.thread_costs(),
            **calibration.latencies(),
            "send_buffer_floor_bytes": calibration.send_buffer(),
            **local,
        }
    return {
        "format": FORMAT,
        "version": VERSION,
        "measured": {
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "command": " ".join(["gradlane", *sys.argv[1:]]),
            "kernel": platform.release(),
            "processors": os.cpu_count(),
            "load_average": os.getloadavg()[0],
            "cpu_share": calibration.cpu_share,
            "stolen_share": calibration.stolen_share,
            "seconds": time.monotonic() - start_s,
            "options": asdict(options),
        },
        "constants": {
            name: {key: value for key, value in asdict(it).items() if value is not None}
            for name, it in constants.items()
        },
        "codecs": codecs,
    }


@dataclass
class _Calibration:
    """The ranks of one cluster, asked one thing after another."""

    options: CalibrationOptions
    cluster: EmulatedCluster
    pool: RankPool
    on_phase: Callable[[str], None]
    cpu_share: float = 0.0
    stolen_share: float = 0.0
    reduce_byte_s: float = 0.0

    def goodput_share(self) -> Constant:
        """Measure what plain TCP streams carry, both directions at once, over the port's rate."""
        self.on_phase("TCP streams on all ports")
        shares = [
            self.pool.stream_bps(**STREAM) / self.options.rate_bps
            for _ in range(self.options.repeat)
        ]
        return _constant(shares, "plain TCP streams from neighbour to neighbour, both directions")

    def _open(
        self,
        tensor_elems: Sequence[int],
        frame_bytes: int,
        slice_elems: int,
        *,
        trace: bool = False,
    ) -> None:
        self.pool.ask_all(
            "open",
            job=f"calibrate-{secrets.token_hex(4)}",
            addresses=self.cluster.addresses,
            store_port=self.cluster.next_port(),
            tensor_elems=list(tensor_elems),
            settings={"frame_bytes": frame_bytes, "slice_elems": slice_elems, "frame_trace": trace},
        )

    def _load(self, frame_bytes: int, slice_elems: int) -> Load:
        options = self.options
        self._open(options.tensor_elems, frame_bytes, slice_elems)
        results = self.pool.ask_all("run", steps=options.steps, warmup=1)
        self.pool.ask_all("close")
        total_s = max(results[0]["machine_total_s"], 1e-9)
        self.cpu_share = max(self.cpu_share, results[0]["machine_busy_s"] / total_s)
        self.stolen_share = max(self.stolen_share, results[0]["machine_stolen_s"] / total_s)
        return load_of(results, options.tensor_elems, slice_elems, options.steps)

    def thread_costs(self) -> dict[str, Constant]:
        """Measure processor time of both threads, by frame, byte and sum."""
        shapes = (
            (LARGE_FRAME_BYTES, LARGE_SLICE_ELEMS),
            (SMALL_FRAME_BYTES, LARGE_SLICE_ELEMS),
            (LARGE_FRAME_BYTES, SMALL_SLICE_ELEMS),
        )
        frames, bytes_, sums = [], [], []
        for repeat in range(self.options.repeat):
            loads = []
            for frame_bytes, slice_elems in shapes:
                self.on_phase(
                    f"repeat {repeat + 1} of {self.options.repeat}: frames of {frame_bytes} "
                    f"bytes, slices of {slice_elems}"
                )
                loads.append(self._load(frame_bytes, slice_elems))
            frame_s, byte_s = non_negative(
                [(it.frames, it.frame_bytes) for it in loads], [it.io_s for it in loads]
            )
            _, sum_s = non_negative(
                [(it.jobs, it.contribution_bytes) for it in loads], [it.work_s for it in loads]
            )
            frames.append(frame_s)
            bytes_.append(byte_s)
            sums.append(sum_s)
        self.reduce_byte_s = statistics.median(sums)
        frame = _constant(
            frames,
            f"processor time of the I/O thread with frames of {SMALL_FRAME_BYTES} and of "
            f"{LARGE_FRAME_BYTES} bytes, up to three times as large on fast connections, as they "
            "were counted; as many are sent as received, each counts half",
        )
        byte = _constant(bytes_, "the same runs: what does not go with the number of frames")
        return {
            "send_frame_s": frame,
            "receive_frame_s": frame,
            "send_byte_s": byte,
            "receive_byte_s": byte,
            "reduce_byte_s": _constant(
                sums,
                f"processor time of the work thread with slices of {SMALL_SLICE_ELEMS} and of "
                f"{LARGE_SLICE_ELEMS} elements, a byte of a contribution",
            ),
        }

    def latencies(self) -> dict[str, Constant]:
        """Measure what an idle cluster takes for one tensor of one frame, part by part."""
        self.on_phase("single tensors on idle ports")
        self._open([LATENCY_ELEMS], LARGE_FRAME_BYTES, LARGE_SLICE_ELEMS, trace=True)
        results = self.pool.ask_all("latency", trials=self.options.trials)
        self.pool.ask_all("close")

        def middle(name: str) -> float:
            return float(statistics.median(it for result in results for it in result[name]))

        reduced_s = self.reduce_byte_s * WORKERS * LATENCY_ELEMS * FLOAT_BYTES
        return {
            "command_s": Constant(
                middle("command_s"),
                f"from the call to the frame's being with the kernel, median of single tensors of "
                f"{LATENCY_ELEMS} elements on idle ports",
            ),
            "work_s": Constant(
                max(0.0, middle("turn_s") - reduced_s),
                "from an owner's last contribution to its first reply's being with the kernel, "
                "less the sum",
            ),
            "wake_s": Constant(
                middle("wake_s"), "from the result's last frame to the end of the wait"
            ),
        }

    def send_buffer(self) -> Constant:
        """Measure what the kernel takes of a connection whose peer has gone."""
        self.on_phase("filling a send buffer")
        self.pool.ask_all(
            "connect",
            address=self.cluster.addresses[0],
            port=self.cluster.next_port(),
            asked_bytes=ASKED_BUFFER_BYTES,
        )
        self.cluster.set_link(0, connected=False)
        try:
            filled = self.pool.ask_all("fill")[1]
        finally:
            self.cluster.set_link(0, connected=True)
        return Constant(
            float(filled["option_bytes"]),
            f"SO_SNDBUF of a connection that asked for {ASKED_BUFFER_BYTES}; cut off from its "
            f"peer it took {filled['taken_bytes']}",
        )


def local_costs(repeat: int, trials: int) -> dict[str, Constant]:
    """Measure what adding up in shared memory costs the ranks of a node."""
    size = f"{node_costs.PART_BYTES >> 20} of {node_costs.REGION_BYTES >> 20} MiB"
    return {
        "local_copy_byte_s": _constant(
            node_costs.copy_byte_s(repeat), f"processor time of copying {size}, a byte"
        ),
        "local_sum_byte_s": _constant(
            node_costs.sum_byte_s(repeat),
            f"processor time of adding up {size} of each of {node_costs.RANKS} ranks, a byte "
            "of one of them",
        ),
        "local_word_s": _constant(
            node_costs.middle_word_s(trials, repeat),
            "half of a word's way to another process and back, median",
        ),
    }


def _constant(values: Sequence[float], how: str) -> Constant:
    least = min(values)
    spread = max(values) / least if least > 0.0 else None
    return Constant(statistics.median(values), how, spread if len(values) > 1 else None)


def print_constants(console: Console, content: dict[str, Any]) -> None:
    """Print what `run_calibration` found, and whether the machine was too busy for it."""
    rows = []
    for name, entry in content["constants"].items():
        spread = entry.get("spread")
        told = "-" if spread is None else f"{spread:.2f}"
        rows.append((name, _with_unit(name, entry["value"]), told, entry["how"]))
    for codec, cost in content["codecs"].items():
        for name, value in cost.items():
            title = f"{codec.partition(',')[0]} {name}"
            rows.append((title, _with_unit(name, value), "-", "4 MiB of values"))
    columns = ("constant", "value", "spread", "how")
    console.print(text_table("", columns, rows, texts=("how",)))
    measured = content["measured"]
    if measures_machine(measured["cpu_share"], measured["stolen_share"]):
        console.print(f"{NO_EVIDENCE}: measure again when it is idle", style="bold")


def _with_unit(name: str, value: float) -> str:
    if name.endswith("byte_s"):
        return f"{value * 1e9:.3f} ns"
    if name.endswith("_s"):
        return f"{value * 1e6:.1f} us"
    return f"{value:,.0f}" if name.endswith("_bytes") else f"{value:.4f}"
