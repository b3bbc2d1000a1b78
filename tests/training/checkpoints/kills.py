"""Ranks of a training killed at random moments, over and over, and what has to be left of it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def check_kills(folder: Path, rounds: int, options: Mapping[str, str]) -> None:
    """Kill all ranks of so many rounds; each must go on where the one before left off.

    Args:
        folder: where checkpoints go.
        rounds: how often ranks are started and killed.
        options: of their sessions, for `gradlane.init`.
    """
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    command = [
        sys.executable,
        "-m",
        "tests.training.checkpoints.killed_ranks",
        str(folder),
        str(seed),
    ]
    result = subprocess.run(
        [*command, str(rounds), json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(found) == rounds
    for one in found:
        assert one["begun"] == one["before"] < one["step"]
