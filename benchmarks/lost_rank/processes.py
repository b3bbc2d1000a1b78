"""Processes of one training, all of which end with it, at its deadline at the latest."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from benchmarks.lost_rank.rank_log import read_log

ROOT = Path(__file__).resolve().parents[2]
_POLL_S = 0.02
_TERMINATE_S = 10.0
"""Seconds that a launcher has for ending its ranks."""


class DeadlineError(RuntimeError):
    """A training did not come as far as it should in its time."""


class Processes:
    """Starts each process in a group of its own, and ends all groups.

    A launcher may put its ranks into other groups. Their process ids stand in the ranks' files, and
    a process is ended only while its command line still names this training's folder.
    """

    def __init__(self, folder: Path, limit_s: float) -> None:
        """Take the folder of a training, and the seconds that it may take."""
        self._folder = folder
        self._deadline_s = time.monotonic() + limit_s
        self._started: list[tuple[subprocess.Popen[bytes], bool]] = []
        self._kept: list[object] = []

    def __enter__(self) -> Processes:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End every process: by SIGTERM, and by SIGKILL what is then left."""
        for process, _ in self._started:
            _signal_group(process, signal.SIGTERM)
        deadline_s = time.monotonic() + _TERMINATE_S
        for process, _ in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline_s - time.monotonic()))
        for process, _ in self._started:
            _signal_group(process, signal.SIGKILL)
            process.wait()
        for path in self._folder.glob("rank-*.jsonl"):
            for pid in {event.pid for event in read_log(path)}:
                if self._is_ours(pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        self._kept.clear()

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        serves: bool = False,
    ) -> None:
        """Start a process, whose output goes into `NAME.txt`.

        Args:
            name: of the process.
            command: its arguments.
            environment: variables beside this process's.
            serves: whether it runs until it is ended.
        """
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        plain = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        local = {"GLOO_SOCKET_IFNAME": "lo"}
        with (self._folder / f"{name}.txt").open("ab") as output:
            process = subprocess.Popen(
                command,
                env={**os.environ, **plain, **local, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append((process, serves))

    def keep(self, thing: object) -> None:
        """Keep an object until all processes have ended."""
        self._kept.append(thing)

    def are_done(self) -> bool:
        """Return whether all processes have ended but those that serve."""
        return all(process.poll() is not None for process, serves in self._started if not serves)

    def pause(self, until: str) -> None:
        """Let a moment pass.

        Raises:
            DeadlineError: the training's time is over; `until` says what was waited for.
        """
        if time.monotonic() > self._deadline_s:
            raise DeadlineError(f"time is over: waited {until}")
        time.sleep(_POLL_S)

    def wait_for_file(self, path: Path) -> None:
        """Wait until a file exists.

        Raises:
            DeadlineError: it does not in the training's time.
        """
        while not path.exists():
            self.pause(f"for {path}")

    def _is_ours(self, pid: int) -> bool:
        try:
            return str(self._folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
