"""Which checkpoints are there: one folder each, complete as soon as it has a manifest.

The manifest names every rank's file with its size and is put in place when all of them are. So a
folder without one is nothing, whatever else is in it, and whoever is killed leaves the checkpoint
before untouched.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradlane.checkpoints.shard import VERSION, sync_folder, write_whole
from gradlane.errors import CheckpointError

_MANIFEST = "manifest.json"
_PREFIX = "step-"


@dataclass(frozen=True)
class Manifest:
    """A complete checkpoint.

    Attributes:
        folder: where its files are.
        step: training steps that it holds.
        files: every rank's file name and size in bytes.
    """

    folder: Path
    step: int
    files: tuple[tuple[str, int], ...]


def folder_of(root: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return root / f"{_PREFIX}{step:09d}"


def file_name(rank: int, world_size: int, run: str) -> str:
    """Return the name of a rank's file; another run's are never written over."""
    return f"rank-{rank:05d}-of-{world_size:05d}-{run}.safetensors"


def commit(root: Path, step: int, files: Sequence[tuple[str, int]]) -> Manifest:
    """Make a checkpoint complete.

    Raises:
        CheckpointError: a file is not there: the ranks do not share the folder.
        OSError: the manifest cannot be written.
    """
    manifest = Manifest(folder_of(root, step), step, tuple(files))
    check_files(manifest)
    content = {"version": VERSION, "step": step, "files": [list(file) for file in files]}
    write_whole(manifest.folder / _MANIFEST, [json.dumps(content).encode()])
    sync_folder(root)
    named = {_MANIFEST, *(name for name, _ in files)}
    for path in manifest.folder.iterdir():
        # What an earlier run has left here.
        if path.name not in named:
            path.unlink(missing_ok=True)
    return manifest


def newest(root: Path) -> Manifest | None:
    """Return the last complete checkpoint, or None.

    Raises:
        CheckpointError: its manifest is damaged or of another version, or a file is missing.
    """
    complete = _complete(root)
    if not complete:
        return None
    path = complete[-1] / _MANIFEST
    try:
        content = json.loads(path.read_bytes())
        version, step = content["version"], int(content["step"])
        files = tuple((str(name), int(size)) for name, size in content["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the manifest {path} is damaged ({error}): remove its folder to go on from the "
            "checkpoint before it"
        ) from error
    if version != VERSION:
        raise CheckpointError(
            f"the checkpoint {path.parent} has version {version}, and this gradlane reads version "
            f"{VERSION}: resume with the version of gradlane that wrote it"
        )
    manifest = Manifest(path.parent, step, files)
    check_files(manifest)
    return manifest


def check_files(manifest: Manifest) -> None:
    """Check that every file is there in its size.

    Raises:
        CheckpointError: one is not; the message names it.
    """
    for name, size in manifest.files:
        path = manifest.folder / name
        try:
            found = path.stat().st_size
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint's file {path} is not there ({error.strerror}): all ranks have to "
                "write to one folder of a file system that they share"
            ) from error
        if found != size:
            raise CheckpointError(f"the checkpoint's file {path} has {found} bytes, not {size}")


def prune(root: Path, keep: int) -> None:
    """Remove all but the last checkpoints, and what was never completed before the last one."""
    complete = _complete(root)
    if not complete:
        return
    kept = set(complete[-keep:])
    for folder in _by_step(root.glob(f"{_PREFIX}*")):
        if folder not in kept and _step_of(folder) < _step_of(complete[-1]):
            # First it stops being complete, so that nobody finds half of it.
            with contextlib.suppress(OSError):
                (folder / _MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)


def withdraw(root: Path, step: int, run: str) -> None:
    """Remove what a run has written of a checkpoint that did not become complete.

    On a full disk it would keep the room that the next one needs.
    """
    folder = folder_of(root, step)
    if (folder / _MANIFEST).exists():
        return
    for path in folder.glob(f"*-{run}.safetensors"):
        with contextlib.suppress(OSError):
            path.unlink()
    # What others have there stays, and so does the folder then.
    with contextlib.suppress(OSError):
        folder.rmdir()


def _complete(root: Path) -> list[Path]:
    """Return the folders of complete checkpoints, in the order of their steps."""
    return _by_step(path.parent for path in root.glob(f"{_PREFIX}*/{_MANIFEST}"))


def _by_step(folders: Iterable[Path]) -> list[Path]:
    # Names have nine digits, and more from step 10^9 on: then their order is another one.
    return sorted(folders, key=_step_of)


def _step_of(folder: Path) -> tuple[int, str]:
    digits = folder.name.removeprefix(_PREFIX)
    return int(digits) if digits.isdecimal() else -1, folder.name
