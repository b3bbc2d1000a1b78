"""Real ranks, and a man in the middle who changes the store's addresses and relays all bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from tests.built import needs_core
from tests.forked_programs import ForkedPrograms
from tests.training.rendezvous.man_in_the_middle import ManInTheMiddle

pytestmark = needs_core
PROGRAM = "tests.training.rendezvous.attacked_rank"
SECRET = "5ec2e7" * 8
PATIENCE_S = 120.0


def start(programs: ForkedPrograms, folder: Path, port: int, rank: int, secret: str | None) -> None:
    """Start one of two ranks, which find the store at a port."""
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "attacked",
    }
    programs.start(
        f"{folder}-{rank}",
        program=PROGRAM,
        arguments=[],
        output=str(folder / f"output-{rank}"),
        errors=str(folder / f"errors-{rank}"),
        environment=environment if secret is None else {**environment, "GRADLANE_SECRET": secret},
    )


def end(programs: ForkedPrograms, folder: Path, rank: int) -> tuple[int, str]:
    """Return exit status and output of a rank."""
    status = programs.wait(f"{folder}-{rank}", PATIENCE_S)
    return status, (folder / f"output-{rank}").read_text()


def run_ranks(
    programs: ForkedPrograms, folder: Path, port: int, secrets: list[str | None]
) -> list[tuple[int, str]]:
    """Return exit status and output of both ranks."""
    for rank, secret in enumerate(secrets):
        start(programs, folder, port, rank, secret)
    return [end(programs, folder, rank) for rank in range(2)]


def attacked(
    programs: ForkedPrograms, folder: Path, secret: str | None
) -> tuple[list[tuple[int, str]], int]:
    """Return what ranks of a secret have said behind a man in the middle, and what he relayed."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ManInTheMiddle(store.port) as middle:
        return run_ranks(programs, folder, middle.port, [secret] * 2), middle.relayed_bytes


def test_without_a_secret_nobody_notices_him(programs: ForkedPrograms, tmp_path: Path) -> None:
    """The attack works: what the next test refuses is no accident."""
    ranks, relayed_bytes = attacked(programs, tmp_path, None)
    assert [status for status, _ in ranks] == [0, 0], ranks
    assert ranks[0][1] == ranks[1][1] and ranks[0][1].startswith("trained ")
    assert relayed_bytes > 3 * 64 * 64 * 4


def test_with_a_secret_all_ranks_refuse_him_by_name(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    ranks, relayed_bytes = attacked(programs, tmp_path, SECRET)
    for status, text in ranks:
        assert status == 3, ranks
        assert "refuses the value of 'gradlane/attacked/" in text
        assert "/address/" in text and "its signature is wrong" in text
    assert relayed_bytes == 0


def test_a_stranger_who_writes_the_store_is_refused_by_name_on_all_ranks(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stranger = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    stranger.set("gradlane/attacked/start/told/1", '["0123456789abcdef", "0-ab", 0]')
    # Before rank 0 can write over it.
    start(programs, tmp_path, store.port, 1, SECRET)
    second = end(programs, tmp_path, 1)
    start(programs, tmp_path, store.port, 0, SECRET)
    for status, text in (second, end(programs, tmp_path, 0)):
        assert status == 3
        assert "rank 1 refuses the value of 'gradlane/attacked/start/told/1'" in text
        assert "it is not signed" in text


def test_with_a_secret_and_nobody_between_them_ranks_train(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = run_ranks(programs, tmp_path, store.port, [SECRET, SECRET])
    assert [status for status, _ in ranks] == [0, 0], ranks
    assert ranks[0][1] == ranks[1][1] and ranks[0][1].startswith("trained ")


@pytest.mark.parametrize("other", [None, "07he2 secret of 128 bits"])
def test_ranks_with_different_secrets_are_told_so_at_once(
    programs: ForkedPrograms, tmp_path: Path, other: str | None
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for status, text in run_ranks(programs, tmp_path, store.port, [SECRET, other]):
        assert status == 3, text
        # A rank refuses the other's value itself, or hears from the other rank that it has.
        refused = ("start/asked/1', which rank 1 writes", "start/told/1', which rank 0 writes")
        assert any(one in text for one in refused), text
        assert "set GRADLANE_SECRET_FILE to the same secret on every rank" in text
