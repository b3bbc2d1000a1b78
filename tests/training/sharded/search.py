"""Search for programs of sharded models that gradlane trains otherwise than torch's HSDP.

`python -m tests.training.sharded.search --first 0 --programs 200` runs drawn programs on two nodes
of two ranks of this machine, some in the same processes, and prints those that differ or fail.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from tests.ports import reserve_port

TOGETHER = 10
"""Programs that share processes."""


def run_some(numbers: range, timeout_s: float) -> dict[int, str]:
    """Return the result of each program that is not `same` on all ranks."""
    common = {
        **{"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
        **{"MASTER_PORT": str(reserve_port()), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    }
    command = [sys.executable, "-m", "tests.training.sharded.programs"]
    command += [f"drawn-{number}" for number in numbers]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    told: list[tuple[str, str]] = []
    for one in ranks:
        try:
            told.append(one.communicate(timeout=timeout_s))
        except subprocess.TimeoutExpired:
            for other in ranks:
                other.kill()
            told.append(one.communicate())
    found = {}
    for number in numbers:
        start = f"drawn-{number}: "
        lines = [
            line.removeprefix(start)
            for output, _ in told
            for line in output.splitlines()
            if line.startswith(start)
        ]
        if len(lines) < 4:
            errors = [line for _, error in told for line in error.splitlines() if "Error" in line]
            found[number] = f"not finished: {' | '.join(errors[-3:])}"
            break
        if not all(line.startswith("same ") for line in lines):
            found[number] = " | ".join(lines)
    return found


def main() -> None:
    """Run the programs and print what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--programs", type=int, default=50)
    parser.add_argument("--timeout-s", type=float, default=300.0)
    given = parser.parse_args()
    number, end, differing = given.first, given.first + given.programs, 0
    while number < end:
        some = range(number, min(number + TOGETHER, end))
        found = run_some(some, given.timeout_s)
        for one, text in found.items():
            print(f"{one}: {text}", flush=True)
        differing += len(found)
        stopped = [one for one, text in found.items() if text.startswith("not finished")]
        number = stopped[0] + 1 if stopped else some.stop
        print(f"{number - given.first} programs, {differing} to look at", flush=True)
    sys.exit(min(differing, 1))


if __name__ == "__main__":
    main()
