"""Rank 0, which hosts the store, ends a session before others have come to it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from tests.built import needs_core
from tests.paths import ROOT
from tests.ports import reserve_port

PROGRAM = """
import sys, gradlane
session = gradlane.init(network=gradlane.Network(connect_timeout_s=float(sys.argv[1])))
print("opened", flush=True)
session.close()
print("closed", flush=True)
"""


@contextlib.contextmanager
def rank_process(rank: int, port: int, timeout_s: float) -> Iterator[subprocess.Popen[str]]:
    """Run one of two ranks."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "python"),
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(timeout_s)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@needs_core
def test_rank_0_keeps_its_store_until_the_last_rank_has_come() -> None:
    port = reserve_port()
    with rank_process(0, port, 100.0) as first:
        assert first.stdout is not None and first.stdout.readline() == "opened\n"
        with rank_process(1, port, 100.0) as second:
            late, _ = second.communicate(timeout=90)
        ended, _ = first.communicate(timeout=90)
    assert (late, ended) == ("opened\nclosed\n", "closed\n")
    assert (first.returncode, second.returncode) == (0, 0)


@needs_core
def test_a_rank_that_never_comes_is_named() -> None:
    with rank_process(0, reserve_port(), 0.5) as first:
        out, err = first.communicate(timeout=90)
    assert first.returncode == 0 and out == "opened\nclosed\n"
    assert "rank 1 has not opened the session in the 0.5 s that rank 0 waited" in err
