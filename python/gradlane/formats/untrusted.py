"""Escaping of text from other ranks, callers, files and stores, for printing and logging.

A terminal obeys some characters, and a line break forges a line of a log. The functions here return
only printable text of bounded length.
"""

from __future__ import annotations

LIMIT_CHARS = 4096
"""Longest text of an error: enough for a rank's failure with its outstanding work."""


def escaped(text: str | bytes, limit: int = LIMIT_CHARS) -> str:
    r"""Return text without characters that a terminal or a log would obey.

    Printable text comes out as it is, so escaping twice changes nothing. Control and format
    characters, line breaks, lone surrogates and bytes that are no UTF-8 become escapes such as
    `\x1b` and `\n`.

    Args:
        text: what was received.
        limit: longest text, in characters before escaping; longer texts are cut, and say so.
    """
    if isinstance(text, bytes):
        text = text.decode(errors="backslashreplace")
    shown = "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode("ascii")
        for one in text[:limit]
    )
    return shown if len(text) <= limit else f"{shown}... (cut, {len(text)} characters)"


class EscapedError(Exception):
    """Base of errors whose messages include text of other ranks, callers, files or stores."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(escaped(one) if isinstance(one, str) else one for one in arguments))


def escaped_lines(text: str, limit: int = LIMIT_CHARS) -> str:
    """Return text of several lines, such as a traceback, with each line escaped."""
    return "\n".join(escaped(line, limit) for line in text.splitlines())
