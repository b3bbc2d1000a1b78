"""Sharded models that go wrong on some ranks end on all, with the reason."""

from __future__ import annotations

from pathlib import Path

from tests.built import needs_core
from tests.forked_programs import ForkedPrograms
from tests.ports import reserve_port
from tests.training.sharded.fsdp2 import FSDP_MODULES, needs_fsdp2

pytestmark = [needs_core, needs_fsdp2]
PROGRAM = "tests.training.sharded.endings"


def endings(
    programs: ForkedPrograms, folder: Path, *cases: str, lost: int | None = None
) -> list[dict[str, str]]:
    """Run cases on two nodes of two ranks; returns how each ended, by rank; none of a lost one."""
    common = {
        **{"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_port())},
    }
    for rank in range(4):
        programs.start(
            f"{folder}-{rank}",
            program=PROGRAM,
            arguments=list(cases),
            output=str(folder / f"output-{rank}"),
            errors=str(folder / f"errors-{rank}"),
            modules=FSDP_MODULES,
            environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)},
        )
    codes = [programs.wait(f"{folder}-{rank}", 200.0) for rank in range(4)]
    assert codes == [-9 if rank == lost else 0 for rank in range(4)]
    printed = [(folder / f"output-{rank}").read_text().splitlines() for rank in range(4)]
    return [dict(line.split(": ", 1) for line in lines) for lines in printed]


def test_a_killed_rank_ends_all(programs: ForkedPrograms, tmp_path: Path) -> None:
    found = [one.get("killed", "") for one in endings(programs, tmp_path, "killed", lost=3)]
    # On its node torch's collective notices, in its column gradlane. On the other node either rank
    # may be first, and torch's collective may then tell the second.
    assert all("Error: " in one for one in found[:3]), found
    named = ("PeerLostError: rank 2 gave up", "PeerLostError: rank 3 was lost")
    assert any(one.startswith(named) for one in found[:2]), found


def test_an_exception_on_a_node_ends_all(programs: ForkedPrograms, tmp_path: Path) -> None:
    found = [one["raises"] for one in endings(programs, tmp_path, "raises")]
    # A rank that is slower than its neighbour may hear of the end before its own exception.
    assert all("Error: " in one for one in found[2:]), found
    assert "ValueError: no more disk" in found[2:], found
    assert any("gave up: ValueError: no more disk" in one for one in found[:2])
    assert all("Error: " in one for one in found)


CASES = {
    "skips": "parameter 'blocks.1.up.weight' has a gradient on some nodes and none on others",
    "rate": "the nodes have different parameters",
    "more": "the number of optimizer steps differs",
    "hsdp": "mesh of 2 dimensions",
}


def test_a_rank_with_a_plain_model(programs: ForkedPrograms, tmp_path: Path) -> None:
    for found in endings(programs, tmp_path, "plain_model"):
        assert "rank 0 has shards=2, rank 1 has None" in found["plain_model"]


def test_all_ranks_end_with_the_reason(programs: ForkedPrograms, tmp_path: Path) -> None:
    for found in endings(programs, tmp_path, *CASES):
        for case, words in CASES.items():
            assert words in found[case]
