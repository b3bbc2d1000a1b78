"""What can go wrong, as types. Every message says what happened, where, and what to do.

All derive from `GradlaneError`; timeouts are also `TimeoutError`, bad arguments also `ValueError`.
"""

from __future__ import annotations

from gradlane.formats.untrusted import EscapedError


class GradlaneError(EscapedError):
    """Base of all errors of this package."""


class UsageError(GradlaneError, RuntimeError):
    """Calls came in an order that has no meaning, such as two gradients in one step."""


class SessionClosedError(GradlaneError, RuntimeError):
    """The session was closed or given up on this rank; nothing can be done with it any more."""


class UnevenDataError(GradlaneError, RuntimeError):
    """A rank ran out of data before another in `join(throw_on_early_termination=True)`.

    Raised on every rank in the same step, which is not taken; the session goes on.
    """


class ArrayRefusedError(GradlaneError, ValueError):
    """An array cannot be registered or pushed; nothing of it was sent.

    Attributes:
        what: `"shape"`, `"dtype"`, `"layout"`, `"device"`, `"type"` or `"name"`: what is wrong.
    """

    def __init__(self, message: str, what: str) -> None:
        """Keep the message and what is wrong."""
        super().__init__(message)
        self.what = what


class RanksDifferError(GradlaneError, ValueError):
    """The ranks do not agree on the model or the options; raised on every rank."""


class RendezvousError(GradlaneError, RuntimeError):
    """The ranks could not find or reach each other."""


class CheckpointError(GradlaneError, RuntimeError):
    """A checkpoint is damaged, incomplete, of another version, or another model's."""


class SessionFailedError(GradlaneError, RuntimeError):
    """The session ended before its time and the parameters are not to be used.

    Attributes:
        last_complete_step: the last training step that is whole on this rank, or None.
    """

    def __init__(self, message: str, last_complete_step: int | None = None) -> None:
        """Keep the message and the last complete step."""
        super().__init__(message)
        self.last_complete_step = last_complete_step


class PeerLostError(SessionFailedError, ConnectionError):
    """Another rank died, fell silent, gave up or broke the protocol.

    Attributes:
        rank: the rank at fault; this one, where the others have given it up and it goes on.
        last_complete_step: the last training step that is whole on this rank, or None.
    """

    def __init__(self, message: str, rank: int, last_complete_step: int | None = None) -> None:
        """Keep the message, the rank at fault and the last complete step."""
        super().__init__(message, last_complete_step)
        self.rank = rank


class ProgressTimeoutError(SessionFailedError, TimeoutError):
    """Ranks are alive but did not take part in a step for the progress timeout."""
