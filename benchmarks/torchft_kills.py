"""Kills under torchft, over gradlane and over Gloo: the same draws for both.

`python -m benchmarks.torchft_kills --kills 200` (torchft importable, such as by `pip install
--target DIR torchft` and `PYTHONPATH`) runs two replicas of `examples/torchft_replicas.py`, kills
a drawn one at a drawn time, starts it again, and goes on so. For each kill it notes the longest
time without a step of the survivor from the kill until the other one is back, the tries of steps
that were not committed until then, and whether the parameters of both are the same after each step
of both. The backends take turns, kill by kill: `--backends native gloo` compares a group that a
torchft newer than 0.2 reconfigures itself. `--json PATH` writes the rows.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import random
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "torchft_replicas.py"
BACKENDS = ("gradlane", "native", "gloo")


def load_example() -> Any:
    """Return the example as a module."""
    spec = importlib.util.spec_from_file_location("torchft_replicas", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["torchft_replicas"] = module
    spec.loader.exec_module(module)
    return module


class Pair:
    """Two replicas over one backend, one of which is killed again and again."""

    def __init__(self, example: Any, backend: str, way: str, address: str) -> None:
        self._example, self._address = example, address
        self._options = argparse.Namespace(
            way=way, backend=backend, pause_s=0.02, verbose=False, quiet=True
        )
        self.replicas = [self._start(number) for number in range(2)]

    def _start(self, number: int) -> Any:
        return self._example.Replica(number, self._options, self._address)

    def kill(self, who: int, after_s: float) -> dict[str, Any]:
        """Kill a replica, start it again, and return what the other one lost."""
        survivor = self.replicas[1 - who]
        self.replicas[who].wait_for(5, participants=2)
        time.sleep(after_s)
        first = len(survivor.lines)
        killed_at = time.monotonic()
        self.replicas[who].end(signal.SIGKILL)
        self.replicas[who] = again = self._start(who)
        again.wait_for(5, participants=2)
        lines = [survivor.lines[first - 1], *survivor.lines[first:]]
        gaps, lost, step_at = [], 0, killed_at
        for before, line in itertools.pairwise(lines):
            if line[1] > before[1]:
                gaps.append(line[0] - max(step_at, killed_at))
                step_at = line[0]
            else:
                lost += 1
        sums = [one.committed() for one in (survivor, again)]
        both = sums[0].keys() & sums[1].keys()
        return {
            "without_progress_s": max(gaps),
            "steps_lost": lost,
            "until_back_s": again.lines[0][0] - killed_at,
            "different": sum(sums[0][step] != sums[1][step] for step in both),
            "load": os.getloadavg()[0],
        }

    def end(self) -> None:
        """End both replicas."""
        for one in self.replicas:
            one.end(signal.SIGKILL)


def main() -> None:
    """Kill by the same draws over each backend, and print the medians and the worst."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--way", choices=("gradients", "local-sgd", "diloco"), default="gradients")
    parser.add_argument("--backends", nargs="+", default=["gradlane", "gloo"], choices=BACKENDS)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after this time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    example = load_example()
    draws = random.Random(options.seed)
    rows: list[dict[str, Any]] = []
    until = time.monotonic() + 60 * options.minutes
    backends: list[str] = options.backends
    with contextlib.ExitStack() as lighthouses:
        # A lighthouse each: replicas of one are one job.
        addresses = {it: lighthouses.enter_context(example.lighthouse()) for it in backends}
        pairs = {it: Pair(example, it, options.way, addresses[it]) for it in backends}
        try:
            for number in range(options.kills):
                if time.monotonic() > until:
                    break
                who, after_s = draws.randrange(2), draws.uniform(0, 0.3)
                for backend in backends if number % 2 else backends[::-1]:
                    row = {"kill": number, "backend": backend, "who": who, "after_s": after_s}
                    try:
                        row.update(pairs[backend].kill(who, after_s))
                    except TimeoutError as error:
                        row["failed"] = str(error)
                        pairs[backend].end()
                        pairs[backend] = Pair(example, backend, options.way, addresses[backend])
                    rows.append(row)
                    print(json.dumps(row), flush=True)
        finally:
            for pair in pairs.values():
                pair.end()
    for backend in backends:
        own = [row for row in rows if row["backend"] == backend]
        good = [row for row in own if "failed" not in row]
        if good:
            stops = sorted(row["without_progress_s"] for row in good)
            print(
                f"{backend}: {len(own)} kills, {len(own) - len(good)} without recovery, "
                f"{sum(row['different'] for row in good)} steps with different parameters; "
                f"seconds without progress: median {statistics.median(stops):.2f}, worst "
                f"{stops[-1]:.2f}; steps lost: {sum(row['steps_lost'] for row in good)}"
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
