"""A rank that is slow: stopped in bursts (SIGSTOP) while the others train.

A stopped process does nothing at all: it computes nothing, reads nothing and answers nothing. So
it is late as a worker and silent as an owner of slices, like a node that swaps.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

BURST_S = 0.5


@dataclass(frozen=True)
class StragglerSpec:
    """Which rank is stopped, and how much.

    Attributes:
        rank: which one.
        share: of the time that it is stopped for.
        burst_s: real seconds of each stop; it runs `burst_s / share - burst_s` between two.
    """

    rank: int
    share: float
    burst_s: float = BURST_S

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)


def parse_straggler(text: str) -> StragglerSpec:
    """Return what a text such as `rank=3,share=0.1,burst=0.5` stands for.

    Raises:
        ValueError: a part is missing, unknown or out of range.
    """
    parts = dict(part.partition("=")[::2] for part in text.replace(" ", "").split(","))
    usage = "it is written rank=3,share=0.1 or rank=3,share=0.1,burst=0.5 (seconds of a stop)"
    if not {"rank", "share"} <= set(parts) <= {"rank", "share", "burst"}:
        raise ValueError(f"straggler is {text!r}; {usage}")
    try:
        spec = StragglerSpec(
            int(parts["rank"]), float(parts["share"]), float(parts.get("burst", BURST_S))
        )
    except ValueError:
        raise ValueError(f"straggler is {text!r}; {usage}") from None
    if spec.rank < 0 or not 0 < spec.share < 1 or not 0.001 <= spec.burst_s <= 20:
        raise ValueError(
            f"straggler is {text!r}; rank is 0 or more, share between 0 and 1, burst 0.001 to 20 s"
        )
    return spec


class Bursts:
    """Stops a process again and again, between `begin` and the end of the block."""

    def __init__(self, spec: StragglerSpec, process: int) -> None:
        """Stop nothing yet.

        Args:
            spec: how long, and how often.
            process: the process's identifier; a child, so that no other one ever has it.
        """
        self._spec = spec
        self._process = process
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gradlane-bursts", daemon=True)
        self._started = False
        self.count = 0
        """Stops so far."""

    def __enter__(self) -> Bursts:
        """Wait for `begin`."""
        return self

    def begin(self) -> None:
        """Stop the process from now on; a second call does nothing."""
        if not self._started:
            self._started = True
            self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let the process run."""
        self._ending.set()
        if self._started:
            self._thread.join()

    def _run(self) -> None:
        spec = self._spec
        # A process that has ended is reported by those who wait for its answer.
        with contextlib.suppress(ProcessLookupError):
            while not self._ending.wait(spec.burst_s / spec.share - spec.burst_s):
                os.kill(self._process, signal.SIGSTOP)
                try:
                    self.count += 1
                    self._ending.wait(spec.burst_s)
                finally:
                    os.kill(self._process, signal.SIGCONT)
