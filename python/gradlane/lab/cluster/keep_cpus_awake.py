"""Keeps the processors of a virtual machine awake while something is measured on it.

An idle virtual processor halts, and runs again when its host gets round to it. On a busy host that
is late by more than a packet takes on the wire: the kernel counts it as stolen time, ports that are
shaped by timers carry less, and ranks wake up late. A process that spins at idle priority keeps
each processor running. Every other process preempts it at once, and its time is not counted as
use of the machine.

A priority holds within a session only, since Linux shares a processor evenly between sessions
(`sched_autogroup`). So a spinning process also gives its own session the smallest weight.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from gradlane.formats.signals import signals_blocked
from gradlane.lab.cluster.machine import STOLEN, machine_ticks

NAME = "gradlane-awake"
"""Of the processes, which the kernel cuts off after fifteen letters."""

_PROGRAM = """
import os, sys, time
processor, parent, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
try:
    os.sched_setaffinity(0, {processor})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
except OSError:
    # Where that is forbidden nothing spins: with any other priority it would be in the way.
    sys.exit()
for _ in range(20):
    try:
        with open("/proc/self/autogroup", "w") as group:
            group.write("19")
        break
    except BlockingIOError:
        # Without privileges the kernel takes one change in 0.1 s from the whole machine.
        time.sleep(0.11)
    except OSError:
        break  # This kernel does not weigh sessions, or forbids it.
with open("/proc/self/comm", "w") as comm:
    comm.write(name)
try:
    from gradlane._core import keep_awake as spin
except ImportError:
    while os.getppid() == parent:
        for _ in range(1_000_000):
            pass
else:
    spin(parent)
"""


@contextlib.contextmanager
def cpus_kept_awake() -> Iterator[None]:
    """Return a context in which processors do not halt; it does nothing on a machine of its own.

    The processes end with the context, and by themselves where this process is killed.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        if is_virtual():
            for processor in sorted(os.sched_getaffinity(0)):
                with signals_blocked():
                    processes.append(_start(processor))
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def _start(processor: int) -> subprocess.Popen[bytes]:
    # In a session of its own: Ctrl-C in a terminal goes to the parent alone.
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(processor), str(os.getpid()), NAME],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def is_virtual() -> bool:
    """Return whether a hypervisor runs this machine."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("flags"):
            return "hypervisor" in line.split()
    # Other processors do not say so, but the kernel does once it had to wait.
    return machine_ticks()[STOLEN] > 0


def awake_processes() -> list[int]:
    """Return the identifiers of all such processes on this machine."""
    found = []
    for comm in Path("/proc").glob("[0-9]*/comm"):
        # What has ended meanwhile keeps nothing awake.
        with contextlib.suppress(OSError):
            if comm.read_text(encoding="utf-8").strip() == NAME[:15]:
                found.append(int(comm.parent.name))
    return found
