"""A rank that is slow: stopped in bursts (SIGSTOP) while the others train.

A stopped process neither computes nor reads nor replies. So it is late as a worker and silent as
an owner of slices, like a node that swaps.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading

from gradlane.planning.simulation.straggler import StragglerSpec


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

    def __exit__(self, *failure: object) -> None:
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
