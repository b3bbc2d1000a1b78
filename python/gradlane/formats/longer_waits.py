"""The options that end waits, as errors name them: each with its environment variable.

The core's messages know their names, and not how Python's calls are written.
"""

from __future__ import annotations

import re

_ALONE = re.compile(r"\b(?:connect|progress|silence)_timeout_s\b(?! or GRADLANE_)")
_NOT_CLOSED = re.compile(r"\bnot every rank did the same within [\d.]+ s\b(?! \()")
CLOSE = "session.close(timeout_s=...)"


def with_variables(text: str) -> str:
    """Return a text in which each option or argument that ends a wait is named in full."""
    text = _NOT_CLOSED.sub(lambda found: f"{found[0]} (longer waits: {CLOSE})", text)
    return _ALONE.sub(lambda found: f"{found[0]} or GRADLANE_{found[0].upper()}", text)


CONNECT = with_variables("connect_timeout_s")
PROGRESS = with_variables("progress_timeout_s")
SILENCE = with_variables("silence_timeout_s")
