"""The Python blocks of every page run, on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.built import needs_core
from tests.documents.blocks import PROGRAMS, Program
from tests.forked_programs import ForkedPrograms
from tests.ports import reserve_port

pytestmark = needs_core

RANKS = {"docs/servers.md": 6}
"""Ranks of the pages whose programs need other than two."""


@pytest.mark.parametrize("number", range(len(PROGRAMS)), ids=[one.place for one in PROGRAMS])
def test_a_python_block_runs(number: int, tmp_path: Path, programs: ForkedPrograms) -> None:
    program: Program = PROGRAMS[number]
    for package in program.packages:
        pytest.importorskip(package)
    world_size = RANKS.get(program.block.page, 2)
    size = str(world_size)
    launched = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
    launched["MASTER_PORT"] = str(reserve_port())
    # As torchrun sets it, which Lightning looks for.
    launched["TORCHELASTIC_RUN_ID"] = f"block-{number}"
    environments = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), **launched} for rank in range(world_size)
    ]
    printed = programs.run_all(
        tmp_path,
        "tests.documents.block_program",
        [str(number), str(tmp_path)],
        environments,
    )
    assert [text.splitlines()[-1] for text in printed] == [f"ran {program.place}"] * world_size
