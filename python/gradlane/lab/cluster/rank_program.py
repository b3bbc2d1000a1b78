"""Shared parts of rank programs: requests and answers, and a store where ranks meet.

Requests come as JSON lines on standard input, answers leave as JSON lines on what was standard
output; everything that libraries print goes to standard error. A program ends when its input
does, so it never outlives its parent.
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any

from gradlane.errors import RefusedError, UsageError

if TYPE_CHECKING:
    from gradlane.planning.probe.goodput_reference import StreamResult
    from gradlane.training.torch_internals import Store

STORE_TIMEOUT = datetime.timedelta(seconds=120)
_PROGRESS_INTERVAL_S = 0.2


def _read_requests(requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Queue every line of standard input; at its end, end the program at once.

    The end means that the parent is gone or has closed the pipe: nobody waits for a result.
    """
    for line in sys.stdin:
        requests.put(json.loads(line))
    os._exit(0)


class Answers:
    """The answering side of the pipe."""

    def __init__(self, pipe: IO[str], requests: queue.SimpleQueue[dict[str, Any]]) -> None:
        """Answer on a pipe.

        Args:
            pipe: takes the answers.
            requests: what has arrived; replies to `count_ports` are among them.
        """
        self._pipe = pipe
        self._requests = requests
        self._lock = threading.Lock()
        self._progress_s = 0.0

    def send(self, answer: dict[str, Any]) -> None:
        """Write one answer; dataclasses become objects."""
        with self._lock:
            self._pipe.write(json.dumps(answer, default=asdict) + "\n")
            self._pipe.flush()

    def count_ports(self) -> None:
        """Have the ports counted now: returns when they are."""
        self.send({"kind": "count"})
        reply = self._requests.get()
        assert reply["kind"] == "counted", reply

    def report_step(self, done_steps: int) -> None:
        """Report the number of finished steps, at most five times a second."""
        now_s = time.monotonic()
        if now_s - self._progress_s >= _PROGRESS_INTERVAL_S:
            self._progress_s = now_s
            self.send({"kind": "progress", "done_steps": done_steps})


def answer_requests(kinds_of: Callable[[Answers], Mapping[str, Callable[..., Any]]]) -> None:
    """Answer requests until the input ends, each with a result or an error.

    Every program answers `stream`, a measurement of plain TCP streams, and `rest`.

    Args:
        kinds_of: returns a function for each further kind of request; it gets the request's other
            fields by name, and returns a dataclass or what JSON can hold.
    """
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    # Standard output becomes standard error for all that prints; answers keep the real one.
    answers = Answers(os.fdopen(os.dup(1), "w", encoding="utf-8"), requests)
    os.dup2(2, 1)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    import torch

    torch.set_num_threads(1)
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    kinds: dict[str, Callable[..., Any]] = {"stream": _stream, "rest": dict, **kinds_of(answers)}
    answers.send({"kind": "ready"})
    while True:
        request = requests.get()
        try:
            result = kinds[request.pop("kind")](**request)
            answers.send({"kind": "result", "result": result})
        except Exception as failure:
            message = f"{type(failure).__name__}: {failure}"
            # What is refused says why in its text; the calls to it tell a user nothing.
            calls = (
                "" if isinstance(failure, (RefusedError, UsageError)) else traceback.format_exc()
            )
            answers.send({"kind": "error", "message": message, "traceback": calls})


def _stream(**request: Any) -> StreamResult:
    from gradlane.planning.probe.goodput_reference import run_stream

    return run_stream(**request)


def open_store(addresses: Sequence[str], port: int, rank: int) -> Store:
    """Open the rendezvous store of a run, which is on rank 0.

    Args:
        addresses: every rank's IPv4 address, rank 0 first.
        port: TCP port of the store.
        rank: this rank.
    """
    import torch.distributed as dist

    return dist.TCPStore(  # type: ignore[attr-defined]
        addresses[0],
        port,
        len(addresses),
        is_master=rank == 0,
        timeout=STORE_TIMEOUT,
        wait_for_workers=False,
    )


def meet(store: Store, place: str, world_size: int, *, waits: bool = True) -> None:
    """Count this rank in at a place, and wait until all ranks are there.

    Args:
        store: as `open_store` returns it.
        place: a name that no other meeting has.
        world_size: number of ranks.
        waits: whether to wait.
    """
    if store.add(f"{place}/arrived", 1) == world_size:
        store.set(f"{place}/complete", "1")
    if waits:
        store.wait([f"{place}/complete"], STORE_TIMEOUT)
