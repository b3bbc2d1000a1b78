"""A process that has torch loaded and forks programs, since loading torch takes many seconds.

Programs are modules or files, with arguments, an environment and files for what they print. Tests
take the fixture `nursery` of `tests/conftest.py`, which all of them share.

Requests are JSON lines on standard input, answers JSON lines on standard output. A forked program
ends as the interpreter would end it: excepthook, exit functions, exit status.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import queue
import runpy
import signal
import socket
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

from tests.paths import ROOT

SOURCES = {"PYTHONPATH": f"{ROOT / 'python'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}


_PORTS = itertools.count(101 * os.getpid())


def free_port() -> int:
    """Return a port that nobody listens to, and another one each time.

    It is below those that the kernel gives to connections and to who listens to any port: one of
    these could be somebody else's by the time that a program listens to it.
    """
    range_text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    end = max(12_000, int(range_text.split()[0]))
    for number in _PORTS:
        port = 10_000 + number % (end - 10_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise AssertionError("the count has no end")


class ForkServer:
    """The process that forks ranks."""

    def __init__(self) -> None:
        """Start it; torch is loaded while the first request waits."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.training.model.nursery"],
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

    def run_all(
        self,
        folder: Path,
        program: str,
        arguments: list[str],
        environments: list[dict[str, str]],
        timeout_s: float = 120.0,
    ) -> list[str]:
        """Run a program once for each environment, at once; returns what each of them printed.

        Args:
            folder: for what they print.
            program: name of a module, or path of a file.
            arguments: of the program.
            environments: added to this process's.
            timeout_s: for each of them.
        """
        names = [f"{folder}-{uuid.uuid4().hex}" for _ in environments]
        printed = [folder / f"output-{index}" for index in range(len(names))]
        errors = [folder / f"errors-{index}" for index in range(len(names))]
        pids = [
            self.start(
                name,
                program=program,
                arguments=arguments,
                output=str(printed[index]),
                errors=str(errors[index]),
                environment=environments[index],
            )
            for index, name in enumerate(names)
        ]
        try:
            codes = [self.wait(name, timeout_s) for name in names]
        except queue.Empty:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise
        assert codes == [0] * len(codes), "\n".join(path.read_text() for path in errors)
        return [path.read_text() for path in printed]

    def close(self) -> None:
        """End the nursery."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def main() -> None:
    """Serve requests until standard input ends."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch._dynamo

    import gradlane.training.session.start

    del torch, gradlane
    answers = threading.Lock()
    for line in sys.stdin:
        request = json.loads(line)
        with answers:  # Nobody else may be inside of standard output at that moment.
            pid = os.fork()
            if pid == 0:
                _run(request)
        _answer(answers, {"name": request["name"], "pid": pid})
        threading.Thread(target=_report, args=(answers, request["name"], pid), daemon=True).start()


def _report(answers: threading.Lock, name: str, pid: int) -> None:
    _, status = os.waitpid(pid, 0)
    _answer(answers, {"name": name, "code": os.waitstatus_to_exitcode(status)})


def _answer(answers: threading.Lock, answer: dict[str, Any]) -> None:
    with answers:
        print(json.dumps(answer), flush=True)


def _run(request: dict[str, Any]) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for path, descriptor in ((request["output"], 1), (request["errors"], 2)):
        os.dup2(os.open(path, flags), descriptor)
    os.environ.update(request["environment"])
    code = 0
    try:
        program: str = request["program"]
        sys.argv = [program, *request["arguments"]]
        if program.endswith(".py"):
            sys.path.insert(0, str(Path(program).parent))
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
