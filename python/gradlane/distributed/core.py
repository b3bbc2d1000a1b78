"""Protocols of the compiled part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Place = tuple[int, int]
"""Address and number of bytes."""


class CoreWork(Protocol):
    """A call that has begun."""

    def is_done(self) -> bool:
        """Return whether the call has ended."""

    def result(self) -> int | None:
        """Return the rank that a received message is from; None while the call runs."""

    def key(self) -> int:
        """Return a number that no other work has while this one exists."""


class CoreGroup(Protocol):
    """The connections of a group."""

    def begin(
        self,
        operation: str,
        element: str,
        reduction: str,
        root: int,
        inputs: Sequence[Place],
        outputs: Sequence[Place],
        timeout_s: float,
        is_waited_for: bool,
    ) -> Any:
        """Begin a collective."""

    def send(self, to: int, tag: int, pointer: int, nbytes: int, timeout_s: float) -> Any:
        """Begin to send a message."""

    def receive(
        self, source: int | None, tag: int, pointer: int, nbytes: int, timeout_s: float
    ) -> Any:
        """Begin to receive a message; None: from any rank."""

    def wait(self, work: Any, timeout_s: float | None) -> int:
        """Wait until a work is done."""

    def poll(self, work: Any) -> bool:
        """Serve the sockets once without waiting, and return whether a work is done."""

    def watch(self, work: Any) -> None:
        """Have a work returned by `next_ended`."""

    def next_ended(self, age_s: float) -> int | None:
        """Return the key of a watched work that ended `age_s` ago; None of a closed group."""

    def begun(self) -> int:
        """Return the number of collectives that this rank has begun."""

    def close(self) -> None:
        """Leave the group."""

    def join(self) -> None:
        """Wait until the connections of a closed group have ended."""
