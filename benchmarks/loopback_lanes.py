"""The transport over loopback with 1, 2 and 4 lanes beside Gloo and plain TCP with as many streams.

`python -m benchmarks.loopback_lanes` starts two ranks on this machine; nothing is shaped. In each
round every system has a turn of its own, with processes of its own: gradlane exchanges the
gradients of a model and takes their means, Gloo sums them up in DDP's buckets, and plain TCP moves
as many bytes in both directions at once and computes nothing. With two ranks each of them moves the
model's bytes in each direction. What is printed is the median of the rounds: goodput of a rank in
one direction, and processor seconds of both ranks for a gigabyte that both send. `--json PATH`
writes every round. `--systems` chooses some of them, as for a pairwise comparison of two builds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch.multiprocessing

LANES = (1, 2, 4)
SYSTEMS = (*(f"gradlane-{it}" for it in LANES), "gloo", *(f"tcp-{it}" for it in LANES))
HOST = "127.0.0.1"


def _processor_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _exchange(
    rank: int, system: str, ports: list[int], elements: list[int], steps: int
) -> tuple[float, float]:
    """Exchange a model over gradlane or Gloo; return seconds and processor seconds."""
    from gradlane.lab.transport import node

    node.INTERFACE = "lo"
    named: dict[str, Any] = {
        "job": f"loopback-{ports[0]}",
        "addresses": [HOST] * 2,
        "store_port": ports[0],
        "tensor_elems": elements,
    }
    exchange: node.Exchange
    if system == "gloo":
        exchange = node.GlooExchange(rank, **named)
    else:
        lanes = int(system.partition("-")[2])
        exchange = node.GradlaneExchange(rank, settings={"lanes": lanes}, **named)
    found = exchange.run(steps, warmup=3)
    exchange.close()
    times = found["boundaries_s"]
    return times[-1] - times[0], found["user_s"] + found["system_s"]


def _stream(rank: int, system: str, ports: list[int], nbytes: int) -> tuple[float, float]:
    """Move bytes both ways over plain TCP; return seconds and processor seconds."""
    streams = int(system.partition("-")[2])
    if rank == 0:
        listener = socket.create_server((HOST, ports[1]))
        sockets = [listener.accept()[0] for _ in range(streams)]
    else:
        sockets = [_connect(ports[1]) for _ in range(streams)]
    part = nbytes // streams
    room = 4 << 20

    def send(one: socket.socket) -> None:
        piece = memoryview(bytearray(room))
        for begin in range(0, part, room):
            one.sendall(piece[: min(room, part - begin)])

    def receive(one: socket.socket) -> None:
        piece, left = memoryview(bytearray(room)), part
        while left > 0:
            left -= one.recv_into(piece, min(room, left))

    threads = [
        threading.Thread(target=each, args=(one,)) for one in sockets for each in (send, receive)
    ]
    began, busy = time.monotonic(), _processor_s()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - began, _processor_s() - busy


def _connect(port: int) -> socket.socket:
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection((HOST, port))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _turn(rank: int, system: str, ports: list[int], given: dict[str, Any], results: Any) -> None:
    torch.set_num_threads(1)
    elements = given["elements"]
    nbytes = sum(elements) * 4 * given["steps"]
    if system.startswith("tcp"):
        seconds, busy = _stream(rank, system, ports, nbytes)
    else:
        seconds, busy = _exchange(rank, system, ports, elements, given["steps"])
    results.put((seconds, busy, nbytes))


def _measure(system: str, given: dict[str, Any]) -> dict[str, float]:
    """Return the goodput in Gbit/s and the processor seconds a gigabyte of one turn."""
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ports = []
    for _ in range(2):
        with socket.create_server((HOST, 0)) as free:
            ports.append(free.getsockname()[1])
    torch.multiprocessing.start_processes(
        _turn, (system, ports, given, results), 2, start_method="spawn"
    )
    ranks = [results.get() for _ in range(2)]
    nbytes = ranks[0][2]
    return {
        "goodput_gbits": nbytes * 8e-9 / max(seconds for seconds, _, _ in ranks),
        "processor_s_a_gb": sum(busy for _, busy, _ in ranks) / (2 * nbytes / 1e9),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tensors", type=int, default=16)
    parser.add_argument("--megabytes", type=int, default=256, help="of all tensors")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    elements = arguments.megabytes * 250_000 // arguments.tensors
    given = {"elements": [elements] * arguments.tensors, "steps": arguments.steps}
    load = os.getloadavg()
    rows: dict[str, list[dict[str, float]]] = {it: [] for it in arguments.systems}
    for number in range(arguments.rounds):
        for system in arguments.systems[:: 1 if number % 2 else -1]:
            rows[system].append(_measure(system, given))
            print(f"{number} {system} {rows[system][-1]}", file=sys.stderr, flush=True)
    print("| system | Gbit/s each way | processor s/GB |\n| --- | ---: | ---: |")
    for system, found in rows.items():
        middle = {it: statistics.median(one[it] for one in found) for it in found[0]}
        print(f"| {system} | {middle['goodput_gbits']:.2f} | {middle['processor_s_a_gb']:.3f} |")
    after = os.getloadavg()
    print(f"load {load[0]:.1f} before and {after[0]:.1f} after, {os.cpu_count()} processors")
    if arguments.json:
        found = {"rows": rows, "load_before": load, "load_after": after, **given}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
