"""The interface between the sampler and a session whose members change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gradlane.training.rendezvous.membership import MembershipChange


class ElasticSession(Protocol):
    """The parts of a session that the sampler uses.

    Changes come at the same place of every rank's sequence of steps and gathers.
    """

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def world_size(self) -> int:
        """Number of members."""

    @property
    def step(self) -> int:
        """Steps that have ended, also those before this rank joined; never raises."""

    def on_membership(self, callback: Callable[[MembershipChange], object]) -> object:
        """Have a function called at each change, on all new members, in the training thread."""

    def gather_integers(self, values: list[int]) -> list[list[int]]:
        """Return the numbers of every rank, in rank order; a collective call.

        Ranks may give different numbers of them, below 2^63 and above -2^63.
        Where the members change before all have called it, it finishes the last step, calls the
        callbacks for the change and returns; what it returns then is not used.
        """
