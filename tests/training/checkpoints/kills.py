"""Ranks of a training killed at random moments, over and over, and what has to be left of it."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

from tests.forked_programs import ForkedPrograms


def check_kills(
    programs: ForkedPrograms, folder: Path, rounds: int, options: Mapping[str, str]
) -> None:
    """Kill all ranks of so many rounds; each must go on where the one before left off.

    Args:
        programs: forks the program that kills.
        folder: where checkpoints go; it is made in one for what the program prints.
        rounds: how often ranks are started and killed.
        options: of their sessions, for `gradlane.init`.
    """
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    folder.mkdir()
    (printed,) = programs.run_all(
        folder.parent,
        "tests.training.checkpoints.killed_ranks",
        [str(folder), str(seed), str(rounds), json.dumps(options)],
        [{}],
    )
    found = [json.loads(line) for line in printed.splitlines()]
    assert len(found) == rounds
    for one in found:
        assert one["begun"] == one["before"] < one["step"]
