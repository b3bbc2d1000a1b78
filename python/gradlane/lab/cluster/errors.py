"""Errors that the laboratory raises on purpose.

Each message says what happened, where, and what to do; the command line prints it without a
traceback.
"""

from __future__ import annotations

from gradlane.formats.reported_error import ReportedError


class LabError(ReportedError):
    """A laboratory run cannot go on; the message says why and what to do."""


class PrivilegeError(LabError):
    """This account may not make network namespaces, and no user namespace is to be had."""


class RankError(LabError):
    """A rank of the emulated cluster failed, died or made no progress.

    Attributes:
        rank: the rank that failed first.
        details: its traceback, or the end of its standard error; may be empty.
    """

    def __init__(self, rank: int, message: str, details: str = "") -> None:
        """Name the rank in the message, and keep the traceback apart from it."""
        super().__init__(f"rank {rank}: {message}")
        self.rank = rank
        self.details = details
