"""The logger `gradlane`, and its way to stderr in programs that have not set up logging."""

from __future__ import annotations

import logging
import sys

from gradlane.formats.untrusted import escaped

log = logging.getLogger("gradlane")
"""Where sessions say things that are no errors to be raised."""


class _StderrHandler(logging.Handler):
    """Writes lines to stderr while the root logger has no handler of the program's."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line; what a terminal would obey is escaped."""
        if logging.getLogger().handlers:
            return
        try:
            print(f"gradlane: {escaped(record.getMessage())}", file=sys.stderr, flush=True)
        except (RuntimeError, OSError, ValueError):
            # A record may come in a signal handler, in the middle of another print.
            return


if not log.handlers:
    log.addHandler(_StderrHandler())
    log.setLevel(logging.INFO)
