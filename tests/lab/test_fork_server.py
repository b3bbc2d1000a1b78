"""The process that ranks are forked from."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gradlane.lab.cluster.fork_server import ForkedProgram, ForkServer, running_fork_server
from gradlane.lab.cluster.namespaces import EmulatedCluster
from tests.namespaces import needs_namespaces
from tests.paths import ROOT


@needs_namespaces
def test_ranks_run_the_sources_that_they_are_started_with(tmp_path: Path) -> None:
    """One build beside another in one cluster: none has what was loaded for another one."""
    (tmp_path / "gradlane").symlink_to(ROOT / "python" / "gradlane")
    (tmp_path / "where.py").write_text("import gradlane\nprint(gradlane.__file__)\n")
    found = []
    with EmulatedCluster(1, 100_000_000) as cluster:
        for first in (ROOT / "python", tmp_path, ROOT / "python"):
            environment = {"PYTHONPATH": os.pathsep.join(map(str, (first, tmp_path)))}
            with (tmp_path / "errors").open("w+b") as errors:
                child = running_fork_server(environment).fork(
                    "where",
                    [],
                    namespace=cluster.namespace_descriptor(0),
                    environment=environment,
                    stderr=errors,
                    timeout_s=60.0,
                )
                child.stdin.close()
                with child.stdout:
                    found.append(Path(child.stdout.read().decode().strip()).parent.parent)
                assert child.wait(60.0) == 0, (tmp_path / "errors").read_text()
    assert found == [ROOT / "python", tmp_path, ROOT / "python"]


def test_an_identifier_that_comes_round_is_another_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads use them up, too: a new program must not have the end of an earlier one."""

    processes: list[Server] = []

    class Server:
        """The process that forks, with the identifiers that a kernel could give it."""

        def __init__(self, *_: Any, pass_fds: list[int], **__: Any) -> None:
            self.control = socket.socket(fileno=os.dup(pass_fds[0]))
            processes.append(self)
            self.say(ready=True)

        def say(self, **told: Any) -> None:
            self.control.send(json.dumps(told).encode())

        def poll(self) -> None:
            """Run on."""

        def kill(self) -> None:
            self.control.close()

        def wait(self) -> None:
            """Have ended."""

    monkeypatch.setattr(subprocess, "Popen", Server)
    server = ForkServer({})
    (process,) = processes
    children: list[ForkedProgram] = []
    with (tmp_path / "errors").open("wb") as errors:
        for _ in range(2):
            process.say(pid=os.getpid())
            child = server.fork("program", [], environment={}, stderr=errors, timeout_s=60.0)
            assert not child.has_ended
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(0.01)
            code = -signal.SIGKILL if not children else 0
            process.say(pid=os.getpid(), code=code)
            assert child.wait(60.0) == code
            children.append(child)
    assert [child.wait(0.0) for child in children] == [-signal.SIGKILL, 0]
    for child in children:
        child.stdin.close()
        child.stdout.close()
    server.close()
