"""The ranks of an emulated cluster, seen from the process that gives them requests.

A rank that errs, dies or stops making progress fails the request within a bounded time, with that
rank's own message; all ranks are then killed, since the others would wait for it forever.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from gradlane.formats.rank_names import ranks_text
from gradlane.lab.cluster.errors import RankError
from gradlane.lab.cluster.fork_server import ForkedProgram, running_fork_server
from gradlane.lab.cluster.namespaces import CONGESTION_CONTROL, EmulatedCluster
from gradlane.planning.probe.goodput_reference import StreamResult

_START_TIMEOUT_S = 180.0
_STALL_TIMEOUT_S = 180.0
_STACKS_S = 0.5
_ECHO_S = 1.5
_STDERR_TAIL_BYTES = 6000
_STREAM_LEAD_S = 0.5

Progress = Callable[[int, int], None]
"""Called with a rank and its number of finished steps."""


class _Member:
    """One rank's process and pipes."""

    def __init__(self, rank: int, child: ForkedProgram, stderr: IO[bytes]) -> None:
        self.rank = rank
        self.child = child
        self.stderr = stderr
        self._partial = b""
        self.requests = child.stdin
        self.answers = child.stdout
        os.set_blocking(self.answers.fileno(), False)

    def write(self, request: Mapping[str, Any]) -> None:
        """Send a request; raises `OSError` where the rank reads no more."""
        self.requests.write(json.dumps(request).encode() + b"\n")
        self.requests.flush()

    def read(self) -> list[dict[str, Any]]:
        """Return the answers that have arrived; the end of the pipe counts as an error."""
        chunk = os.read(self.answers.fileno(), 1 << 20)
        if not chunk:
            end = {"message": self.describe_end(), "traceback": self.stderr_tail()}
            return [{"kind": "error", "dead": True, **end}]
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        return [{"dead": False, **json.loads(line)} for line in lines]

    def stderr_tail(self) -> str:
        """Return the end of what the rank wrote to standard error."""
        size = os.fstat(self.stderr.fileno()).st_size
        start = max(0, size - _STDERR_TAIL_BYTES)
        return os.pread(self.stderr.fileno(), _STDERR_TAIL_BYTES, start).decode(errors="replace")

    def describe_end(self) -> str:
        """Return how the process ended."""
        try:
            code = self.child.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        if code is None:
            return "ended"
        if code >= 0:
            return f"ended with status {code}"
        return f"was killed by {signal.Signals(-code).name}"


class RankPool:
    """The same rank program on all ranks, as a context manager."""

    def __init__(
        self,
        cluster: EmulatedCluster | None,
        *,
        ranks: int = 0,
        ranks_per_node: int = 1,
        program: str = "gradlane.lab.runs.node",
        stall_timeout_s: float = _STALL_TIMEOUT_S,
    ) -> None:
        """Plan the ranks.

        Args:
            cluster: entered, and kept so while this is in use; None: ranks are in this process's
                network, each as if it had a node of its own.
            ranks: how many; of a cluster, `ranks_per_node` on each node.
            ranks_per_node: how many; ranks of one node are numbered one after the other.
            program: name of a module, or path of a file that ends in `.py`; its argument is the
                rank. A process that has loaded torch already forks it.
            stall_timeout_s: longest time without any rank's progress.
        """
        self._cluster = cluster
        self._ranks = ranks if cluster is None else cluster.nodes * ranks_per_node
        self._ranks_per_node = ranks_per_node
        self._program = program
        self._stall_timeout_s = stall_timeout_s
        self._members: list[_Member] = []

    def __enter__(self) -> RankPool:
        """Start the ranks and wait until all are ready."""
        environment = {
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        try:
            for rank in range(self._ranks):
                stderr = tempfile.TemporaryFile()
                node, local_rank = divmod(rank, self._ranks_per_node)
                cluster = self._cluster
                child = running_fork_server(environment).fork(
                    self._program,
                    [str(rank)],
                    namespace=None if cluster is None else cluster.namespace_descriptor(node),
                    environment={
                        **environment,
                        "LOCAL_RANK": str(local_rank),
                        "LOCAL_WORLD_SIZE": str(self._ranks_per_node),
                    },
                    stderr=stderr,
                    timeout_s=_START_TIMEOUT_S,
                )
                self._members.append(_Member(rank, child, stderr))
            self._collect("ready", _START_TIMEOUT_S, None)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *failure: object) -> None:
        """End all ranks."""
        self.close()

    def close(self) -> None:
        """Kill all ranks; closing twice does nothing."""
        for member in self._members:
            member.child.kill()
        for member in self._members:
            member.child.wait()
            with contextlib.suppress(OSError):
                member.requests.close()
            member.answers.close()
            member.stderr.close()
        self._members.clear()

    def processes(self) -> list[int]:
        """Return the ranks' process identifiers."""
        return [member.child.pid for member in self._members]

    def ask(
        self,
        requests: Sequence[Mapping[str, Any]],
        on_progress: Progress | None = None,
        on_count: Callable[[], None] = lambda: None,
    ) -> list[dict[str, Any]]:
        """Give each rank its request and return the ranks' results, in rank order.

        Args:
            requests: one a rank, JSON-serializable, each with a `kind`.
            on_progress: called as ranks report steps.
            on_count: called when a rank says that nothing is under way; it waits for the return.

        Raises:
            RankError: a rank failed, died or stalled; all ranks are dead then.
        """
        for member, request in zip(self._members, requests, strict=True):
            try:
                member.write(request)
            except OSError:
                failure = RankError(member.rank, member.describe_end(), member.stderr_tail())
                self.close()
                raise failure from None
        answers = self._collect("result", self._stall_timeout_s, on_progress, on_count)
        return [answer["result"] for answer in answers]

    def ask_all(self, kind: str, **named: Any) -> list[dict[str, Any]]:
        """Give all ranks the same request; see `ask`."""
        return self.ask([{"kind": kind, **named}] * len(self._members))

    def stream_bps(self, ramp_s: float, window_s: float) -> float:
        """Return what plain TCP streams carry on a port, both ways at once: real payload bits/s.

        Args:
            ramp_s: time before the window.
            window_s: time that counts.
        """
        cluster, each = self._cluster, self._ranks_per_node
        assert cluster is not None, "streams go through the ports of a cluster"
        request = {
            "kind": "stream",
            "addresses": cluster.addresses,
            "port": cluster.next_port(),
            "start_s": time.monotonic() + _STREAM_LEAD_S,
            "ramp_s": ramp_s,
            "window_s": window_s,
        }
        requests = [
            {"kind": "rest"} if rank % each else {**request, "node": rank // each}
            for rank in range(len(self._members))
        ]
        results = [StreamResult(**result) for result in self.ask(requests)[::each]]
        for node, result in enumerate(results):
            if result.congestion_control != CONGESTION_CONTROL:
                raise RuntimeError(
                    f"node {node} runs {result.congestion_control} as its congestion control "
                    f"instead of {CONGESTION_CONTROL}"
                )
        return statistics.median(result.goodput_bps for result in results)

    def _collect(
        self,
        kind: str,
        stall_timeout_s: float,
        on_progress: Progress | None,
        on_count: Callable[[], None] = lambda: None,
    ) -> list[dict[str, Any]]:
        """Return one answer of this kind from each rank."""
        finished: dict[int, dict[str, Any]] = {}
        steps = dict.fromkeys(range(len(self._members)), 0)
        deadline_s = time.monotonic() + stall_timeout_s
        with selectors.DefaultSelector() as selector:
            for member in self._members:
                selector.register(member.answers, selectors.EVENT_READ, member)
            while len(finished) < len(self._members):
                ready = selector.select(max(0.0, deadline_s - time.monotonic()))
                if not ready:
                    raise self._stalled(finished, steps, stall_timeout_s)
                deadline_s = time.monotonic() + stall_timeout_s
                for key, _ in ready:
                    speaker: _Member = key.data
                    for answer in speaker.read():
                        if answer["kind"] == "error":
                            raise self._failed(selector, speaker, answer)
                        if answer["kind"] == "progress":
                            steps[speaker.rank] = answer["done_steps"]
                            if on_progress is not None:
                                on_progress(speaker.rank, answer["done_steps"])
                        elif answer["kind"] == "count":
                            on_count()
                            # A rank that has died meanwhile says so at the end of its answers.
                            with contextlib.suppress(OSError):
                                speaker.write({"kind": "counted"})
                        elif answer["kind"] == kind:
                            finished[speaker.rank] = answer
        return [finished[rank] for rank in range(len(self._members))]

    def _failed(
        self, selector: selectors.BaseSelector, first: _Member, answer: dict[str, Any]
    ) -> RankError:
        """Return the error for a failed rank, together with what the others soon say.

        One rank's failure makes others fail, sometimes before the first one can tell: so the
        error names them all, and leads with a rank that died, if one did.
        """
        failures = {first.rank: answer}
        deadline_s = time.monotonic() + _ECHO_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                member: _Member = key.data
                for later in member.read():
                    if later["kind"] == "error":
                        failures.setdefault(member.rank, later)
                        if later["dead"]:
                            selector.unregister(member.answers)
        self.close()
        ranks = sorted(failures, key=lambda rank: not failures[rank]["dead"])
        said: dict[str, list[int]] = {}
        for rank in ranks:
            said.setdefault(failures[rank]["message"], []).append(rank)
        message, *others = said
        if also := said[message][1:]:
            message += f"\n({ranks_text(sorted(also))} too)"
        message += "".join(f"\n{ranks_text(sorted(said[other]))}: {other}" for other in others)
        details = "\n".join(
            f"rank {rank}:\n{failures[rank]['traceback']}"
            for rank in ranks
            if failures[rank]["traceback"]
        )
        return RankError(ranks[0], message, details)

    def _stalled(
        self, finished: Mapping[int, object], steps: Mapping[int, int], stall_timeout_s: float
    ) -> RankError:
        """Return the error for the rank that is furthest behind, with its threads' stacks."""
        behind = min(
            (member for member in self._members if member.rank not in finished),
            key=lambda member: steps[member.rank],
        )
        behind.child.send_signal(signal.SIGUSR1)
        time.sleep(_STACKS_S)
        message = (
            f"no rank made progress for {stall_timeout_s:.0f} s; this one finished "
            f"{steps[behind.rank]} steps"
        )
        failure = RankError(behind.rank, message, behind.stderr_tail())
        self.close()
        return failure
