"""The world of a session: the ranks that this one is connected to, and where they agree."""

from __future__ import annotations

from gradlane.training.connection import SessionContext
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from gradlane.training.session.scopes import SessionScopes


class World:
    """The world that a session is in; another one once a rank has joined."""

    def __init__(self, ctx: SessionContext, scopes: SessionScopes) -> None:
        """Begin with the ranks of the start.

        Args:
            ctx: the session's state that its models use, with this rank's place.
            scopes: where the ranks agree.
        """
        self.ctx = ctx
        self.scopes = scopes

    def meet(self) -> RendezvousScope:
        """Open the next place where the ranks agree."""
        return self.scopes.open()

    def move(self, ctx: SessionContext, scopes: SessionScopes) -> None:
        """Be in another world from now on; its ranks have agreed in these scopes already."""
        self.scopes.leave()
        self.scopes.wait_for_arrivals()
        self.ctx, self.scopes = ctx, scopes
        ctx.observer.use_rank_info(ctx.rank_info)
