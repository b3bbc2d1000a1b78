"""One rank's file of a checkpoint, and files that are whole, on the disk and read back.

Its format is `serialization.container`'s, so other tools can look into it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from gradlane.errors import CheckpointError
from gradlane.formats.serialization.container import (
    Piece,
    SignatureError,
    VersionError,
    check_container,
    encode_container,
    read_container,
)
from gradlane.formats.serialization.strict_json import FormatError


def write_shard(
    path: Path, pieces: Sequence[Piece], facts: dict[str, Any], key: bytes | None = None
) -> int:
    """Write a file that is whole or not there, also if the machine stops at any moment.

    The file is read back, and every byte of it checked, before it takes its place.

    Args:
        path: the file; a temporary one is beside it meanwhile.
        pieces: the contents.
        facts: JSON-able, such as step and rank.
        key: signs the file; None: it is not signed.

    Returns:
        The file's size in bytes.

    Raises:
        OSError: it cannot be written, or reads back as something else; nothing of it is left.
        FormatError: it has more pieces than a header can list.
    """
    parts = encode_container(pieces, facts, key)
    size = sum(map(len, parts))

    def check(file: IO[bytes]) -> None:
        try:
            check_container(file, os.fstat(file.fileno()).st_size)
        except FormatError as error:
            raise OSError(errno.EIO, f"what was written reads back differently: {error}") from error

    write_synced(path, parts, check)
    return size


def read_shard(path: Path, key: bytes | None = None) -> tuple[dict[str, Any], list[Piece]]:
    """Read a file, and check every byte of it.

    Args:
        path: the file.
        key: that it must be signed with; None: signatures are not looked at.

    Raises:
        CheckpointError: it is missing, cut off, changed, not signed with the key, or of another
            version.
    """
    try:
        with open_regular(path) as file:
            return read_container(file, os.fstat(file.fileno()).st_size, key)
    except OSError as error:
        raise CheckpointError(f"the checkpoint's file {path} cannot be read: {error}") from error
    except VersionError as error:
        raise CheckpointError(
            f"the checkpoint's file {path} is of another gradlane: {error}; resume with the "
            "version of gradlane that wrote it"
        ) from error
    except SignatureError as error:
        raise refused(path, error) from error
    except FormatError as error:
        raise damaged(path, str(error)) from error


def refused(path: Path, error: SignatureError) -> CheckpointError:
    """Return the error that names a file that is not signed with the job's secret."""
    return CheckpointError(
        f"the checkpoint's file {path} is refused: {error}; if you know that it is yours, sign it: "
        f"gradlane secret sign {path.parent.parent}"
    )


def damaged(path: Path, what: str) -> CheckpointError:
    """Return the error that names a damaged file, what is wrong with it, and what to do."""
    return CheckpointError(
        f"the checkpoint's file {path} is damaged: {what}; remove the folder {path.parent} to go "
        "on from the checkpoint before it"
    )


def open_regular(path: Path) -> IO[bytes]:
    """Open a file for reading; a link, which may lead anywhere, and a pipe are none.

    Raises:
        OSError: it is not there, or no regular file.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.fdopen(os.open(path, flags), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file")
    return file


def write_synced(
    path: Path, parts: Iterable[Any], check: Callable[[IO[bytes]], None] = lambda file: None
) -> None:
    """Write a file beside its place, have it on the disk, and put it there.

    Args:
        path: the file. Its folder must be one: nothing is written through a link in its place.
        parts: buffers, in order.
        check: raises if the file, which is on the disk, is not as it should be.

    Raises:
        OSError: it cannot be written; nothing of it is left.
    """
    partial = f".{path.name}.{secrets.token_hex(4)}.tmp"
    with open_folder(path.parent) as folder:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(partial, flags, 0o666, dir_fd=folder), "w+b") as file:
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
                # What is read back then comes from the disk, where the file system has one.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                file.seek(0)
                check(file)
            os.rename(partial, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial, dir_fd=folder)
            raise
        os.fsync(folder)


@contextlib.contextmanager
def open_folder(path: Path) -> Iterator[int]:
    """Open a folder; a link, which may lead anywhere, is none.

    Raises:
        OSError: it is not there, or no folder.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if path.is_symlink():
            text = "it is a link to another place, which no start has made: remove it"
            raise OSError(errno.ELOOP, text, str(path)) from error
        raise
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
