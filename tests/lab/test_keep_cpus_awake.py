"""Processors that are kept awake, and what keeps them so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gradlane.lab.cluster import keep_cpus_awake
from gradlane.lab.cluster.counters import read_processor_ticks, spinning_s
from gradlane.lab.cluster.keep_cpus_awake import awake_processes, cpus_kept_awake
from tests.waiting import eventually

WITHIN_S = 30.0


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual machine, where processes may be of the class that everything else goes before."""
    modest = "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
    if subprocess.run([sys.executable, "-c", modest], capture_output=True, check=False).returncode:
        pytest.skip("the class SCHED_IDLE is forbidden here")
    monkeypatch.setattr(keep_cpus_awake, "is_virtual", lambda: True)


@pytest.mark.usefixtures("virtual")
def test_each_processor_has_a_process_of_the_lowest_class_and_no_longer_than_it_is_wanted() -> None:
    before = set(awake_processes())
    with cpus_kept_awake():
        assert eventually(
            lambda: len(set(awake_processes()) - before) == len(os.sched_getaffinity(0)), WITHIN_S
        )
        own = set(awake_processes()) - before
        assert {os.sched_getscheduler(one) for one in own} == {os.SCHED_IDLE}
        places = [frozenset(os.sched_getaffinity(one)) for one in own]
        assert sorted(places, key=min) == [{one} for one in sorted(os.sched_getaffinity(0))]
    assert not own & set(awake_processes())


@pytest.mark.usefixtures("virtual")
@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="sessions have no weights")
def test_a_spinning_session_has_the_smallest_weight() -> None:
    """The kernel shares a processor between sessions, whatever the class of their processes."""
    before = set(awake_processes())
    with cpus_kept_awake():
        assert eventually(
            lambda: len(set(awake_processes()) - before) == len(os.sched_getaffinity(0)), WITHIN_S
        )
        for one in set(awake_processes()) - before:
            assert Path(f"/proc/{one}/autogroup").read_text().endswith(" nice 19\n")


@pytest.mark.usefixtures("virtual")
def test_spinning_is_no_use_of_the_machine() -> None:
    """Busy ticks without it and what was spun are about all busy ticks."""
    with cpus_kept_awake():
        assert eventually(lambda: spinning_s(awake_processes()) > 0.3, WITHIN_S)
        spinning = awake_processes()
        spun_s = spinning_s(spinning)
        busy, total, _ = read_processor_ticks(spinning)
        all_busy, _, _ = read_processor_ticks()
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    assert total >= all_busy >= busy
    assert (all_busy - busy) * tick_s == pytest.approx(spun_s, abs=0.5)


def test_processes_that_have_ended_have_spun_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    assert spinning_s([ended.pid]) == 0.0


@pytest.mark.usefixtures("virtual")
def test_who_is_killed_leaves_nothing_spinning() -> None:
    before = set(awake_processes())
    program = (
        "import time\n"
        "from gradlane.lab.cluster import keep_cpus_awake\n"
        "keep_cpus_awake.is_virtual = lambda: True\n"
        "with keep_cpus_awake.cpus_kept_awake():\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    assert eventually(lambda: len(set(awake_processes()) - before) > 0, WITHIN_S)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert eventually(lambda: set(awake_processes()) <= before, WITHIN_S)


def test_a_machine_of_its_own_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_cpus_awake, "is_virtual", lambda: False)
    before = set(awake_processes())
    with cpus_kept_awake():
        assert set(awake_processes()) <= before
