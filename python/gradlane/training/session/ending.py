"""How a session ends: closed in order, given up, or left behind in a forked child."""

from __future__ import annotations

from collections.abc import Callable

from gradlane.errors import GradlaneError, SessionClosedError, UsageError
from gradlane.training.checkpoints.manager import CheckpointManager
from gradlane.training.connection import SessionContext
from gradlane.training.log import log
from gradlane.training.model.prepared import CLOSE_TIMEOUT_S
from gradlane.training.model.several_optimizers import members_of
from gradlane.training.rendezvous.bounded_store import BoundedStore
from gradlane.training.rendezvous.serving import Server
from gradlane.training.session import after_close
from gradlane.training.session.parts import SessionParts
from gradlane.training.session.scopes import SessionScopes
from gradlane.training.session.world import World


class SessionEnding:
    """Ends a session once, with all of its parts, and knows how it has ended."""

    def __init__(
        self,
        world: World,
        store: BoundedStore,
        parts: SessionParts,
        checkpoints: CheckpointManager | None,
        server: Server | None,
        has_ended: Callable[[SessionEnding], None],
    ) -> None:
        """End nothing yet.

        Args:
            world: the ranks that this one is connected to.
            store: the rendezvous store.
            parts: the models and arrays.
            checkpoints: takes checkpoints, or None.
            server: serves, on a rank that only serves, or None.
            has_ended: called as the end begins, whoever ends the session.
        """
        self._world = world
        self._store = store
        self._parts = parts
        self._models = parts.models
        self._checkpoints = checkpoints
        self._server = server
        self.how: str | None = None
        """How the session has ended; None: it is open."""
        self._has_ended = has_ended

    @property
    def _ctx(self) -> SessionContext:
        return self._world.ctx

    @property
    def _scopes(self) -> SessionScopes:
        return self._world.scopes

    @property
    def step(self) -> int:
        """Training steps that have ended."""
        return self._parts.step

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Close as `Session.close` says."""
        if self.how is not None:
            return
        self.how = "closed"
        self._has_ended(self)
        self._scopes.end_presence()
        self._models.plans.stop()
        self._models.joins.close()
        is_worker = self._ctx.rank_info.world_size > 1 and self._server is None
        if is_worker and not self._scopes.has_met:
            log.warning(
                "rank %d closes a session in which nothing was prepared: no gradient was averaged; "
                "call session.prepare(model, optimizer)",
                self._ctx.membership.rank,
            )
        errors: list[GradlaneError] = []
        for part in self._parts.all():
            try:
                part.close(timeout_s)
            except GradlaneError as error:
                errors.append(error)
        if self._ctx.membership.world_size > 1:
            stepped = [(one.optimizer, one.steps.step) for one in self._models.prepared]
            stepped += [(one.optimizer, one.step) for one in self._models.sharded]
            if self._models.local is not None:
                stepped.append((self._models.local.optimizer, self._models.local.step))
            for optimizer, steps in stepped:
                for one in members_of(optimizer):
                    after_close.watch(one, steps, self._ctx.membership.world_size)
        if self._checkpoints is not None:
            self._checkpoints.close()
        self._ctx.deadlocks.close()
        self._stop_serving()
        parts = self._parts.all()
        self._scopes.stop()
        if parts and all(part.has_parted for part in parts):
            self._scopes.leave()
        self._scopes.wait_for_arrivals()
        self._store.close()
        self._write_reports(f"failed: {errors[0]}" if errors else "closed")
        if errors:
            raise errors[0]

    def abort(self, reason: str) -> None:
        """Abort as `Session.abort` says."""
        if self.how is not None:
            return
        self.how = f"given up: {reason}"
        self._has_ended(self)
        self._scopes.end_presence()
        self._models.plans.stop()
        self._models.joins.close()
        if self._checkpoints is not None:
            self._checkpoints.stop()
        for part in self._parts.all():
            part.abort(reason)
        if not self._parts.all() and (self._server is None or not self._server.has_channels):
            # The others have no channel to hear of it through.
            self._scopes.give_up(f"rank {self._ctx.membership.rank} gave up: {reason}")
        self._scopes.stop()
        self._ctx.deadlocks.close()
        self._stop_serving(reason)
        self._write_reports(self.how)

    def close_at_exit(self) -> None:
        """Close while the interpreter ends: errors are logged, not raised."""
        try:
            if any(part.in_step for part in self._parts.all()):
                self.abort("the program ended between backward() and optimizer.step()")
            else:
                if not self._scopes.has_met:
                    rank = self._ctx.membership.rank
                    self._scopes.give_up(f"rank {rank}'s program ended before prepare()", 0.0)
                self.close()
        except GradlaneError as error:
            log.error("rank %d: %s", self._ctx.membership.rank, error)

    def forget_in_child(self) -> None:
        """Drop the session in a forked child, where it cannot be used."""
        self.how = "left behind in the parent of this forked child"
        self._ctx.observer.forget_in_child()
        for part in self._parts.all():
            part.forget_in_child()

    def _write_reports(self, ending: str) -> None:
        plan = self._models.plans.plan
        found = plan.prediction.get("ddp_step_s") if plan is not None else None
        self._ctx.observer.close(ending, found if isinstance(found, float) else None)
        if self._ctx.recorder is not None:
            self._ctx.recorder.write()

    def check_open(self) -> None:
        """Check that the session is open, and that this rank trains.

        Raises:
            SessionClosedError: it has ended.
            UsageError: this rank only serves.
        """
        if self.how is not None:
            raise SessionClosedError(
                f"the session was {self.how}; open a new one with gradlane.init"
            )
        if self._server is not None:
            membership = self._ctx.membership
            raise UsageError(
                f"rank {membership.rank} only serves: of {self._ctx.rank_info.ranks} ranks "
                f"the first {membership.world_size} train; call session.serve()"
            )

    def _stop_serving(self, reason: str = "") -> None:
        """Tell the ranks that serve that the session ends; on such a rank, abort open channels."""
        if self._ctx.announcements is not None:
            self._ctx.announcements.end(reason)
        if self._server is not None:
            self._server.abort(reason or f"rank {self._ctx.rank_info.rank} closed its session")
