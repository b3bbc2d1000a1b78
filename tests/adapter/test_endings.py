"""However a rank ends, all others raise an error that names it, in bounded time."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gradlane._core") is None, reason="the compiled core is not built"
)

ROOT = Path(__file__).parent.parent.parent
WORLD_SIZE = 3


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Run:
    """Some ranks of the training program."""

    def __init__(self, ending: str) -> None:
        """Start them."""
        port = free_port()
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.adapter.failing_rank", ending],
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": f"{ROOT / 'python'}{os.pathsep}{ROOT}",
                    "RANK": str(rank),
                    "WORLD_SIZE": str(WORLD_SIZE),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": "1",
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(WORLD_SIZE)
        ]
        self.codes: list[int] = []
        self.outputs: list[str] = []
        self.errors: list[str] = []

    def finish(self, ranks: int = WORLD_SIZE, timeout_s: float = 60.0) -> None:
        """Wait for the first ranks to end, and end the rest."""
        deadline = time.monotonic() + timeout_s
        try:
            for process in self.processes[:ranks]:
                left_s = max(0.1, deadline - time.monotonic())
                output, errors = process.communicate(timeout=left_s)
                self.codes.append(process.returncode)
                self.outputs.append(output)
                self.errors.append(errors)
        finally:
            for process in self.processes:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGCONT)
                    process.kill()
                process.communicate()


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
def test_others_name_the_rank(ending: str, words: str) -> None:
    run = Run(ending)
    run.finish(ranks=2)
    for code, output, errors in zip(run.codes, run.outputs, run.errors, strict=True):
        assert code == 1, errors
        assert "step 3" in output
        assert "gradlane.errors.PeerLost" in errors
        # The last line of a traceback is the error itself.
        line = [one for one in errors.splitlines() if "gradlane.errors.PeerLost" in one][-1]
        assert words in line
        assert "last complete step: 3" in line


def test_a_program_that_ends_without_closing() -> None:
    run = Run("normal")
    run.finish()
    assert run.codes == [0, 0, 0], run.errors
    assert all("step 6" in output for output in run.outputs)
    assert run.errors == ["", "", ""]


def test_a_program_that_exits_with_a_status() -> None:
    run = Run("sys-exit")
    run.finish()
    assert run.codes == [3, 3, 3], run.errors


def test_sigterm_ends_with_the_status_of_the_signal() -> None:
    run = Run("sigterm")
    run.finish()
    assert run.codes[2] == -signal.SIGTERM
