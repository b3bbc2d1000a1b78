"""One process that has loaded torch and forks programs, such as ranks into their namespaces.

Torch and its compiler take a processor some five seconds to load, and a preset starts its ranks
anew for every cell: loaded once, ranks start in milliseconds and share the memory.

The fork server of a process is started by its first pool of ranks and serves all later ones. It
ends with that process, whatever ends it, since its control socket closes then; it holds no
namespace and no end of a program's pipes, so it keeps nothing alive. A forked program ends as the
interpreter would end it: by the excepthook and exit functions, with the same exit status.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from gradlane.formats.signals import signals_blocked
from gradlane.lab.cluster.errors import LabError
from gradlane.lab.cluster.privilege import enter_network_namespace

_MESSAGE_BYTES = 1 << 20
_STDERR_TAIL_BYTES = 6000
_END_TIMEOUT_S = 5.0


@dataclass
class _Process:
    """A process that was forked; its identifier may be another one's once it has ended."""

    pid: int
    code: int | None = None
    """Exit status; None: it is not known to have ended."""


class ForkedProgram:
    """A program's process and pipes, with the interface of `subprocess.Popen`.

    Attributes:
        pid: process identifier.
        stdin: what the program reads.
        stdout: what the program writes; nothing where it writes to a file.
    """

    def __init__(
        self, server: ForkServer, process: _Process, stdin: IO[bytes], stdout: IO[bytes]
    ) -> None:
        """Stand for a process that the server has forked."""
        self._server = server
        self._process = process
        self.pid = process.pid
        self.stdin = stdin
        self.stdout = stdout

    @property
    def has_ended(self) -> bool:
        """Whether the program is known to have ended."""
        return self._server.has_ended(self._process)

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the exit status as `Popen.returncode` has it; None where the server is gone.

        Raises:
            subprocess.TimeoutExpired: the program still runs after so many seconds.
        """
        return self._server.code_of(self._process, timeout)

    def send_signal(self, number: int) -> None:
        """Send a signal to the program if it has not ended."""
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the program at once."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The owner's side of the process that forks programs."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start it; torch is loaded while the caller goes on.

        Args:
            environment: added to this process's environment.
        """
        self.owner = os.getpid()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._forked: list[_Process] = []
        self._is_ready = False
        self._running: dict[int, _Process] = {}
        self._stderr = os.memfd_create("last words of the fork server")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gradlane.lab.cluster.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **environment},
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
            )

    @property
    def is_up(self) -> bool:
        """Whether it serves this process."""
        return self.owner == os.getpid() and self._process.poll() is None

    def fork(
        self,
        program: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        stderr: IO[bytes],
        stdout: IO[bytes] | None = None,
        namespace: int | None = None,
        folder: str | Path = ".",
        modules: Sequence[str] = (),
        timeout_s: float,
    ) -> ForkedProgram:
        """Run a program in a process of its own.

        Args:
            program: name of a module, or path of a file that ends in `.py`.
            arguments: of the program.
            environment: added to this process's environment.
            stderr: a file for what it writes to standard error.
            stdout: a file for what it writes to standard output; None: a pipe.
            namespace: open descriptor of the network namespace that it runs in; None: this one's.
            folder: where it runs.
            modules: that the server loads before, for this program and all later ones.
            timeout_s: for the server's own start, too.

        Raises:
            LabError: the server has ended, or did not come up in time.
        """
        request = {
            "program": program,
            "arguments": list(arguments),
            "folder": os.path.abspath(folder),
            "modules": list(modules),
            "environment": {**os.environ, **environment},
        }
        deadline_s = time.monotonic() + timeout_s
        while not self._is_ready:
            if not self._hear(deadline_s - time.monotonic()):
                raise self._gone()
        # A signal in between would leave a process that nobody knows.
        with signals_blocked():
            (stdin, requests), (answers, written) = os.pipe(), os.pipe()
            try:
                theirs = [stdin, written if stdout is None else stdout.fileno(), stderr.fileno()]
                theirs += [] if namespace is None else [namespace]
                socket.send_fds(self._control, [json.dumps(request).encode()], theirs)
                while not self._forked:
                    if not self._hear(deadline_s - time.monotonic()):
                        raise self._gone()
                process = self._forked.pop()
            except OSError as failure:
                os.close(requests)
                os.close(answers)
                raise self._gone() from failure
            except BaseException:
                os.close(requests)
                os.close(answers)
                raise
            finally:
                os.close(stdin)
                os.close(written)
        return ForkedProgram(self, process, os.fdopen(requests, "wb"), os.fdopen(answers, "rb"))

    def _gone(self) -> LabError:
        size = os.fstat(self._stderr).st_size
        start = max(0, size - _STDERR_TAIL_BYTES)
        told = os.pread(self._stderr, _STDERR_TAIL_BYTES, start).decode(errors="replace")
        return LabError(
            "the process that starts the ranks has ended or does not answer; its last words: "
            f"{told.strip() or 'none'}"
        )

    def _hear(self, timeout_s: float | None) -> bool:
        """Take one message; False where none came in time, or none will come any more."""
        self._control.settimeout(None if timeout_s is None else max(0.001, timeout_s))
        try:
            message = self._control.recv(_MESSAGE_BYTES)
        except OSError:
            return False
        if not message:
            return False
        told = json.loads(message)
        if "ready" in told:
            self._is_ready = True
        elif "code" in told:
            self._running.pop(told["pid"]).code = told["code"]
        else:
            self._running[told["pid"]] = process = _Process(told["pid"])
            self._forked.append(process)
        return True

    def has_ended(self, process: _Process) -> bool:
        """Return whether a program is known to have ended."""
        while process.code is None and self._hear(0.0):
            pass
        return process.code is not None

    def code_of(self, process: _Process, timeout_s: float | None) -> int | None:
        """Wait for a program to end, and return its exit status; None where the server is gone.

        Raises:
            subprocess.TimeoutExpired: the program still runs.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while process.code is None:
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                text = f"the program with process {process.pid}"
                raise subprocess.TimeoutExpired(text, timeout_s or 0.0)
            if not self._hear(left_s) and self._process.poll() is not None:
                break
        return process.code

    def close(self) -> None:
        """End the server and the programs that still run."""
        if self.owner == os.getpid():
            for process in tuple(self._running.values()):
                if not self.has_ended(process):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.code_of(process, _END_TIMEOUT_S)
            self._process.kill()
            self._process.wait()
        self._control.close()
        os.close(self._stderr)


_running: dict[str | None, ForkServer] = {}
"""By the module search path that it was started with: what it has loaded, all its programs have."""


def running_fork_server(environment: Mapping[str, str]) -> ForkServer:
    """Return this process's server for the `PYTHONPATH` of an environment; start it if need be."""
    sources = environment.get("PYTHONPATH")
    server = _running.get(sources)
    if server is None or not server.is_up:
        with signals_blocked():
            if server is not None:
                server.close()
            server = _running[sources] = ForkServer(environment)
    return server


@atexit.register
def _close() -> None:
    for server in _running.values():
        if server.owner == os.getpid():
            server.close()


def main() -> None:
    """Fork programs as the control socket in argument one asks, until it closes."""
    # Here, not for those that import this module for its client.
    from gradlane.training.torch_internals import load_compiler

    load_compiler()
    for name in ("gradlane.lab.runs.trial", "gradlane.training.session.init"):
        importlib.import_module(name)
    # Programs that collect garbage pass over what is loaded here, and so share its pages.
    gc.freeze()
    control = socket.socket(fileno=int(sys.argv[1]))
    woken, wake = os.pipe()
    for descriptor in (woken, wake):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    control.send(json.dumps({"ready": True}).encode())
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is control:
                    message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 4)
                    if not message:
                        return
                    request = json.loads(message)
                    for name in request["modules"]:
                        # A program that needs a missing one says so itself.
                        with contextlib.suppress(ImportError):
                            importlib.import_module(name)
                    pid = os.fork()
                    if pid == 0:
                        for one in (control.detach(), woken, wake):
                            os.close(one)
                        selector.close()
                        _become(request, descriptors)
                    for descriptor in descriptors:
                        os.close(descriptor)
                    control.send(json.dumps({"pid": pid}).encode())
                else:
                    os.read(woken, 4096)
                    _report_ends(control)


def _report_ends(control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        ended = {"pid": pid, "code": os.waitstatus_to_exitcode(status)}
        control.send(json.dumps(ended).encode())


def _become(request: Mapping[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Turn this process, just forked, into the program that is asked for."""
    code = 0
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, descriptor in enumerate(descriptors[:3]):
            os.dup2(descriptor, number)
        # No thread exists yet, so that all later ones live in the namespace.
        for namespace in descriptors[3:]:
            enter_network_namespace(namespace)
        for descriptor in descriptors:
            os.close(descriptor)
        os.setsid()
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        program: str = request["program"]
        sys.argv = [program, *request["arguments"]]
        if program.endswith(".py"):
            sys.path.insert(0, os.path.dirname(program))
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
