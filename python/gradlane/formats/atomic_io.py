"""Files that are always whole: the old one or the new one, whatever happens while it is written."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path


def atomic_write(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file beside another, and put it in its place in one move.

    Args:
        path: the file.
        write: writes all of it to the path that it is given.

    Raises:
        OSError: it cannot be written; nothing of it is left.
    """
    # Two processes may write the same file at once, and in containers have the same number.
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
