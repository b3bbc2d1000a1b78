"""Errors whose message is enough for the command line."""

from __future__ import annotations


class ReportedError(RuntimeError):
    """An error that the command line prints without a traceback.

    Attributes:
        details: text to print after the message, such as a rank's traceback; may be empty.
    """

    details: str = ""
