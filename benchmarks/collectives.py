"""Collectives over the backend `gradlane` beside Gloo: time and processor time, in turns.

`python -m benchmarks.collectives --ranks 2 4` starts so many ranks on this machine. In each round
every backend calls every operation of a size some times, one backend after the other, so that both
meet the same load. What is printed is the median of the rounds' means, the quotient, and processor
seconds of all ranks a gigabyte of tensors. `--rate 500mbit` puts each rank into a network namespace
with a port of that rate (root, `tc`), and prints each backend's part of it: the time in which
the port can carry an operation's bytes and their headers, over the time taken. `--spin US` lets
gradlane's waiting threads spin. `--json PATH` writes every round, `--markdown PATH` the
table, `--svg PATH` a plot of the quotients.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from benchmarks.collectives_chart import draw_quotients
from benchmarks.rank_environment import summed_over_ranks, told_by_rank_0
from torch._C._distributed_c10d import TCPStore

import gradlane.distributed
from gradlane.formats.link_report import PAYLOAD_SHARE
from gradlane.formats.rates import parse_rate

SIZES = (8, 64, 1024, 8192, 65_536, 1 << 20, 8 << 20, 64 << 20)
BACKENDS = ("gradlane", "gloo")
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")


def _call(operation: str, nbytes: int, rank: int, ranks: int, group: Any) -> Callable[[], Any]:
    """Return a call of an operation whose largest tensor has about so many bytes on each rank."""
    elements = max(1, nbytes // 4)
    part = max(1, elements // ranks)
    small, whole = torch.ones(part), torch.ones(part * ranks)
    received = torch.ones(part * ranks)
    if operation == "all_reduce":
        tensor = torch.ones(elements)
        return lambda: dist.all_reduce(tensor, group=group)
    if operation == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, small, group=group)
    if operation == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(small, whole, group=group)
    if operation == "all_to_all":
        return lambda: dist.all_to_all_single(received, whole, group=group)

    tensor = torch.ones(elements)

    def there_and_back() -> None:
        """Send from each even rank to the next one, and back."""
        other = rank ^ 1
        if other >= ranks:
            return
        first, second = (dist.send, dist.recv) if rank % 2 == 0 else (dist.recv, dist.send)
        first(tensor, other, group=group)
        second(tensor, other, group=group)

    return there_and_back


def _measure(rank: int, ranks: int, host: str, port: int, options: dict[str, Any]) -> Any:
    """Measure on one rank; return rows."""
    torch.set_num_threads(1)
    gradlane.distributed.register()
    store = TCPStore(host, port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=300)
    )
    pg_options: Any = gradlane.distributed.GroupOptions(spin_us=options["spin_us"])
    groups: dict[str, Any] = {
        "gloo": dist.group.WORLD,
        "gradlane": dist.new_group(backend="gradlane", pg_options=pg_options),
    }
    rows = []
    for operation in options["operations"]:
        for nbytes in options["sizes"]:
            calls = {it: _call(operation, nbytes, rank, ranks, groups[it]) for it in BACKENDS}
            count = max(1, min(options["calls"], options["round_bytes"] // max(nbytes, 1)))
            times: dict[str, list[float]] = {it: [] for it in BACKENDS}
            processor: dict[str, list[float]] = {it: [] for it in BACKENDS}
            for number in range(options["rounds"]):
                for backend in BACKENDS if number % 2 else BACKENDS[::-1]:
                    dist.barrier()
                    calls[backend]()
                    began, busy = time.perf_counter(), time.process_time()
                    for _ in range(count):
                        calls[backend]()
                    times[backend].append((time.perf_counter() - began) / count)
                    processor[backend].append((time.process_time() - busy) / count)
            rows.append(
                {
                    "operation": operation,
                    "ranks": ranks,
                    "bytes": nbytes,
                    "rate_bps": options["rate_bps"],
                    "calls": count,
                    "seconds": times,
                    "processor_seconds": summed_over_ranks(processor),
                }
            )
            if rank == 0:
                print(_line(rows[-1]), file=sys.stderr, flush=True)
    dist.destroy_process_group()
    return rows


def _measure_locally(rank: int, ranks: int, port: int, options: dict[str, Any], found: Any) -> None:
    rows = _measure(rank, ranks, "127.0.0.1", port, options)
    if rank == 0:
        found.put(rows)


def _on_this_machine(ranks: int, options: dict[str, Any]) -> Any:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.start_processes(
        _measure_locally, (ranks, store.port, options, found), ranks, start_method="spawn"
    )
    return found.get()


def _on_shaped_ports(ranks: int, options: dict[str, Any]) -> Any:
    program = ["-m", "benchmarks.collectives", "--measure", json.dumps(options)]
    return json.loads(b"".join(told_by_rank_0(ranks, options["rate_bps"], program)))


def _measure_in_namespace(options: dict[str, Any]) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=True, wait_for_workers=False) if rank == 0 else None
    rows = _measure(rank, ranks, host, port, options)
    del store
    print(json.dumps(rows))


def port_share(row: dict[str, Any], seconds: float) -> float:
    """Return the time in which a port carries an operation's bytes, over the time taken.

    Args:
        row: operation, ranks, bytes of the largest tensor, and the rate of a port.
        seconds: that a call has taken.
    """
    ranks, nbytes = row["ranks"], row["bytes"]
    others = (ranks - 1) / ranks
    carried = nbytes * {"all_reduce": 2 * others, "send_recv": 2.0}.get(row["operation"], others)
    return float(carried * 8 / (row["rate_bps"] * PAYLOAD_SHARE) / seconds)


def _medians(row: dict[str, Any], key: str) -> dict[str, float]:
    return {it: statistics.median(row[key][it]) for it in BACKENDS}


def _line(row: dict[str, Any]) -> str:
    time_s, busy_s = _medians(row, "seconds"), _medians(row, "processor_seconds")
    gigabytes = row["bytes"] * row["ranks"] / 1e9
    named = f"| {row['operation']} | {row['ranks']} | {row['bytes']:,} "
    if row["rate_bps"]:
        parts = [port_share(row, time_s[it]) for it in BACKENDS]
        return (
            f"{named}| {time_s['gradlane'] * 1e3:,.1f} | {time_s['gloo'] * 1e3:,.1f} "
            f"| {parts[0]:.3f} | {parts[1]:.3f} |"
        )
    return (
        f"{named}"
        f"| {time_s['gradlane'] * 1e6:,.0f} | {time_s['gloo'] * 1e6:,.0f} "
        f"| {time_s['gradlane'] / time_s['gloo']:.2f} "
        f"| {busy_s['gradlane'] / gigabytes:,.2f} | {busy_s['gloo'] / gigabytes:,.2f} |"
    )


HEAD = (
    "| operation | ranks | bytes | gradlane, µs | Gloo, µs | quotient "
    "| gradlane, s/GB | Gloo, s/GB |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
)
SHAPED_HEAD = (
    "| operation | ranks | bytes | gradlane, ms | Gloo, ms "
    "| gradlane, part of the port | Gloo, part of the port |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--operations", nargs="+", default=list(OPERATIONS), choices=OPERATIONS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=100, help="calls a round, at most")
    parser.add_argument("--round-bytes", type=int, default=64 << 20, help="bytes a round, at most")
    parser.add_argument("--spin", type=int, default=0, metavar="US")
    parser.add_argument("--rate", help="of each rank's port, as 500mbit; none: this machine's own")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        _measure_in_namespace(json.loads(given.measure))
        return
    options = {
        "operations": given.operations,
        "sizes": given.sizes,
        "rounds": given.rounds,
        "calls": given.calls,
        "round_bytes": given.round_bytes,
        "spin_us": given.spin,
        "rate_bps": round(parse_rate(given.rate)) if given.rate else 0,
    }
    rows: list[dict[str, Any]] = []
    load = os.getloadavg()
    measure = _on_shaped_ports if given.rate else _on_this_machine
    for ranks in given.ranks:
        rows += measure(ranks, options)
    table = "\n".join([SHAPED_HEAD if given.rate else HEAD, *map(_line, rows)])
    print(table)
    print(
        f"load {load[0]:.1f} before and {os.getloadavg()[0]:.1f} after, {os.cpu_count()} processors"
    )
    if given.json:
        found = {"rows": rows, "load_before": load, "load_after": os.getloadavg(), **options}
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    if given.markdown:
        given.markdown.write_text(table + "\n")
    if given.svg:
        given.svg.write_text(draw_quotients(rows))


if __name__ == "__main__":
    main()
