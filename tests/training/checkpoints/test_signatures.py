"""Checkpoints of jobs with a secret: what was not written with it is refused by name."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gradlane.errors import CheckpointError
from gradlane.formats.serialization.container import Piece
from gradlane.training.checkpoints.folder import (
    commit,
    complete_folders,
    folder_of,
    newest,
    read_manifest,
)
from gradlane.training.checkpoints.shard import read_shard, write_shard
from gradlane.training.checkpoints.signing import checkpoint_key, sign_checkpoints
from tests.built import needs_core
from tests.command_line import run as run_command
from tests.training.checkpoints.training import train
from tests.training.model.ranks import run_ranks

SECRET, OTHER = "5ec2e7" * 8, "07he2 secret of 128 bits"
KEY = checkpoint_key(SECRET)
PIECES = [Piece("a", 0, torch.arange(3.0)), Piece("b", 0, torch.arange(3.0) + 5)]


def complete(root: Path, step: int, key: bytes | None) -> Path:
    folder = folder_of(root, step, 1)
    folder.mkdir(parents=True)
    files = []
    for rank in range(2):
        facts = {"run": "r", "step": step, "rank": rank, "world_size": 2}
        files.append((f"rank-{rank}", write_shard(folder / f"rank-{rank}", PIECES, facts, key)))
    commit(root, step, 1, "r", files, key)
    return folder


def test_a_signed_file_comes_back_and_others_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    write_shard(path, PIECES, {"step": 1}, KEY)
    for key in (KEY, None):
        facts, pieces = read_shard(path, key)
        assert facts["step"] == 1
        assert all(
            torch.equal(one.values, two.values) for one, two in zip(PIECES, pieces, strict=True)
        )


@pytest.mark.parametrize(
    ("key", "reason"),
    [(None, "it is not signed"), (checkpoint_key(OTHER), "its signature is wrong")],
)
def test_unsigned_and_foreign_files_are_refused_with_the_remedy(
    tmp_path: Path, key: bytes | None, reason: str
) -> None:
    folder = complete(tmp_path, 3, key)
    for read in (lambda: read_shard(folder / "rank-0", KEY), lambda: newest(tmp_path, KEY)):
        with pytest.raises(CheckpointError, match=reason) as told:
            read()
        assert str(folder) in str(told.value)
        assert f"gradlane secret sign {tmp_path}" in str(told.value)


def test_no_bit_of_a_signed_file_can_be_flipped(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    write_shard(path, PIECES, {"step": 1}, KEY)
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 5):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(CheckpointError):
            read_shard(path, KEY)


def rewritten(path: Path, change: Callable[[dict[str, Any], bytearray], None]) -> None:
    """Change a file's description and pieces as one who knows the format, and sums anew."""
    whole = path.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + size]), bytearray(whole[8 + size :])
    described = json.loads(header["__metadata__"]["gradlane"])
    change(described, data)
    begin = 0
    for row in described["pieces"]:
        row["crc32"] = zlib.crc32(data[begin : begin + row["bytes"]])
        begin += row["bytes"]
    text = json.dumps(described, separators=(",", ":"))
    header["__metadata__"].update(gradlane=text, crc32=str(zlib.crc32(text.encode())))
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)


def other_values(described: dict[str, Any], data: bytearray) -> None:
    data[:4] = b"\x00\x00\x80\x7f"


def other_step(described: dict[str, Any], data: bytearray) -> None:
    described["step"] = 9


def swapped_pieces(described: dict[str, Any], data: bytearray) -> None:
    first, second = described["pieces"]
    first["hmac"], second["hmac"] = second["hmac"], first["hmac"]
    data[:] = data[12:] + data[:12]


@pytest.mark.parametrize("change", [other_values, other_step, swapped_pieces])
def test_changes_with_right_checksums_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any], bytearray], None]
) -> None:
    path = tmp_path / "one.safetensors"
    write_shard(path, PIECES, {"step": 1}, KEY)
    rewritten(path, change)
    read_shard(path)
    with pytest.raises(CheckpointError, match="its signature is wrong"):
        read_shard(path, KEY)


def test_a_changed_manifest_is_refused(tmp_path: Path) -> None:
    path = complete(tmp_path, 3, KEY) / "manifest.json"
    assert newest(tmp_path, KEY) is not None
    content = json.loads(path.read_text())
    for change in ({"run": "s"}, {"files": content["files"][:1]}, {"hmac": "0" * 64}):
        path.write_text(json.dumps({**content, **change}))
        with pytest.raises(CheckpointError, match="its signature is wrong"):
            newest(tmp_path, KEY)
    del content["hmac"]
    for version in (2, 3):
        path.write_text(json.dumps({**content, "version": version}))
        with pytest.raises(CheckpointError, match="it is not signed"):
            newest(tmp_path, KEY)


def test_checkpoints_are_signed_afterwards_and_again(tmp_path: Path) -> None:
    for step in (3, 6):
        complete(tmp_path, step, None)
    assert len(list(sign_checkpoints(tmp_path, SECRET, None))) == 2
    assert list(sign_checkpoints(tmp_path, SECRET, None)) == []
    with pytest.raises(CheckpointError, match=r"signed with another secret.*--earlier"):
        list(sign_checkpoints(tmp_path, OTHER, None))
    with pytest.raises(CheckpointError, match="its signature is wrong"):
        list(sign_checkpoints(tmp_path, OTHER, "another secret of 128 bits"))
    assert len(list(sign_checkpoints(tmp_path, OTHER, SECRET))) == 2
    for folder in complete_folders(tmp_path):
        manifest = read_manifest(folder, checkpoint_key(OTHER))
        for rank, (name, size) in enumerate(manifest.files):
            facts, _ = read_shard(folder / name, checkpoint_key(OTHER))
            assert (facts["rank"], facts["step"]) == (rank, manifest.step)
            assert (folder / name).stat().st_size == size


def test_signing_that_was_interrupted_is_done_again(tmp_path: Path) -> None:
    folder = complete(tmp_path, 3, None)
    before = (folder / "manifest.json").read_bytes()
    list(sign_checkpoints(tmp_path, SECRET, None))
    unsigned = complete(tmp_path / "copy", 3, None)
    # As if it had ended before the second file and the manifest.
    shutil.copy(unsigned / "rank-1", folder / "rank-1")
    (folder / "manifest.json").write_bytes(before)
    assert list(sign_checkpoints(tmp_path, SECRET, None)) == [folder]
    found = newest(tmp_path, KEY)
    assert found is not None and found.is_signed


def test_the_command_signs_with_the_secret_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = complete(tmp_path / "run", 3, None)
    monkeypatch.delenv("GRADLANE_SECRET", raising=False)
    status, _, errors = run_command(monkeypatch, capsys, "secret", "sign", str(folder.parent))
    assert status == 2 and "set GRADLANE_SECRET_FILE" in errors
    monkeypatch.setenv("GRADLANE_SECRET", SECRET)
    written = tmp_path / "signed.json"
    status, out, _ = run_command(
        monkeypatch, capsys, "secret", "sign", str(folder.parent), "--json", str(written)
    )
    assert status == 0 and f"signed {folder}" in out
    assert json.loads(written.read_text()) == {"signed": [str(folder)]}
    assert newest(folder.parent, KEY) is not None


def trained(folder: Path, last: int, secret: str | None, **more: Any) -> list[Any]:
    return run_ranks(
        2,
        lambda session: train(session, last),
        summary=False,
        checkpoint_folder=folder,
        checkpoint_every=3,
        secret=secret,
        **more,
    )


@needs_core
def test_a_session_restores_what_it_has_signed_and_nothing_else(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", 9, SECRET)
    trained(tmp_path / "cut", 7, SECRET)
    for wrong, reason in ((OTHER, "its signature is wrong"), (SECRET, "it is not signed")):
        folder = tmp_path / "cut"
        if wrong == SECRET:
            folder = tmp_path / "unsigned"
            trained(folder, 7, None)
        errors = trained(folder, 9, wrong, expect_errors=True)
        for error in errors:
            assert isinstance(error, CheckpointError), errors
            assert reason in str(error)
    rest = trained(tmp_path / "cut", 9, SECRET)
    for (_, expected), (begun, found) in zip(whole, rest, strict=True):
        assert begun == 6 and found == expected[6:]
