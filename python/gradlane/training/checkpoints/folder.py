"""Folders of checkpoints: one each, complete as soon as it has a manifest.

The manifest names every rank's file with its size and is put in place when all of them are. So a
folder without one is nothing, whatever else is in it, and a kill leaves the checkpoint before
untouched.

Two things are told apart. A *run* is one training, however often it is restarted: its id is drawn
where it begins, and taken over where a checkpoint is restored. An *incarnation* is one start of its
ranks, with a number that grows (a fencing token): rank 0 claims it before its first checkpoint, by
creating a file that exists once. Each incarnation writes into folders of its own, and
changes or removes only those of its number and below. So ranks of an earlier start that are still
alive can neither spoil nor outrank what a later one has written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradlane.errors import CheckpointError
from gradlane.formats.authentication import mac
from gradlane.formats.serialization import strict_json
from gradlane.formats.serialization.container import (
    SIGNED_VERSION,
    VERSION,
    Piece,
    SignatureError,
    check_mac,
)
from gradlane.formats.serialization.strict_json import FormatError
from gradlane.training.checkpoints.shard import (
    damaged,
    open_folder,
    open_regular,
    refused,
    sync_folder,
    write_synced,
)

_MANIFEST = "manifest.json"
_MANIFEST_BYTES_MAX = 1 << 26
_MAC = "hmac"
_INCARNATION_MAX = 999_999_999
_FOLDER = re.compile(r"step-([0-9]{9,18})(?:-incarnation-([0-9]{1,9}))?")
"""Without an incarnation it is one of version 1. Other names are the user's, and not touched."""
_CLAIM = re.compile(r"incarnation-([0-9]{1,9})")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CLAIMS_TRIED = 20


@dataclass(frozen=True)
class Manifest:
    """A complete checkpoint.

    Attributes:
        folder: where its files are.
        step: training steps that it holds.
        run: id of the training that it is of.
        files: every rank's file name and size in bytes.
        is_signed: whether it has a signature.
    """

    folder: Path
    step: int
    run: str
    files: tuple[tuple[str, int], ...]
    is_signed: bool = False


def folder_of(root: Path, step: int, incarnation: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return root / f"step-{step:09d}-incarnation-{incarnation}"


def file_name(rank: int, world_size: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def make_folder(root: Path, step: int, incarnation: int) -> Path:
    """Make the folder of a step's checkpoint, which the other ranks find there.

    Raises:
        OSError: it cannot be made; or what is there is none that this start has made.
    """
    folder = folder_of(root, step, incarnation)
    # A step that is taken again, after a failure, finds its folder where it was not removed.
    folder.mkdir(exist_ok=True)
    with open_folder(folder):
        return folder


def named_folder(root: Path, name: Any) -> Path:
    """Return the folder of a checkpoint that another rank has named.

    Raises:
        CheckpointError: it is no name of a checkpoint's folder.
    """
    if not isinstance(name, str) or not _FOLDER.fullmatch(name):
        raise CheckpointError(f"rank 0 names the folder {name!r:.80}, which is no checkpoint's")
    return root / name


def complete_folders(root: Path) -> list[Path]:
    """Return the folders of complete checkpoints: by incarnation, and then by step."""
    return [path for path in _folders(root) if (path / _MANIFEST).exists()]


# ---- writing


def claim(root: Path) -> int:
    """Return a number for this start that is higher than all there were, and have it known.

    Raises:
        OSError: the folder cannot be written.
    """
    for _ in range(_CLAIMS_TRIED):
        number = _latest(root) + 1
        if number > _INCARNATION_MAX:
            raise OSError(
                errno.ERANGE,
                f"something in it is of incarnation {_INCARNATION_MAX}, which no start can be: "
                "remove it",
                str(root),
            )
        with contextlib.suppress(FileExistsError):
            (root / f"incarnation-{number}").open("xb").close()
            # A later start may have claimed more in between, and removed the file of this number.
            if _latest(root) == number:
                break
    else:
        raise OSError(errno.EBUSY, f"others claim {root} again and again")
    sync_folder(root)
    for path in root.glob("incarnation-*"):
        match = _CLAIM.fullmatch(path.name)
        if match and int(match[1]) < number:
            with contextlib.suppress(OSError):
                path.unlink()
    return number


def check_claim(root: Path, incarnation: int) -> None:
    """Check that no later start has claimed the folder.

    Raises:
        CheckpointError: one has.
    """
    latest = _latest(root)
    if latest > incarnation:
        raise CheckpointError(
            f"a later start of a training, incarnation {latest}, writes checkpoints into {root}, "
            f"so those of this one, incarnation {incarnation}, no longer count: stop one of the "
            "two, or give each a folder of its own"
        )


def commit(
    root: Path,
    step: int,
    incarnation: int,
    run: str,
    files: Sequence[tuple[str, int]],
    key: bytes | None = None,
) -> Manifest:
    """Make a checkpoint complete.

    Args:
        root: the folder of checkpoints.
        step: of the checkpoint.
        incarnation: that has written it.
        run: that it is of.
        files: names and sizes in bytes, by rank.
        key: signs the manifest; None: it is not signed.

    Raises:
        CheckpointError: a later start has claimed the folder, or a file is not there: the ranks do
            not share the folder.
        OSError: the manifest cannot be written.
    """
    check_claim(root, incarnation)
    manifest = Manifest(folder_of(root, step, incarnation), step, run, tuple(files))
    check_files(manifest)
    write_manifest(manifest, key)
    sync_folder(root)
    return manifest


def write_manifest(manifest: Manifest, key: bytes | None = None) -> None:
    """Write the manifest of a checkpoint whose files are there, signed where there is a key.

    Raises:
        OSError: it cannot be written.
    """
    content: dict[str, Any] = {
        "version": VERSION if key is None else SIGNED_VERSION,
        "run": manifest.run,
        "step": manifest.step,
        "files": [list(one) for one in manifest.files],
    }
    if key is not None:
        content[_MAC] = mac(key, b"manifest", strict_json.dumps(content)).hex()
    write_synced(manifest.folder / _MANIFEST, [strict_json.dumps(content)])


def prune(root: Path, keep: int, run: str, incarnation: int, key: bytes | None = None) -> None:
    """Remove all but the last checkpoints of a run, and what its starts never completed.

    Another run's checkpoints stay, and those of a later incarnation. It does not raise: what cannot
    be removed is tried again with the next checkpoint.
    """
    with contextlib.suppress(OSError):
        folders = [path for path in _folders(root) if 0 < _order(path)[0] <= incarnation]
        complete = []
        incomplete = []
        for path in folders:
            if not (path / _MANIFEST).exists():
                incomplete.append(path)
                continue
            with contextlib.suppress(CheckpointError):
                if read_manifest(path, key).run == run:
                    complete.append(path)
        last = max((_order(path) for path in complete), default=(0, 0))
        # What comes after the last complete one is being written.
        for path in [one for one in incomplete if _order(one) < last] + complete[:-keep]:
            # What somebody has put in the place of one holds up no other.
            with contextlib.suppress(OSError):
                _remove(path)


def withdraw(folder: Path) -> None:
    """Remove what an incarnation has written of a checkpoint that did not become complete.

    On a full disk it would keep the room that the next one needs. It does not raise: it is called
    where an error is told already.
    """
    with contextlib.suppress(OSError):
        if not (folder / _MANIFEST).exists():
            _remove(folder)


# ---- reading


def newest(root: Path, key: bytes | None = None) -> Manifest | None:
    """Return the last complete checkpoint of the last incarnation that has any, or None.

    Args:
        root: the folder of checkpoints.
        key: that its manifest must be signed with; None: signatures are not looked at.

    Raises:
        CheckpointError: its manifest is damaged, not signed with the key or of another version, a
            file is missing, or there are checkpoints of several runs.
    """
    complete = complete_folders(root)
    if not complete:
        return None
    manifest = read_manifest(complete[-1], key)
    for path in complete[:-1]:
        try:
            other = read_manifest(path, key)
        except CheckpointError:
            # It was not asked for.
            continue
        if other.run != manifest.run:
            raise CheckpointError(
                f"{root} has checkpoints of several runs: {path.name} is of run {other.run}, "
                f"{manifest.folder.name} of run {manifest.run}; move the folders of all but one "
                "elsewhere"
            )
    check_files(manifest)
    return manifest


def read_manifest(folder: Path, key: bytes | None = None) -> Manifest:
    """Read the manifest of a checkpoint.

    Args:
        folder: of the checkpoint.
        key: that it must be signed with; None: signatures are not looked at.

    Raises:
        CheckpointError: it is damaged, not signed with the key, or of another version.
    """
    path = folder / _MANIFEST
    try:
        if folder.is_symlink():
            raise FormatError("its folder is a link to another place")
        with open_regular(path) as file:
            content = strict_json.loads(file.read(_MANIFEST_BYTES_MAX))
    except (OSError, FormatError) as error:
        raise damaged(path, str(error)) from error
    code = content.pop(_MAC, None) if isinstance(content, dict) else None
    if key is not None:
        try:
            check_mac(code, key, b"manifest", strict_json.dumps(content))
        except SignatureError as error:
            raise refused(path, error) from error
    expected = VERSION if code is None else SIGNED_VERSION
    if not isinstance(content, dict) or content.get("version") != expected:
        version = content.get("version") if isinstance(content, dict) else None
        raise CheckpointError(
            f"the checkpoint {folder} has version {version!r:.40}, and this gradlane reads "
            f"versions {VERSION} and {SIGNED_VERSION}: resume with the version of gradlane that "
            "wrote it"
        )
    step, run, files = (content.get(key) for key in ("step", "run", "files"))
    if type(step) is not int or step != _order(folder)[1]:
        raise damaged(path, f"it is of step {step!r:.40}, its folder of step {_order(folder)[1]}")
    if not isinstance(run, str):
        raise damaged(path, "it has no run")
    return Manifest(folder, step, run, listed_files(files, path), code is not None)


def read_piece_files(
    manifest: Manifest, read: Callable[[Path], tuple[dict[str, Any], list[Piece]]]
) -> Iterator[tuple[dict[str, Any], list[Piece]]]:
    """Yield facts and pieces of each rank's file, after checking that it is of this checkpoint.

    Args:
        manifest: of the checkpoint.
        read: reads a file.

    Raises:
        CheckpointError: a file is of another checkpoint or rank, or cannot be read.
    """
    for rank, (name, _) in enumerate(manifest.files):
        facts, pieces = read(manifest.folder / name)
        expected = {"run": manifest.run, "step": manifest.step, "rank": rank}
        if {key: facts.get(key) for key in expected} != expected:
            raise damaged(
                manifest.folder / name, f"it is of another checkpoint: {facts}, expected {expected}"
            )
        yield facts, pieces


def listed_files(files: Any, path: Path) -> tuple[tuple[str, int], ...]:
    """Return a list of files, after checking that they are in the checkpoint's folder.

    Args:
        files: names and sizes, as a manifest or another rank says.
        path: the file that says so.

    Raises:
        CheckpointError: it is no list of names and sizes.
    """
    rows: list[Any] = files if isinstance(files, list) else [None]
    for row in rows:
        is_pair = isinstance(row, list) and len(row) == 2
        if not is_pair or not isinstance(row[0], str) or type(row[1]) is not int:
            raise damaged(path, f"its list of files has {row!r:.80}")
        if not _FILE.fullmatch(row[0]):
            raise damaged(path, f"it names the file {row[0]!r:.80}, which is not in its folder")
    if not rows or len({row[0] for row in rows}) != len(rows):
        raise damaged(path, "it names no file, or a file twice")
    return tuple((name, size) for name, size in rows)


def check_files(manifest: Manifest) -> None:
    """Check that every file is there in its size.

    Raises:
        CheckpointError: one is not; the message names it.
    """
    for name, size in manifest.files:
        path = manifest.folder / name
        try:
            found = path.lstat()
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint's file {path} is not there ({error.strerror}): all ranks have to "
                "write to one folder of a file system that they share"
            ) from error
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"the checkpoint's file {path} is no regular file")
        if found.st_size != size:
            raise CheckpointError(
                f"the checkpoint's file {path} has {found.st_size} bytes, not {size}"
            )


# ---- inside


def _folders(root: Path) -> list[Path]:
    return sorted(
        (path for path in root.glob("step-*") if _FOLDER.fullmatch(path.name)), key=_order
    )


def _order(folder: Path) -> tuple[int, int]:
    """Return incarnation and step of a checkpoint's folder."""
    match = _FOLDER.fullmatch(folder.name)
    return (int(match[2] or 0), int(match[1])) if match else (0, -1)


def _latest(root: Path) -> int:
    claims = (_CLAIM.fullmatch(path.name) for path in root.glob("incarnation-*"))
    numbers = [int(match[1]) for match in claims if match]
    return max(numbers + [_order(path)[0] for path in _folders(root)], default=0)


def _remove(folder: Path) -> None:
    # First it stops being complete, so that no reader finds half of it.
    with contextlib.suppress(FileNotFoundError), open_folder(folder) as descriptor:
        os.unlink(_MANIFEST, dir_fd=descriptor)
    # It leaves links alone.
    shutil.rmtree(folder, ignore_errors=True)
