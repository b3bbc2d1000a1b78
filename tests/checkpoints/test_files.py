"""Files and folders of checkpoints, without a session."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane.checkpoints import shard
from gradlane.checkpoints.folder import commit, folder_of, newest, prune
from gradlane.checkpoints.shard import Piece, read_shard, write_shard
from gradlane.checkpoints.tree import assemble, leaves, pieces_of, put_together, take_apart
from gradlane.errors import CheckpointError

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    values = (torch.arange(7) - 3).to(dtype)
    path = tmp_path / "one.safetensors"
    size = write_shard(path, [Piece("a", 5, values), Piece("b", 0, values[:0])], {"step": 4})
    assert path.stat().st_size == size and list(tmp_path.iterdir()) == [path]
    facts, (first, second) = read_shard(path)
    assert facts["step"] == 4 and (first.name, first.start) == ("a", 5)
    assert torch.equal(first.values, values) and first.values.dtype is dtype
    assert second.values.numel() == 0


def test_the_header_is_one_of_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    write_shard(path, [Piece("a", 0, torch.ones(3)), Piece("b", 2, torch.ones(2))], {"step": 1})
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert header["a@0"] == {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}
    assert header["b@2"] == {"dtype": "F32", "shape": [2], "data_offsets": [12, 20]}
    assert len(content) == 8 + length + 20


@settings(max_examples=100, deadline=None)
@given(place=st.integers(0, 10_000), flip=st.integers(1, 255), cut=st.booleans())
def test_no_changed_byte_goes_unnoticed(
    tmp_path_factory: pytest.TempPathFactory, place: int, flip: int, cut: bool
) -> None:
    path = tmp_path_factory.mktemp("shard") / "one.safetensors"
    write_shard(path, [Piece("a", 0, torch.arange(50.0))], {"step": 1})
    expected_facts, (expected,) = read_shard(path)
    content = bytearray(path.read_bytes())
    place %= len(content)
    if cut:
        del content[place:]
    else:
        content[place] ^= flip
    path.write_bytes(content)
    try:
        facts, (piece,) = read_shard(path)
    except CheckpointError as error:
        assert str(path) in str(error)
    else:
        # In the header there is text that nobody needs, such as the copy for other tools.
        assert facts == expected_facts
        assert (piece.name, piece.start) == (expected.name, expected.start)
        assert torch.equal(piece.values, expected.values)


def test_missing_and_other_versions_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one.safetensors"
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_shard(path)
    monkeypatch.setattr(shard, "VERSION", 0)
    write_shard(path, [], {"step": 1})
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"version 0.*reads version 1"):
        read_shard(path)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_shard(tmp_path / "one.safetensors", [Piece("a", 0, torch.ones(9))], {"step": 1})
    assert list(tmp_path.iterdir()) == []


def complete(root: Path, step: int, ranks: int = 2) -> None:
    folder = folder_of(root, step)
    folder.mkdir(exist_ok=True)
    files = []
    for rank in range(ranks):
        name = f"rank-{rank}"
        files.append((name, write_shard(folder / name, [], {"step": step})))
    commit(root, step, files)


def test_a_folder_without_a_manifest_is_nothing(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    complete(tmp_path, 5)
    later = folder_of(tmp_path, 8)
    later.mkdir()
    write_shard(later / "rank-0", [], {"step": 8})
    found = newest(tmp_path)
    assert found is not None and found.step == 5


def test_what_is_complete_but_old_and_what_never_was_goes(tmp_path: Path) -> None:
    for step in (1, 2, 4):
        complete(tmp_path, step)
    for step in (3, 6):
        folder_of(tmp_path, step).mkdir()
    prune(tmp_path, 2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["step-000000002", "step-000000004", "step-000000006"]


def test_files_of_another_size_or_place_are_named(tmp_path: Path) -> None:
    complete(tmp_path, 1)
    path = folder_of(tmp_path, 1) / "rank-1"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(CheckpointError, match="rank-1 has"):
        newest(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"rank-1 is not there.*share"):
        newest(tmp_path)


@given(
    shapes=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 90)), max_size=5),
    written=st.integers(1, 5),
)
def test_any_world_reads_what_any_other_wrote(shapes: list[tuple[int, int]], written: int) -> None:
    tree: dict[str, Any] = {
        "state": {number: torch.randn(shape) for number, shape in enumerate(shapes)},
        "groups": [{"betas": (0.9, 0.99), "lr": torch.tensor(0.1)}],
        "none": None,
    }
    structure, tensors = take_apart(tree)
    pieces = [one for rank in range(written) for one in pieces_of(tensors, rank, written)]
    again = put_together(structure, assemble(leaves(structure), pieces))
    assert again["groups"][0]["betas"] == (0.9, 0.99) and again["none"] is None
    assert torch.equal(again["groups"][0]["lr"], torch.tensor(0.1))
    for number, value in tree["state"].items():
        assert torch.equal(again["state"][number], value)


def test_missing_elements_are_counted() -> None:
    structure, tensors = take_apart({"weight": torch.zeros(100, 100)})
    with pytest.raises(CheckpointError, match="lacks 5000 elements of '/weight'"):
        assemble(leaves(structure), pieces_of(tensors, 0, 2))
