"""The errors of gradlane. Every message names the event, its place and a remedy.

All derive from `GradlaneError`; timeouts are also `TimeoutError`, bad arguments also `ValueError`.
"""

from __future__ import annotations

from gradlane.formats.untrusted import EscapedError


class GradlaneError(EscapedError):
    """Base of all errors of this package."""


class UsageError(GradlaneError, RuntimeError):
    """Calls were made in an invalid order, such as two gradients in one step."""


class SessionClosedError(GradlaneError, RuntimeError):
    """The session was closed or aborted on this rank and cannot be used any more."""


class UnevenDataError(GradlaneError, RuntimeError):
    """A rank ran out of data before another in `join(throw_on_early_termination=True)`.

    Raised on every rank in the same step, which is not taken; the session goes on.
    """


class RefusedError(GradlaneError, ValueError):
    """An option, a model, an optimizer or an argument is refused; the message says what does.

    Raised before anything is sent for it.
    """


class ArrayRefusedError(RefusedError):
    """An array cannot be registered or pushed; none of it was sent.

    Attributes:
        what: the invalid property, `"shape"`, `"dtype"`, `"layout"`, `"device"`, `"type"` or
            `"name"`.
    """

    def __init__(self, message: str, what: str) -> None:
        """Store the message and the invalid property."""
        super().__init__(message)
        self.what = what


class RanksDifferError(GradlaneError, ValueError):
    """The ranks do not agree on the model or the options; raised on every rank."""


class RendezvousError(GradlaneError, RuntimeError):
    """The ranks could not find or reach each other."""


class CheckpointError(GradlaneError, RuntimeError):
    """A checkpoint is damaged, incomplete, of another version, or another model's."""


class SessionFailedError(GradlaneError, RuntimeError):
    """The session failed and the parameters must not be used.

    Attributes:
        last_complete_step: the last training step that is complete on this rank, or None.
    """

    def __init__(self, message: str, last_complete_step: int | None = None) -> None:
        """Store the message and the last complete step."""
        super().__init__(message)
        self.last_complete_step = last_complete_step


class PeerLostError(SessionFailedError, ConnectionError):
    """Another rank died, fell silent, aborted or broke the protocol.

    Attributes:
        rank: the rank at fault; this one, if the others have given it up while it ran on.
        last_complete_step: the last training step that is complete on this rank, or None.
    """

    def __init__(self, message: str, rank: int, last_complete_step: int | None = None) -> None:
        """Store the message, the rank at fault and the last complete step."""
        super().__init__(message, last_complete_step)
        self.rank = rank


class ProgressTimeoutError(SessionFailedError, TimeoutError):
    """Ranks are alive but did not take part in a step within the progress timeout."""
