"""What launchers do to the other ranks when one dies: `docs/launching.md` says so."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.children import children_of
from tests.forked_programs import ForkedPrograms
from tests.ports import reserve_port
from tests.waiting import eventually

pytest.importorskip("torch.distributed.run", reason="this torch has no torchrun")
PATIENCE_S = 240.0
"""Agents take seconds of processor time to start, and as long to end."""
SETTLED_S = 1.0
"""Ten times the interval at which an agent looks at its workers and its store."""
WORKER = "echo $$ > $1/$RANK.new && mv $1/$RANK.new $1/$RANK; exec sleep 600\n"
"""A rank: its process id in a file, and nothing else."""


@pytest.fixture
def start(programs: ForkedPrograms, tmp_path: Path) -> Iterator[Callable[..., tuple[str, int]]]:
    """Start programs by name, which end with the test, and whatever they started.

    Returns their names and process ids.
    """
    pids: list[int] = []

    def start_one(program: str, *arguments: str) -> tuple[str, int]:
        name = f"{tmp_path}-{len(pids)}"
        errors = str(tmp_path / f"errors-{len(pids)}")
        pids.append(
            programs.start(
                name,
                program=program,
                arguments=list(arguments),
                output=os.devnull,
                errors=errors,
                environment={},
            )
        )
        return name, pids[-1]

    yield start_one
    for pid in pids:
        for one in [*children_of(pid), pid]:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)


def is_alive(process: int) -> bool:
    """Return whether a process runs; one that has ended and is not reaped does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("meeting", "goes_on"), [("static", True), ("c10d in gradlane store", True), ("c10d", False)]
)
def test_torchrun_after_the_death_of_rank_0(
    meeting: str,
    goes_on: bool,
    start: Callable[..., tuple[str, int]],
    programs: ForkedPrograms,
    tmp_path: Path,
) -> None:
    """One `torchrun` a node; c10d's own store is in the agent of node 0 and ends with it."""
    port = str(reserve_port())
    worker = tmp_path / "worker.sh"
    worker.write_text(WORKER)
    if meeting == "c10d in gradlane store":
        start("gradlane", "store", "--port", port)
    agents = []
    for node in range(2):
        where = ["--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", port]
        if meeting != "static":
            is_host = meeting == "c10d" and node == 0
            where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
            where += ["--rdzv-id", "job", "--rdzv-conf", f"is_host={is_host}"]
        agents.append(
            start(
                *("torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *where),
                *("--max-restarts", "0", "--no-python", "bash", str(worker), str(tmp_path)),
            )
        )
    ranks = [tmp_path / str(rank) for rank in range(2)]
    assert eventually(lambda: all(path.exists() for path in ranks), PATIENCE_S)
    first, other = (int(path.read_text()) for path in ranks)
    name = next(name for name, pid in agents if first in children_of(pid))
    os.kill(first, signal.SIGKILL)
    if goes_on:
        assert programs.wait(name, PATIENCE_S) == 1
        time.sleep(SETTLED_S)
        assert is_alive(other)
        assert [is_alive(pid) for agent, pid in agents if agent != name] == [True]
    else:
        assert eventually(lambda: not is_alive(other), PATIENCE_S)
