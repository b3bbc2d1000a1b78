"""Bytes on every port and use of the machine's processors over time.

A thread samples the kernel's counters; windows are cut out afterwards by interpolation, so that
ranks never wait for a sample. Times are `time.monotonic()`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradlane.lab.cluster.keep_cpus_awake import awake_processes
from gradlane.lab.cluster.machine import IDLE, STOLEN, WAITING, machine_ticks
from gradlane.lab.cluster.namespaces import INTERFACE

_PREFIX = f"{INTERFACE}:".encode()
_COUNTERS_BYTES_MAX = 65_536


def read_port_bytes(descriptor: int) -> tuple[int, int]:
    """Return (received, transmitted) bytes of a node's interface since it was made.

    A segmentation-offload packet counts with one header, so these are payload bytes and about a
    thousandth on top.

    Args:
        descriptor: the node's open `/proc/net/dev`.
    """
    for line in os.pread(descriptor, _COUNTERS_BYTES_MAX, 0).splitlines():
        text = line.strip()
        if text.startswith(_PREFIX):
            fields = text[len(_PREFIX) :].split()
            return int(fields[0]), int(fields[8])
    raise OSError(f"{INTERFACE} is missing from the node's counters")


def read_processor_ticks(spinning: Sequence[int] = ()) -> tuple[int, int, int]:
    """Return clock ticks of all processors of the machine since it started: busy, total, stolen.

    Stolen ticks are busy ones that the host of a virtual machine gave to others.

    Args:
        spinning: processes that only keep processors awake; theirs are no busy ticks.
    """
    ticks = machine_ticks()
    idle = ticks[IDLE] + ticks[WAITING]
    total = sum(ticks)
    spun = round(spinning_s(spinning) * os.sysconf("SC_CLK_TCK"))
    return total - idle - spun, total, ticks[STOLEN]


def read_process_cpu_ns(process: int) -> int:
    """Return the processor time of a process and all its threads since it started.

    The kernel keeps a clock for every process: `clock_getcpuclockid(3)` says how it is numbered.
    """
    per_process_scheduler_clock = 2
    return time.clock_gettime_ns((~process << 3) | per_process_scheduler_clock)


def spinning_s(processes: Sequence[int]) -> float:
    """Return the processor time of processes that only keep processors awake."""
    total_ns = 0
    for process in processes:
        with contextlib.suppress(OSError):
            total_ns += read_process_cpu_ns(process)
    return total_ns / 1e9


class _Samples:
    """Counters that grow, sampled over time."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self._values: list[Sequence[int]] = []

    def add(self, time_s: float, values: Sequence[int]) -> None:
        """Append a sample of all counters."""
        self.times_s.append(time_s)
        self._values.append(values)

    def growth(self, edges_s: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the growth between neighbouring times: a row for each pair, a column a counter.

        Counters are interpolated between samples; the first and the last sample hold beyond them.
        """
        if not self.times_s:
            raise ValueError("no sample was taken")
        edges = np.asarray(edges_s, dtype=np.float64)
        columns = zip(*self._values, strict=True)
        at_edges = [np.interp(edges, self.times_s, column) for column in columns]
        values = np.reshape(np.array(at_edges, dtype=np.float64), (-1, len(edges)))
        grown: npt.NDArray[np.float64] = np.diff(values).T
        return grown


class TrafficRecord:
    """Samples of a cluster's ports and of the processors, to be cut into windows."""

    def __init__(self, nodes: int) -> None:
        """Start with no samples."""
        self._nodes = nodes
        self._ports = _Samples()
        self._processors = _Samples()
        self._processes = _Samples()
        self._counts: list[Sequence[tuple[int, int]]] = []

    def add_count(self, port_bytes: Sequence[tuple[int, int]]) -> None:
        """Append (received, transmitted) bytes of each node at a moment when nothing is sent."""
        self._counts.append(port_bytes)

    def counted_bytes(self) -> list[tuple[int, int]]:
        """Return (received, transmitted) bytes of each node between the first and the last count.

        Unlike those of a window, which interpolates between samples, these are exact.
        """
        first, last = self._counts[0], self._counts[-1]
        return [
            (after[0] - before[0], after[1] - before[1])
            for before, after in zip(first, last, strict=True)
        ]

    def add_ports(self, time_s: float, port_bytes: Sequence[tuple[int, int]]) -> None:
        """Append a sample: (received, transmitted) bytes for each node."""
        self._ports.add(time_s, [count for pair in port_bytes for count in pair])

    def add_processors(self, time_s: float, ticks: tuple[int, int, int]) -> None:
        """Append a sample, as `read_processor_ticks` returns it."""
        self._processors.add(time_s, ticks)

    def add_processes(self, time_s: float, cpu_ns: Sequence[int]) -> None:
        """Append a sample: processor time of each process, in nanoseconds."""
        self._processes.add(time_s, cpu_ns)

    def bytes_between(self, start_s: float, end_s: float) -> list[tuple[float, float]]:
        """Return (received, transmitted) bytes of each node in a window."""
        (moved,) = self._ports.growth([start_s, end_s])
        return [(received, sent) for received, sent in moved.reshape(-1, 2).tolist()]

    def processor_share(self, start_s: float, end_s: float) -> float:
        """Return the share, 0 to 1, of the machine's processor time that was busy in a window."""
        return self._tick_share(0, start_s, end_s)

    def stolen_share(self, start_s: float, end_s: float) -> float:
        """Return the share, 0 to 1, of that time that went to other virtual machines."""
        return self._tick_share(2, start_s, end_s)

    def _tick_share(self, column: int, start_s: float, end_s: float) -> float:
        (ticks,) = self._processors.growth([start_s, end_s]).tolist()
        # Ticks are counted when a timer happens to fire, processor time is measured.
        return max(0.0, ticks[column]) / ticks[1] if ticks[1] > 0 else 0.0

    def utilization(self, start_s: float, end_s: float, goodput_bps: float) -> float:
        """Return carried bits over carriable bits, mean over nodes and both directions."""
        duration_s = end_s - start_s
        if duration_s <= 0:
            return 0.0
        carried = sum(sum(pair) for pair in self.bytes_between(start_s, end_s))
        return 8 * carried / (2 * self._nodes * goodput_bps * duration_s)

    def series(
        self, start_s: float, end_s: float, goodput_bps: float, points: int
    ) -> dict[str, list[float]]:
        """Return utilization over time, mean over nodes, in equal bins.

        Returns:
            `time_s` (real, the middle of each bin, since the window's start), `transmit` and
            `receive` (shares of the goodput), each with `points` entries.
        """
        edges_s = np.linspace(start_s, end_s, points + 1)
        carriable = self._nodes * goodput_bps * (end_s - start_s) / points / 8
        shares = self._ports.growth(edges_s) / carriable
        return {
            "time_s": ((edges_s[:-1] + edges_s[1:]) / 2 - start_s).tolist(),
            "transmit": shares[:, 1::2].sum(axis=1).tolist(),
            "receive": shares[:, 0::2].sum(axis=1).tolist(),
        }

    def port_bins(self, edges_s: Sequence[float]) -> tuple[list[list[int]], list[list[int]]]:
        """Return (received, transmitted) bytes between neighbouring edges, a list for each node."""
        columns = np.rint(self._ports.growth(edges_s)).astype(np.int64).T.tolist()
        return columns[0::2], columns[1::2]

    def process_bins(self, edges_s: Sequence[float]) -> list[list[float]]:
        """Return processor seconds between neighbouring edges, a list for each process."""
        if not self._processes.times_s:
            return []
        columns: list[list[float]] = (self._processes.growth(edges_s) / 1e9).round(6).T.tolist()
        return columns

    def sample_gaps_s(self, start_s: float, end_s: float) -> list[float]:
        """Return the times between neighbouring samples of the ports in a window."""
        inside = [time_s for time_s in self._ports.times_s if start_s <= time_s <= end_s]
        return [later - before for before, later in itertools.pairwise(inside)]


@dataclass(frozen=True)
class Recording:
    """Samples of the measured steps of a run. All times are real.

    Attributes:
        record: the samples.
        boundaries_s: when the slowest rank began each measured step, and when the last one ended.
    """

    record: TrafficRecord
    boundaries_s: Sequence[float]


class TrafficSampler:
    """Samples in a thread while its `with` block runs.

    Attributes:
        record: what was sampled so far.
    """

    def __init__(
        self, descriptors: Sequence[int], interval_s: float = 0.01, *, processes: Sequence[int] = ()
    ) -> None:
        """Plan to sample.

        Args:
            descriptors: open `/proc/net/dev` of each node.
            interval_s: time between two samples.
            processes: identifiers of processes whose processor time is sampled, too.
        """
        self.record = TrafficRecord(len(descriptors))
        self._descriptors = list(descriptors)
        self._processes = list(processes)
        self._spinning = awake_processes()
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="gradlane-lab-traffic")

    def __enter__(self) -> TrafficSampler:
        """Take a first sample and go on in the background."""
        self._take(processors=True)
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        """Stop, with a last sample."""
        self._stop.set()
        self._thread.join()
        self._take(processors=True)

    def _sample(self) -> None:
        count = 0
        while not self._stop.wait(self._interval_s):
            count += 1
            self._take(processors=count % 10 == 0)

    def count(self) -> None:
        """Count the ports now, exactly: nothing may be under way."""
        self.record.add_count(self._read_ports())

    def _read_ports(self) -> list[tuple[int, int]]:
        return [read_port_bytes(descriptor) for descriptor in self._descriptors]

    def _take(self, *, processors: bool) -> None:
        # This thread may lose its processor meanwhile: the middle is half as wrong as either end.
        before_s = time.monotonic()
        ports = self._read_ports()
        now_s = (before_s + time.monotonic()) / 2
        self.record.add_ports(now_s, ports)
        # A process that has ended is found missing by those who wait for it, not here.
        with contextlib.suppress(OSError):
            self.record.add_processes(now_s, [read_process_cpu_ns(it) for it in self._processes])
        if processors:
            self.record.add_processors(now_s, read_processor_ticks(self._spinning))
