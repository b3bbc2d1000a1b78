"""However a rank ends, all others raise an error that names it, in bounded time."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gradlane._core") is None, reason="the compiled core is not built"
)

ROOT = Path(__file__).parent.parent.parent
WORLD_SIZE = 3
SOURCES = {"PYTHONPATH": f"{ROOT / 'python'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Nursery:
    """The process that forks ranks."""

    def __init__(self) -> None:
        """Start it; torch is loaded while the first request waits."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.adapter.nursery"],
            cwd=ROOT,
            env={**os.environ, **SOURCES},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answers: dict[str, queue.Queue[dict[str, Any]]] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            self._answers[answer["name"]].put(answer)

    def start(self, name: str, **request: Any) -> int:
        """Fork a program; returns its process id."""
        self._answers[name] = queue.Queue()
        assert self._process.stdin is not None
        print(json.dumps({"name": name, **request}), file=self._process.stdin, flush=True)
        return int(self._answers[name].get(timeout=120)["pid"])

    def wait(self, name: str, timeout_s: float) -> int:
        """Wait for a program to end; returns its exit status as `Popen.returncode` has it."""
        return int(self._answers[name].get(timeout=timeout_s)["code"])

    def close(self) -> None:
        """End the nursery."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    process = Nursery()
    yield process
    process.close()


class Run:
    """Some ranks of the training program, as they have ended."""

    def __init__(
        self,
        nursery: Nursery,
        folder: Path,
        ending: str,
        ranks: int = WORLD_SIZE,
        timeout_s: float = 60.0,
    ) -> None:
        """Start all ranks, wait for the first ones to end, and end the rest."""
        port = free_port()
        pids: dict[str, int] = {}
        self.codes: list[int] = []
        names = [f"{folder}-{ending}-{rank}" for rank in range(WORLD_SIZE)]
        try:
            for rank, name in enumerate(names):
                pids[name] = nursery.start(
                    name,
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
                self.codes.append(nursery.wait(name, max(0.1, deadline - time.monotonic())))
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
    ],
)
def test_others_name_the_rank(nursery: Nursery, tmp_path: Path, ending: str, words: str) -> None:
    run = Run(nursery, tmp_path, ending, ranks=2)
    for code, output, errors in zip(run.codes, run.outputs, run.errors, strict=True):
        assert code == 1, errors
        assert "step 2" in output
        # The last line of a traceback is the error itself.
        line = [one for one in errors.splitlines() if "gradlane.errors.PeerLost" in one][-1]
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
    nursery: Nursery, tmp_path: Path, ending: str, code: int, words: str
) -> None:
    run = Run(nursery, tmp_path, ending, ranks=2)
    assert run.codes == [code, 1], run.errors
    assert words in run.errors[1]


def test_a_program_that_ends_without_closing(nursery: Nursery, tmp_path: Path) -> None:
    run = Run(nursery, tmp_path, "normal")
    assert run.codes == [0, 0, 0], run.errors
    assert all("step 6" in output for output in run.outputs)
    assert run.errors[0].startswith("gradlane: 6 steps, ") and run.errors[0].count("\n") == 1
    assert run.errors[1:] == ["", ""]


def test_a_program_that_exits_with_a_status(nursery: Nursery, tmp_path: Path) -> None:
    run = Run(nursery, tmp_path, "sys-exit")
    assert run.codes == [3, 3, 3], run.errors


def test_sigterm_ends_with_the_status_of_the_signal(nursery: Nursery, tmp_path: Path) -> None:
    run = Run(nursery, tmp_path, "sigterm")
    assert run.codes[2] == -signal.SIGTERM


def test_a_program_of_its_own(tmp_path: Path) -> None:
    """One world without the nursery: the interpreter itself ends the ranks."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.adapter.failing_rank", "exception"],
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
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [1, 1]
    assert "PeerLost: rank 1 gave up: ArithmeticError" in errors[0]


def test_torchrun_restarts_find_each_other(tmp_path: Path) -> None:
    """The first attempt's keys are still in the store when the second one meets there."""
    result = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--max-restarts", "1", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "-m", "tests.adapter.restarting"),
        ],
        cwd=ROOT,
        env={**os.environ, **SOURCES},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    lines = sorted(line for line in result.stdout.splitlines() if "attempt 1" in line)
    assert [line.split()[1] for line in lines] == ["0", "1"]
    assert len({line.split()[-1] for line in lines}) == 1
