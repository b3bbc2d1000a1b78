"""Programs that tests fork from one process that has loaded torch, which takes many seconds.

Programs are modules or files, with arguments, an environment and files for what they print. Tests
take the fixture `programs` of `tests/conftest.py`, which all of them share.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

from gradlane.lab.cluster.fork_server import ForkedProgram, running_fork_server
from tests.paths import ROOT
from tests.waiting import eventually

SOURCES = {
    # That of ranks of the lab, so that all are forked from one process.
    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    "OMP_NUM_THREADS": "1",
}
PATIENCE_S = 240.0
"""For a program to start or to end: starved processes take minutes, and pytest waits for 300 s."""


def rank_environments(world_size: int, local_size: int) -> list[dict[str, str]]:
    """Return what a launcher tells each rank of its place, by rank."""
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % local_size),
            "LOCAL_WORLD_SIZE": str(local_size),
        }
        for rank in range(world_size)
    ]


class ForkedPrograms:
    """Programs by name, each with files for what it prints; threads may share them."""

    def __init__(self) -> None:
        """Start the fork server; torch is loaded while the first program waits."""
        running_fork_server(SOURCES)
        self._programs: dict[str, ForkedProgram] = {}
        self._asking = threading.Lock()

    def start(
        self,
        name: str,
        *,
        program: str,
        arguments: list[str],
        output: str,
        errors: str,
        environment: dict[str, str],
        modules: Sequence[str] = (),
    ) -> int:
        """Fork a program; returns its process id.

        Args:
            name: of the program.
            program: name of a module, or path of a file.
            arguments: of the program.
            output: path of a file for what it prints.
            errors: path of a file for its standard error.
            environment: added to this process's.
            modules: that are loaded once for all programs.
        """
        with Path(output).open("wb") as stdout, Path(errors).open("wb") as stderr, self._asking:
            forked = running_fork_server(SOURCES).fork(
                program,
                arguments,
                environment={**SOURCES, **environment},
                stdout=stdout,
                stderr=stderr,
                folder=ROOT,
                modules=modules,
                timeout_s=PATIENCE_S,
            )
        forked.stdin.close()
        forked.stdout.close()
        self._programs[name] = forked
        return forked.pid

    def wait(self, name: str, timeout_s: float) -> int:
        """Wait for a program to end; returns its exit status as `Popen.returncode` has it.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """

        def has_ended() -> bool:
            with self._asking:
                return self._programs[name].has_ended

        if not has_ended() and not eventually(has_ended, timeout_s):
            raise subprocess.TimeoutExpired(name, timeout_s)
        code = self._programs[name].wait(0.0)
        assert code is not None
        return code

    def run_all(
        self,
        folder: Path,
        program: str,
        arguments: list[str],
        environments: list[dict[str, str]],
        timeout_s: float = PATIENCE_S,
        modules: Sequence[str] = (),
    ) -> list[str]:
        """Run a program once for each environment, at once; returns what each of them printed.

        Args:
            folder: for what they print.
            program: name of a module, or path of a file.
            arguments: of the program.
            environments: added to this process's.
            timeout_s: for each of them.
            modules: that are loaded once for all programs.
        """
        started = self.start_all(folder, program, arguments, environments, modules)
        codes = self.wait_all(started, timeout_s)
        paths = [folder / f"errors-{index}" for index in range(len(codes))]
        assert codes == [0] * len(codes), "\n".join(path.read_text() for path in paths)
        return [(folder / f"output-{index}").read_text() for index in range(len(codes))]

    def start_all(
        self,
        folder: Path,
        program: str,
        arguments: list[str],
        environments: list[dict[str, str]],
        modules: Sequence[str] = (),
    ) -> dict[str, int]:
        """Start a program once for each environment; returns their process ids by name.

        They print to `output-0`, `output-1` and so on in the folder, and to `errors-0`. Arguments
        are those of `run_all`.
        """
        started = {}
        for index, environment in enumerate(environments):
            name = f"{folder}-{uuid.uuid4().hex}"
            started[name] = self.start(
                name,
                program=program,
                arguments=arguments,
                output=str(folder / f"output-{index}"),
                errors=str(folder / f"errors-{index}"),
                environment=environment,
                modules=modules,
            )
        return started

    def wait_all(self, names: Iterable[str], timeout_s: float = PATIENCE_S) -> list[int]:
        """Return the exit statuses of programs; where one takes too long, all are killed.

        Raises:
            TimeoutExpired: one runs longer.
        """
        try:
            return [self.wait(name, timeout_s) for name in names]
        except subprocess.TimeoutExpired:
            for name in names:
                self._programs[name].kill()
            raise

    def close(self) -> None:
        """End the programs that still run."""
        for program in self._programs.values():
            program.kill()
