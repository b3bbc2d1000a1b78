"""Text that other ranks, callers, files and stores wrote, made safe to print and to log.

A terminal obeys some characters, and a line break forges a line of a log. Only printable text of
bounded length comes out of here.
"""

from __future__ import annotations

LIMIT_CHARS = 4096
"""Longest text of an error: a rank's failure with what was outstanding, not a flood."""


def escaped(text: str | bytes, limit: int = LIMIT_CHARS) -> str:
    r"""Return text in which nothing is left that a terminal or a log would obey.

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
    """Base of errors with messages that other ranks, callers, files or stores have a part in."""

    def __init__(self, *arguments: object) -> None:
        """Keep the arguments, texts escaped and bounded."""
        super().__init__(*(escaped(one) if isinstance(one, str) else one for one in arguments))


def escaped_lines(text: str, limit: int = LIMIT_CHARS) -> str:
    """Return text of several lines, such as a traceback, with each line escaped by itself."""
    return "\n".join(escaped(line, limit) for line in text.splitlines())
