"""Where ranks are born: one process that has loaded torch forks every rank into its namespace.

Torch and its compiler take a processor some five seconds to load, and a preset starts its ranks
anew for every cell: loaded once, ranks start in milliseconds and share the memory.

The nursery is started by the first pool of ranks and serves all later ones of its process. It ends
with that process, whatever ends it, since its control socket closes then; it holds no namespace
and no end of a rank's pipes, so it keeps nothing alive.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
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
import traceback
from collections.abc import Mapping, Sequence
from typing import IO, Any, NoReturn

from gradlane.formats.signals import signals_blocked
from gradlane.lab.cluster.errors import LabError

_CLONE_NEWNET = 0x40000000
_MESSAGE_BYTES = 1 << 20
_STDERR_TAIL_BYTES = 6000
_END_TIMEOUT_S = 5.0


class ForkedRank:
    """A rank's process and pipes, with what `subprocess.Popen` has of them.

    Attributes:
        pid: process identifier.
        stdin: what the rank reads.
        stdout: what the rank writes.
    """

    def __init__(self, nursery: ForkServer, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        """Stand for a process that the nursery has forked."""
        self._nursery = nursery
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout

    def wait(self, timeout: float | None = None) -> int | None:
        """Return how the rank ended, as `Popen.returncode` has it; None where nobody knows.

        Raises:
            subprocess.TimeoutExpired: it has not ended in so many seconds.
        """
        return self._nursery.code_of(self.pid, timeout)

    def send_signal(self, number: int) -> None:
        """Send a signal to the rank if it has not ended."""
        if not self._nursery.has_ended(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the rank at once."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The owner's side of the process that forks ranks."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start it; torch is loaded while the caller goes on.

        Args:
            environment: added to this process's environment.
        """
        self.owner = os.getpid()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._codes: dict[int, int] = {}
        self._forked: list[int] = []
        self._is_ready = False
        self._running: set[int] = set()
        self._stderr = os.memfd_create("last words of the nursery")
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
        rank: int,
        module: str,
        *,
        namespace: int,
        environment: Mapping[str, str],
        stderr: IO[bytes],
        timeout_s: float,
    ) -> ForkedRank:
        """Run a module as a program with the rank as its argument, in a network namespace.

        Args:
            rank: its argument.
            module: name of the module.
            namespace: open descriptor of the namespace.
            environment: added to this process's environment.
            stderr: a file for what it writes to standard error.
            timeout_s: for the nursery's own start, too.

        Raises:
            LabError: the nursery has ended, or did not come up in time.
        """
        request = {
            "rank": rank,
            "module": module,
            "folder": os.getcwd(),
            "environment": {**os.environ, **environment},
        }
        deadline_s = time.monotonic() + timeout_s
        while not self._is_ready:
            if not self._hear(deadline_s - time.monotonic()):
                raise self._gone()
        # A signal in between would leave a process that nobody knows.
        with signals_blocked():
            (stdin, requests), (answers, stdout) = os.pipe(), os.pipe()
            try:
                theirs = [namespace, stdin, stdout, stderr.fileno()]
                socket.send_fds(self._control, [json.dumps(request).encode()], theirs)
                while not self._forked:
                    if not self._hear(deadline_s - time.monotonic()):
                        raise self._gone()
                pid = self._forked.pop()
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
                os.close(stdout)
        return ForkedRank(self, pid, os.fdopen(requests, "wb"), os.fdopen(answers, "rb"))

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
            self._codes[told["pid"]] = told["code"]
            self._running.discard(told["pid"])
        else:
            self._forked.append(told["pid"])
            self._running.add(told["pid"])
        return True

    def has_ended(self, pid: int) -> bool:
        """Return whether a rank is known to have ended."""
        while pid not in self._codes and self._hear(0.0):
            pass
        return pid in self._codes

    def code_of(self, pid: int, timeout_s: float | None) -> int | None:
        """Wait for a rank to end, and return how it did; None where the nursery is gone.

        Raises:
            subprocess.TimeoutExpired: it has not ended in time.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while pid not in self._codes:
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise subprocess.TimeoutExpired(f"rank with process {pid}", timeout_s or 0.0)
            if not self._hear(left_s) and self._process.poll() is not None:
                return self._codes.get(pid)
        return self._codes[pid]

    def close(self) -> None:
        """End the nursery and what still runs of its ranks."""
        if self.owner == os.getpid():
            for pid in tuple(self._running):
                if not self.has_ended(pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.code_of(pid, _END_TIMEOUT_S)
            self._process.kill()
            self._process.wait()
        self._control.close()
        os.close(self._stderr)


_running: dict[str | None, ForkServer] = {}
"""By the module search path that it was started with: what it has loaded, all its ranks have."""


def running_fork_server(environment: Mapping[str, str]) -> ForkServer:
    """Return this process's nursery for the `PYTHONPATH` of an environment; start it if need be."""
    sources = environment.get("PYTHONPATH")
    nursery = _running.get(sources)
    if nursery is None or not nursery.is_up:
        with signals_blocked():
            if nursery is not None:
                nursery.close()
            nursery = _running[sources] = ForkServer(environment)
    return nursery


@atexit.register
def _close() -> None:
    for nursery in _running.values():
        if nursery.owner == os.getpid():
            nursery.close()


def main() -> None:
    """Fork ranks as the control socket in argument one asks, until it closes."""
    import torch._dynamo

    del torch
    importlib.import_module("gradlane.lab.runs.trial")
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
                    pid = os.fork()
                    if pid == 0:
                        for one in (control.detach(), woken, wake):
                            os.close(one)
                        selector.close()
                        _become(json.loads(message), descriptors)
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
    """Turn this process, just forked, into the rank that is asked for."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        namespace, *streams = descriptors
        for descriptor, number in zip(streams, (0, 1, 2), strict=True):
            os.dup2(descriptor, number)
        # No thread exists yet, so that all later ones live in the namespace.
        if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise RuntimeError(f"cannot enter the network namespace: {reason}")
        for descriptor in descriptors:
            os.close(descriptor)
        os.setsid()
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv[1:] = [str(request["rank"])]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
