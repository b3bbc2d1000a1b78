"""The options that end waits, as errors name them: each with its environment variable."""

from __future__ import annotations

import re

_ALONE = re.compile(r"\b(?:connect|progress|silence)_timeout_s\b(?! or GRADLANE_)")


def with_variables(text: str) -> str:
    """Return a text in which each option that ends a wait stands with its variable."""
    return _ALONE.sub(lambda found: f"{found[0]} or GRADLANE_{found[0].upper()}", text)


CONNECT = with_variables("connect_timeout_s")
PROGRESS = with_variables("progress_timeout_s")
SILENCE = with_variables("silence_timeout_s")
