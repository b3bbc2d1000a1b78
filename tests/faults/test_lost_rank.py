"""The benchmark of a lost rank judges right, and leaves no process behind."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from benchmarks.lost_rank.campaign import Kill, draw_kills, run_kill
from benchmarks.lost_rank.judge import judge
from benchmarks.lost_rank.processes import Processes
from benchmarks.lost_rank.rank_log import BEGUN, DONE, RankLog, log_path, read_log
from benchmarks.lost_rank.rank_log import Event as LogEvent
from benchmarks.lost_rank.systems import Job, System

STEP_S = 0.1
KILLED_AT_S = 2.05
VICTIM = 0


def _steps(first: int, last: int, begin_s: float, checksum: int = 1) -> list[LogEvent]:
    """Steps `first` to `last` without a pause, the first of which begins at `begin_s`."""
    events = []
    for step in range(first, last + 1):
        at_s = begin_s + (step - first) * STEP_S
        events.append(LogEvent(BEGUN, at_s, step))
        events.append(LogEvent(DONE, at_s + STEP_S, step, checksum=checksum))
    return events


def test_a_restart_loses_the_steps_since_the_checkpoint() -> None:
    # Step 20 is under way at the kill; the ranks are back after 5 s, from step 16.
    before = [*_steps(0, 19, 0.0), LogEvent(BEGUN, 2.0, 20)]
    log = [*before, *_steps(16, 29, 7.0)]
    found = judge(dict.fromkeys(range(3), log), VICTIM, KILLED_AT_S, 30)
    assert found.finished and found.same_parameters and found.live_ranks == 3
    assert found.normal_step_s == pytest.approx(STEP_S)
    # No step from 2.0 to 7.1, and no new one until step 20 at 7.5, each less a normal step.
    assert found.pause_s == pytest.approx(5.0)
    assert found.until_new_s == pytest.approx(5.4)
    assert found.steps_lost == 5


def test_survivors_that_finish_the_step_in_flight_lose_none() -> None:
    survivor = [*_steps(0, 19, 0.0), LogEvent(BEGUN, 2.0, 20), LogEvent(DONE, 2.6, 20)]
    survivor += _steps(21, 29, 2.6)
    logs = {VICTIM: _steps(0, 19, 0.0), 1: survivor, 2: survivor}
    found = judge(logs, VICTIM, KILLED_AT_S, 30)
    assert (found.steps_lost, found.live_ranks) == (0, 2)
    assert found.pause_s == pytest.approx(0.5)
    assert found.until_new_s == pytest.approx(0.5)


def test_a_discarded_attempt_and_a_step_never_done_are_lost() -> None:
    again = [*_steps(0, 19, 0.0), LogEvent(BEGUN, 2.0, 20), *_steps(20, 29, 3.0)]
    skipped = [*_steps(0, 19, 0.0), *_steps(22, 29, 3.0)]
    victim = _steps(0, 19, 0.0)
    assert judge({VICTIM: victim, 1: again}, VICTIM, KILLED_AT_S, 30).steps_lost == 1
    assert judge({VICTIM: victim, 1: again, 2: skipped}, VICTIM, KILLED_AT_S, 30).steps_lost == 2


def test_survivors_that_stop_or_differ_are_found() -> None:
    before = _steps(0, 19, 0.0)
    stopped = judge(dict.fromkeys(range(3), before), VICTIM, KILLED_AT_S, 30)
    assert not stopped.finished and not stopped.same_parameters
    assert stopped.pause_s is None and stopped.until_new_s is None
    one, other = (before + _steps(20, 29, 2.0, checksum) for checksum in (1, 2))
    differ = judge({VICTIM: before, 1: one, 2: other}, VICTIM, KILLED_AT_S, 30)
    assert differ.finished and not differ.same_parameters


def test_too_few_steps_before_the_kill_are_refused() -> None:
    logs = dict.fromkeys(range(2), _steps(0, 29, 0.0))
    with pytest.raises(ValueError, match="rank 1 completed 5 steps before the kill"):
        judge(logs, VICTIM, 0.55, 30)


def test_a_killed_rank_s_last_line_may_be_cut(tmp_path: Path) -> None:
    log = RankLog(tmp_path, 3)
    log.begin(0)
    log.end(0, 1.5, 7)
    path = log_path(tmp_path, 3)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    RankLog(tmp_path, 3).begin(0)
    events = read_log(path)
    assert [event.kind for event in events] == ["started", "begun", "started", "begun"]
    path.write_bytes(whole)
    assert read_log(path)[-1].checksum == 7


def test_every_rank_is_killed_equally_often() -> None:
    kills = draw_kills(seed=3, count=400, ranks=4, every=20)
    assert kills == draw_kills(seed=3, count=400, ranks=4, every=20)
    assert Counter(kill.victim for kill in kills) == dict.fromkeys(range(4), 100)
    # Every phase between two checkpoints.
    assert {kill.step % 20 for kill in kills} == set(range(20))


PROGRAM = """
import json, os, pathlib, sys, time
from benchmarks.lost_rank.rank_log import RankLog
job = json.loads(pathlib.Path(sys.argv[1]).read_text())
rank = int(os.environ["RANK"])
log = RankLog(pathlib.Path(job["folder"]), rank)
for step in range(job["steps"]):
    log.begin(step)
    time.sleep(0.005)
    if step == job["stops_at"]:
        time.sleep(600)
    log.end(step, 0.0, step)
"""


def _run(folder: Path, stops_at: int, limit_s: float) -> tuple[str, list[int]]:
    """Kill one of two ranks that train nothing; return the failure, and all processes' ids."""

    def start(job: Job, processes: Processes) -> None:
        for rank in range(job.ranks):
            command = [sys.executable, "-c", PROGRAM, str(job.folder / "job.json")]
            processes.start(f"rank-{rank}", command, {"RANK": str(rank)})

    system = System("", {"stops_at": stops_at}, start, lambda _: "")
    job = Job(folder, 2, sys.executable)
    result = run_kill("fake", system, Kill(1, 12, 0.0), job, 20, limit_s)
    assert result.kill.victim == 1
    ids = [event.pid for rank in range(2) for event in read_log(log_path(folder, rank))]
    return result.failure, ids


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_survivor_that_goes_on_is_no_failure(tmp_path: Path) -> None:
    failure, ids = _run(tmp_path, stops_at=-1, limit_s=120.0)
    assert not failure
    assert not any(map(_lives, ids))


def test_a_survivor_that_hangs_is_ended_at_the_deadline(tmp_path: Path) -> None:
    failure, ids = _run(tmp_path, stops_at=20, limit_s=4.0)
    assert failure.startswith("time is over")
    assert not any(map(_lives, ids))
