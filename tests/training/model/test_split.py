"""A world that breaks in halves trains one model, also where a stranger writes the job's store."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from tests.built import needs_core
from tests.forked_programs import ForkedPrograms
from tests.waiting import eventually

pytestmark = [
    needs_core,
    pytest.mark.skipif(not hasattr(TCPStore, "list_keys"), reason="this torch lists no keys"),
]
PATIENCE_S = 120.0
SILENCE_S = 2.0
SECRET = "0123456789abcdef" * 4
FATAL_STEP = 4


class Split:
    """Ranks of which a half stands still until the other half goes on without it."""

    def __init__(self, programs: ForkedPrograms, folder: Path, world_size: int) -> None:
        """Start all ranks; the later half stops in a step."""
        self._programs, self._folder = programs, folder
        self.ranks = range(world_size)
        self.late = [rank for rank in self.ranks if 2 * rank >= world_size]
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        path = folder / "job.json"
        job = {
            "port": self.store.port,
            "folder": str(folder),
            "world_size": world_size,
            "steps": 8,
            "looks": True,
            "numbers": list(self.ranks),
            "asks": [],
            "waits": (str(folder / "claim seen"), FATAL_STEP + 1),
            "ends": {str(rank): ("sigstop together", FATAL_STEP, "forward") for rank in self.late},
            "options": {
                "going_on": True,
                # The ranks that stop are lost together: one by one, a majority would be left.
                "collect_s": 6.0,
                "secret": SECRET,
                "connect_timeout_s": PATIENCE_S,
                "progress_timeout_s": PATIENCE_S,
                "silence_timeout_s": SILENCE_S,
            },
        }
        path.write_text(json.dumps(job))
        self.pids = {
            rank: programs.start(
                self._name(rank),
                program="tests.training.model.going_rank",
                arguments=[str(path)],
                output=str(folder / f"output-{rank}"),
                errors=str(folder / f"errors-{rank}"),
                environment={"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            )
            for rank in self.ranks
        }

    def _name(self, rank: int) -> str:
        return f"{self._folder}-{rank}"

    def register_keys(self) -> list[str]:
        """Return the keys of the register, and of the words of ranks."""
        return [key for key in self.store.list_keys() if "/halves" in key]

    def errors(self, rank: int) -> str:
        """Return what a rank has printed on standard error."""
        return (self._folder / f"errors-{rank}").read_text()

    def first_register(self) -> bytes:
        """Return the register as it is before a claim."""
        assert eventually(lambda: bool(self.register_keys()), PATIENCE_S)
        return bytes(self.store.get(self.register_keys()[0]))

    def wait_for_claim(self) -> None:
        """Wait until each rank of the first half, which waits then, has said that it goes on."""
        words = len(self.ranks) - len(self.late)
        assert eventually(lambda: len(self.register_keys()) == 1 + words, PATIENCE_S)

    def go_on(self) -> None:
        """Let the first half train on, and wake the late one."""
        (self._folder / "claim seen").touch()
        for rank in self.late:
            os.kill(self.pids[rank], signal.SIGCONT)

    def end(self) -> dict[int, int]:
        """Return how all ranks have ended."""
        try:
            return {rank: self._programs.wait(self._name(rank), PATIENCE_S) for rank in self.ranks}
        finally:
            for pid in self.pids.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def delete_register(split: Split, first: bytes) -> None:
    """Remove the claim of the half that goes on."""
    split.store.delete_key(min(split.register_keys(), key=len))


def put_register_back(split: Split, first: bytes) -> None:
    """Put the register back as it was before any claim."""
    split.store.set(min(split.register_keys(), key=len), first.decode())


def delete_all(split: Split, first: bytes) -> None:
    """Remove the claim, and the words of all ranks."""
    for key in split.register_keys():
        split.store.delete_key(key)


@pytest.mark.parametrize(
    ("world_size", "attack"),
    [
        (2, None),
        (2, delete_register),
        (2, put_register_back),
        (2, delete_all),
        (4, delete_register),
        (4, put_register_back),
    ],
)
def test_one_half_goes_on_whatever_is_removed_or_put_back(
    programs: ForkedPrograms,
    tmp_path: Path,
    world_size: int,
    attack: Callable[[Split, bytes], None] | None,
) -> None:
    split = Split(programs, tmp_path, world_size)
    first = split.first_register()
    split.wait_for_claim()
    if attack is not None:
        attack(split, first)
    split.go_on()
    codes = split.end()
    for rank in split.late:
        assert codes[rank] != 0, "two halves have trained a model"
        assert "Error" in split.errors(rank)
    if attack is None:
        assert {codes[rank] for rank in split.ranks if rank not in split.late} == {0}
    for rank in split.ranks:
        if codes[rank] != 0 and rank not in split.late:
            # It trained on while its claim was hidden.
            assert "cannot tell whether another half goes on" in split.errors(rank)
