"""The secret of a job: where it comes from, and what is refused as one."""

from __future__ import annotations

import os
import secrets
import stat
import string
from pathlib import Path

from gradlane.errors import RefusedError

SECRET_BITS_MIN = 128
"""Fewest bits of a secret."""
DRAWN_BITS = 256
"""Bits of a secret that `draw_secret` returns."""
_HEX_BITS = 4
_TEXT_BITS = 6
_FILE_BYTES_MAX = 4096
_REMEDY = "write one with `gradlane secret new PATH`"


def draw_secret() -> str:
    """Return a new secret of `DRAWN_BITS`, as hexadecimal digits."""
    return secrets.token_hex(DRAWN_BITS // 8)


def secret_bits(secret: str) -> int:
    """Return the bits that a secret has at most, by its length.

    Hexadecimal digits count 4 bits each. Every character of another text counts 6, as in base64.
    """
    bits = _HEX_BITS if all(one in string.hexdigits for one in secret) else _TEXT_BITS
    return bits * len(secret)


def check_secret(secret: str, source: str) -> str:
    """Return a secret that is long enough.

    Args:
        secret: the text.
        source: where it comes from, for errors.

    Raises:
        ValueError: it is empty or short; the message does not repeat it.
    """
    if not secret:
        raise RefusedError(f"{source} is empty; {_REMEDY}, or leave it out")
    if secret_bits(secret) < SECRET_BITS_MIN:
        raise RefusedError(
            f"{source} has {secret_bits(secret)} bits, and a secret has at least {SECRET_BITS_MIN}:"
            f" 32 hexadecimal digits (4 bits each), or 22 characters of another text (6 bits "
            f"each); {_REMEDY}"
        )
    return secret


def read_secret_file(path: Path, name: str = "secret_file") -> str:
    """Return the secret in a file, without the space around it.

    Args:
        path: the file.
        name: of the option, for errors.

    Raises:
        ValueError: it cannot be read, others than its owner can read it, it is another user's, or
            it holds no secret.
    """
    shown = f"{name} is {path}"
    try:
        # A pipe would block here.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            mode = found.st_mode
            content = file.read(_FILE_BYTES_MAX + 1) if stat.S_ISREG(mode) else b""
    except OSError as error:
        raise RefusedError(f"{shown}, which cannot be read: {error.strerror}; {_REMEDY}") from error
    if not stat.S_ISREG(mode):
        raise RefusedError(f"{shown}, which is no regular file; {_REMEDY}")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise RefusedError(
            f"{shown}, which others than its owner may read or write (mode "
            f"{stat.S_IMODE(mode):04o}): chmod 600 {path}"
        )
    if found.st_uid not in (0, os.geteuid()):
        # Its owner could read it, and put another one there.
        raise RefusedError(
            f"{shown}, which belongs to user {found.st_uid}, and this process runs as user "
            f"{os.geteuid()}: give it a file of its own user or of root"
        )
    if len(content) > _FILE_BYTES_MAX:
        raise RefusedError(f"{shown}, which has more than {_FILE_BYTES_MAX} bytes; {_REMEDY}")
    try:
        secret = content.decode().strip()
    except UnicodeDecodeError:
        raise RefusedError(f"{shown}, which holds no text; {_REMEDY}") from None
    return check_secret(secret, f"the secret in {path}")


def write_secret_file(path: Path, secret: str) -> None:
    """Write a secret into a new file that its owner alone can read.

    Raises:
        ValueError: the file exists, or cannot be written.
    """
    try:
        # The mode is that of the first moment on; a file that exists may be in use.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            os.fchmod(descriptor, 0o600)
            file.write(f"{secret}\n")
    except FileExistsError:
        raise RefusedError(
            f"{path} exists; give another path, or remove it where no job uses it any more"
        ) from None
    except OSError as error:
        raise RefusedError(f"cannot write {path}: {error.strerror}") from error
