"""The examples without torch learn the same bits on two ranks as in one process that does the work
of both. An example whose framework is not installed is skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from tests.built import needs_core
from tests.forked_programs import SOURCES
from tests.paths import ROOT
from tests.ports import reserve_port

pytestmark = needs_core


def run(arguments: list[str]) -> list[str]:
    """Run a program; returns its lines that begin with `learned`."""
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **SOURCES, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stderr[-5000:]
    return [line for line in result.stdout.splitlines() if line.startswith("learned")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "needs"), [("numpy_digits.py", "sklearn"), ("jax_digits.py", "jax")]
)
def test_two_ranks_learn_what_one_process_learns(example: str, needs: str) -> None:
    pytest.importorskip(needs)
    pytest.importorskip("sklearn")
    path = str(ROOT / "examples" / example)
    launcher: list[Any] = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    ours = run([*launcher, "--master-port", str(reserve_port()), path])
    alone = run([path, "--alone", "2"])
    assert len(ours) == 2
    assert set(ours) == set(alone)
    assert float(alone[0].split()[-1].rstrip("%")) > 85.0
