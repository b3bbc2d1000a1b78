"""Atomic writes: a file is always the whole old one or the whole new one."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path


def atomic_write(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file beside its destination, and move it there in one operation.

    Args:
        path: of the file.
        write: writes the whole file to a given path.

    Raises:
        OSError: it cannot be written; no partial file is left.
    """
    # Two processes may write the same file at once, and in containers share a process number.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        write(partial)
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def atomic_write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, as `atomic_write` does."""
    atomic_write(path, lambda partial: _write(partial, text))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
