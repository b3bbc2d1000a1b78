"""Checkpoints of runs of weeks: disks that fill up, and steps of ten digits."""

from __future__ import annotations

import errno
import subprocess
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gradlane.formats.serialization.container import Piece
from gradlane.training.checkpoints.folder import commit, folder_of, newest, prune, withdraw
from gradlane.training.checkpoints.shard import write_shard
from gradlane.training.core import load_core
from tests.built import needs_core
from tests.training.checkpoints.training import train
from tests.training.model.ranks import run_ranks
from tests.waiting import eventually


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("no privilege to mount a file system in memory")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def writers() -> list[threading.Thread]:
    """The threads of all ranks that write a checkpoint."""
    return [thread for thread in threading.enumerate() if thread.name == "gradlane-checkpoint"]


@needs_core
def test_training_goes_on_while_a_disk_is_full_and_checkpoints_with_it_once_there_is_room(
    small_disk: Path,
) -> None:
    found: dict[int, Any] = {}

    def between(step: int) -> None:
        """On rank 0: fill the disk after the first checkpoint, and make room after the second."""
        room = small_disk / "room"
        if step == 5:
            # It is written while steps go on.
            assert eventually(lambda: newest(small_disk) is not None, 30.0)
            with room.open("wb", buffering=0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError:
                    # As much is left as one of two ranks needs.
                    file.truncate(file.tell() - 80 * 1024)
        if step == 8:
            # It has failed on one rank, and the other one knows.
            assert eventually(lambda: not writers(), 30.0)
            found[step] = newest(small_disk)
            room.unlink()

    def body(session: Any) -> Any:
        return train(session, 10, after_step=between if session.rank == 0 else lambda step: None)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        core: Any = load_core()
        results = run_ranks(
            2, body, core=core, summary=False, checkpoint_folder=small_disk, checkpoint_every=3
        )
    assert [len(losses) for _, losses in results] == [10, 10]
    texts = [str(one.message) for one in caught]
    assert any(
        "step 6 is not complete" in text and "No space left" in text and "goes on" in text
        for text in texts
    ), texts
    assert found[8] is not None and found[8].step == 3
    # Nothing of the one that failed takes the room that others need.
    names = sorted(one.name for one in small_disk.iterdir())
    assert names == [
        "incarnation-1",
        "step-000000003-incarnation-1",
        "step-000000009-incarnation-1",
    ]
    last = newest(small_disk)
    assert last is not None and last.step == 9


def test_steps_of_ten_digits_are_later_than_those_of_nine(tmp_path: Path) -> None:
    for step in (999_999_998, 999_999_999, 1_000_000_000, 1_000_000_001):
        folder = folder_of(tmp_path, step, 1)
        folder.mkdir()
        size = write_shard(folder / "one", [Piece("a", 0, torch.ones(2))], {"step": step})
        commit(tmp_path, step, 1, "run", [("one", size)])
        found = newest(tmp_path)
        assert found is not None and found.step == step
        prune(tmp_path, 2, "run", 1)
        assert folder.exists()
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "step-1000000000-incarnation-1",
        "step-1000000001-incarnation-1",
    ]


def test_only_what_a_start_has_written_is_withdrawn(tmp_path: Path) -> None:
    for incarnation in (1, 2):
        folder = folder_of(tmp_path, 5, incarnation)
        folder.mkdir()
        (folder / "rank-00000-of-00002.safetensors").write_text("of this start")
        (folder / ".rank-00001-of-00002.safetensors.aa.tmp").write_text("half")
    withdraw(folder_of(tmp_path, 5, 1))
    assert list(tmp_path.iterdir()) == [folder_of(tmp_path, 5, 2)]
    withdraw(folder_of(tmp_path, 5, 1))


@pytest.mark.parametrize("call", ["stat", "unlink", "rmdir", "is_symlink"])
def test_withdrawing_never_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """It runs where an error is told already, and may be of the same broken disk."""
    folder = folder_of(tmp_path, 5, 1)
    folder.mkdir()

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, call, broken)
    withdraw(folder)
    prune(tmp_path, 1, "run", 1)
