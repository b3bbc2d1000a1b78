"""The examples run, and learn bit for bit what the same program learns with torch's own DDP.

At two ranks the two sum in the same order. An example whose framework is not installed is skipped.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.adapter.test_endings import ROOT, SOURCES, free_port

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gradlane._core") is None, reason="the compiled core is not built"
)


def learned(example: str, engine: str) -> list[str]:
    """Run an example on two ranks; returns what each of them has learned."""
    result = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--master-port", str(free_port()), str(ROOT / "examples" / example)),
            *("--engine", engine),
        ],
        cwd=ROOT,
        env={**os.environ, **SOURCES, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stderr[-5000:]
    return [line for line in result.stdout.splitlines() if line.startswith("learned")]


@pytest.mark.parametrize(
    ("example", "needs"),
    [
        ("plain_loop.py", "torch"),
        ("accelerate_loop.py", "accelerate"),
        ("transformers_trainer.py", "transformers"),
        ("lightning_module.py", "lightning"),
    ],
)
def test_examples_learn_what_ddp_learns(example: str, needs: str) -> None:
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    ours = learned(example, "gradlane")
    assert len(ours) == 2
    assert set(ours) == set(learned(example, "ddp"))
    assert len(set(ours)) == 1
