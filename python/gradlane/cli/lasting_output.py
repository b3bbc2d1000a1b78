"""Standard output whose reader may go away, as `gradlane ... | head` does.

Long work is not lost for it: what is printed later goes nowhere, files are written as ever, and the
command ends as it would have ended.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class _LastingOutput:
    """A text stream that writes nowhere once its reader is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or let the text go."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._write_nowhere()
            return len(text)

    def flush(self) -> None:
        """Flush, or let what is buffered go."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._write_nowhere()

    def _write_nowhere(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Let a command go on, inside the block, after the reader of standard output has gone."""
    stream = sys.stdout
    lasting: Any = _LastingOutput(stream)
    sys.stdout = lasting
    try:
        yield
    finally:
        lasting.flush()
        sys.stdout = stream
