"""The rank program: one a node, started once for a cluster, given one request after another.

Requests come as JSON lines on standard input, answers leave as JSON lines on what was standard
output; everything that libraries print goes to standard error. The program ends when its input
does, so it never outlives the one who started it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from dataclasses import asdict
from typing import IO, Any

_PROGRESS_INTERVAL_S = 0.2


def _read_requests(requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Queue every line of standard input; at its end, end the program at once.

    The end means that the one who started this program is gone or wants it gone: a run under way
    has nobody left to report to.
    """
    for line in sys.stdin:
        requests.put(json.loads(line))
    os._exit(0)


class _Answers:
    """The answering side of the pipe."""

    def __init__(self, pipe: IO[str], requests: queue.SimpleQueue[dict[str, Any]]) -> None:
        self._pipe = pipe
        self._requests = requests
        self._lock = threading.Lock()
        self._progress_s = 0.0

    def send(self, answer: dict[str, Any]) -> None:
        """Write one answer."""
        with self._lock:
            self._pipe.write(json.dumps(answer) + "\n")
            self._pipe.flush()

    def count_ports(self) -> None:
        """Have the ports counted now: returns when they are."""
        self.send({"kind": "count"})
        reply = self._requests.get()
        assert reply["kind"] == "counted", reply

    def report_step(self, done_steps: int) -> None:
        """Tell how far a run is, now and then."""
        now_s = time.monotonic()
        if now_s - self._progress_s >= _PROGRESS_INTERVAL_S:
            self._progress_s = now_s
            self.send({"kind": "progress", "done_steps": done_steps})


def _answer(request: dict[str, Any], rank: int, answers: _Answers) -> dict[str, Any]:
    kind = request.pop("kind")
    if kind == "trial":
        from gradlane.lab.runs.messages import TrialRequest
        from gradlane.lab.runs.trial import run_trial

        trial = TrialRequest(**request)
        return asdict(run_trial(trial, rank, answers.report_step, answers.count_ports))
    if kind == "serve":
        from gradlane.lab.runs.messages import TrialRequest
        from gradlane.lab.runs.serving import run_serving

        return asdict(run_serving(TrialRequest(**request), rank))
    if kind == "stream":
        from gradlane.planning.probe.stream import run_stream

        return asdict(run_stream(**request))
    if kind == "rest":
        return {}
    raise ValueError(f"unknown request {kind!r}")


def main() -> None:
    """Answer requests for the rank in argument one until the input ends."""
    rank = int(sys.argv[1])
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    # Standard output becomes standard error for all that prints; answers keep the real one.
    answers = _Answers(os.fdopen(os.dup(1), "w", encoding="utf-8"), requests)
    os.dup2(2, 1)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    import torch

    torch.set_num_threads(1)
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    answers.send({"kind": "ready", "torch": torch.__version__})
    while True:
        request = requests.get()
        try:
            answers.send({"kind": "result", "result": _answer(request, rank, answers)})
        except Exception as failure:
            answers.send(
                {
                    "kind": "error",
                    "message": f"{type(failure).__name__}: {failure}",
                    "traceback": traceback.format_exc(),
                }
            )


if __name__ == "__main__":
    main()
