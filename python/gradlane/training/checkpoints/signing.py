"""Signatures of checkpoints: the key, and checkpoints that are signed afterwards.

The key follows from the secret alone, not from the job: a run is resumed by other jobs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradlane.errors import CheckpointError
from gradlane.formats.authentication import derived_key
from gradlane.formats.serialization.container import SIGNED_VERSION, Piece
from gradlane.training.checkpoints.folder import (
    complete_folders,
    read_manifest,
    read_piece_files,
    write_manifest,
)
from gradlane.training.checkpoints.shard import read_shard, write_shard


def checkpoint_key(secret: str) -> bytes:
    """Return the key that signs the checkpoints of all jobs with a secret."""
    return derived_key(secret.encode(), "checkpoints")


def sign_checkpoints(root: Path, secret: str, earlier: str | None) -> Iterator[Path]:
    """Sign the complete checkpoints of a folder with a secret; those that are signed stay.

    Of each checkpoint the manifest is signed last: what is interrupted can be done again.

    Args:
        root: the folder of checkpoints.
        secret: the new one.
        earlier: the secret that they are signed with; None: they are not signed.

    Yields:
        The folder of each checkpoint that was signed.

    Raises:
        CheckpointError: one is damaged, or signed otherwise.
        OSError: one cannot be written.
    """
    key = checkpoint_key(secret)
    old_key = None if earlier is None else checkpoint_key(earlier)

    def check_is_unsigned(path: Path, is_signed: bool) -> None:
        if is_signed and old_key is None:
            raise CheckpointError(
                f"{path} is signed with another secret: give the file of that one by --earlier"
            )

    def read_either(path: Path) -> tuple[dict[str, Any], list[Piece]]:
        try:
            return read_shard(path, key)
        except CheckpointError:
            facts, pieces = read_shard(path, old_key)
            check_is_unsigned(path, facts["version"] == SIGNED_VERSION)
            return facts, pieces

    for folder in complete_folders(root):
        with contextlib.suppress(CheckpointError):
            read_manifest(folder, key)
            continue
        manifest = read_manifest(folder, old_key)
        check_is_unsigned(folder, manifest.is_signed)
        files = []
        shards = read_piece_files(manifest, read_either)
        for (name, _), (facts, pieces) in zip(manifest.files, shards, strict=True):
            files.append((name, write_shard(folder / name, pieces, facts, key)))
        write_manifest(replace(manifest, files=tuple(files)), key)
        yield folder
