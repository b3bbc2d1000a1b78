"""However a rank ends, all others raise an error that names it, in bounded time."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.built import needs_core
from tests.forked_programs import PATIENCE_S, SOURCES, ForkedPrograms
from tests.paths import ROOT
from tests.ports import reserve_port

pytestmark = needs_core

WORLD_SIZE = 3


class Run:
    """Some ranks of the training program, as they have ended."""

    def __init__(
        self,
        programs: ForkedPrograms,
        folder: Path,
        ending: str,
        ranks: int = WORLD_SIZE,
        timeout_s: float = PATIENCE_S,
    ) -> None:
        """Start all ranks, wait for the first ones to end, and end the rest."""
        port = reserve_port()
        pids: dict[str, int] = {}
        self.codes: list[int] = []
        names = [f"{folder}-{ending}-{rank}" for rank in range(WORLD_SIZE)]
        try:
            for rank, name in enumerate(names):
                pids[name] = programs.start(
                    name,
                    program="tests.training.model.failing_rank",
                    arguments=[ending],
                    output=str(folder / f"output-{rank}"),
                    errors=str(folder / f"errors-{rank}"),
                    environment={
                        "RANK": str(rank),
                        "WORLD_SIZE": str(WORLD_SIZE),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(port),
                    },
                )
            deadline = time.monotonic() + timeout_s
            for name in names[:ranks]:
                self.codes.append(programs.wait(name, max(0.1, deadline - time.monotonic())))
        finally:
            for name in names[len(self.codes) :]:
                with contextlib.suppress(ProcessLookupError, KeyError):
                    os.kill(pids[name], signal.SIGKILL)
        self.outputs = [(folder / f"output-{rank}").read_text() for rank in range(ranks)]
        self.errors = [(folder / f"errors-{rank}").read_text() for rank in range(ranks)]


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ("exception", "rank 2 gave up: ArithmeticError: the loss is not a number"),
        ("sigkill", "rank 2"),
        ("sigstop", "rank 2"),
        ("sigterm", "rank 2 gave up: received SIGTERM"),
        ("interrupt", "rank 2 gave up: KeyboardInterrupt"),
        ("finish-early", "rank 2"),
        ("exit-early", "rank 2 gave up: its program ended with exit status 3"),
        ("exit-early-in-words", "rank 2 gave up: its program ended with exit status 1 (no more"),
    ],
)
def test_others_name_the_rank(
    programs: ForkedPrograms, tmp_path: Path, ending: str, words: str
) -> None:
    run = Run(programs, tmp_path, ending, ranks=2)
    for code, output, errors in zip(run.codes, run.outputs, run.errors, strict=True):
        assert code == 1, errors
        assert "step 2" in output
        # The last line of a traceback is the error itself.
        line = [one for one in errors.splitlines() if "gradlane.errors.PeerLostError" in one][-1]
        assert words in line
        # What rank 2 still owed of step 3 may be cut off by its end.
        assert re.search(r"last complete step: [23] ", line)


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ("sigterm-waiting", -signal.SIGTERM, "rank 0 gave up: received SIGTERM"),
        ("interrupt-waiting", 1, "rank 0 gave up: KeyboardInterrupt"),
    ],
)
def test_signals_reach_a_rank_that_waits(
    programs: ForkedPrograms, tmp_path: Path, ending: str, code: int, words: str
) -> None:
    run = Run(programs, tmp_path, ending, ranks=2)
    assert run.codes == [code, 1], run.errors
    assert words in run.errors[1]


def test_a_program_that_ends_without_closing(programs: ForkedPrograms, tmp_path: Path) -> None:
    run = Run(programs, tmp_path, "normal")
    assert run.codes == [0, 0, 0], run.errors
    assert all("step 6" in output for output in run.outputs)
    assert run.errors[0].startswith("gradlane: 6 steps, ") and run.errors[0].count("\n") == 1
    assert run.errors[1:] == ["", ""]


def test_a_program_that_exits_with_a_status(programs: ForkedPrograms, tmp_path: Path) -> None:
    run = Run(programs, tmp_path, "sys-exit")
    assert 3 in run.codes, run.errors
    for code, told in zip(run.codes, run.errors, strict=True):
        # A rank that is still in its last step loses one that has ended.
        assert code == 3 or "its program ended with exit status 3" in told, run.errors


def test_sigterm_ends_with_the_status_of_the_signal(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    run = Run(programs, tmp_path, "sigterm")
    assert run.codes[2] == -signal.SIGTERM


def test_a_program_of_its_own(tmp_path: Path) -> None:
    """One world without the programs: the interpreter itself ends the ranks."""
    port = reserve_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.training.model.failing_rank", "exception"],
            cwd=ROOT,
            env={
                **os.environ,
                **SOURCES,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=PATIENCE_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [1, 1]
    assert "PeerLostError: rank 1 gave up: ArithmeticError" in errors[0]


def test_torchrun_restarts_find_each_other(programs: ForkedPrograms, tmp_path: Path) -> None:
    """The first attempt's keys are still in the store when the second one meets there."""
    program, port = "tests.training.model.restarting", str(reserve_port())
    (printed,) = programs.run_all(tmp_path, program, [port], [{}])
    lines = sorted(line for line in printed.splitlines() if "attempt 1" in line)
    assert [line.split()[1] for line in lines] == ["0", "1"]
    assert len({line.split()[-1] for line in lines}) == 1
