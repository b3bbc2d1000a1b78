"""A rank joins a training that runs.

First some members give it their state as it is at the end of a step that all know of, and what
their updates use from then on, while they train (`model/precopy.py`). When it has nearly caught up,
all members connect to it in a new world, beside the connections that they have, at the end of
another step. They agree over their old connections whether all of them have come that far: then the
new world takes the place of the old one, else the old one goes on. So whatever happens to the rank
that joins, or to a member meanwhile, all members train in the same world.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn
from torch.optim import Optimizer

from gradlane.errors import (
    GradlaneError,
    RanksDifferError,
    RefusedError,
    SessionFailedError,
    UsageError,
)
from gradlane.training.log import log
from gradlane.training.model.broadcast_state import attributes_of
from gradlane.training.model.channel_setup import Connected
from gradlane.training.model.joining import (
    FirstStepState,
    JoinedWorld,
    Stateful,
    connect_to_join,
)
from gradlane.training.model.precopy import (
    CONNECT_S,
    PrecopyPlan,
    PrecopySource,
    PrecopyTarget,
    donors_of,
)
from gradlane.training.model.prepared import PreparedModel
from gradlane.training.node.rules import OFF
from gradlane.training.options.options import Options
from gradlane.training.rendezvous.bounded_store import BoundedStore, StoreLostError
from gradlane.training.rendezvous.deadline import SuspendAwareDeadline
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.half_register import RegisterError
from gradlane.training.rendezvous.join_requests import (
    JOINED,
    Invitation,
    JoinRequest,
    JoinRequests,
    join_keys,
)
from gradlane.training.rendezvous.membership import MembershipChange
from gradlane.training.session.scopes import SessionScopes
from gradlane.training.session.world import World

_GOODBYE_S = 10.0
_TRIES_MAX = 4
_FINAL = (RanksDifferError, RefusedError, StoreLostError, UsageError)
"""Errors that another try would meet again."""
"""Attempts, each of which pauses the members, after which a rank stops asking to join."""


class Joins:
    """Lets ranks join the training of one model, and joins one."""

    def __init__(
        self,
        world: World,
        store: BoundedStore,
        prepared: list[PreparedModel],
        look: Callable[[], object],
    ) -> None:
        """Let no rank in yet.

        Args:
            world: of the session.
            store: the rendezvous store.
            prepared: the session's models; one that moves to a new world is replaced in the list.
            look: raises when the session has failed.
        """
        self._world = world
        self._store = store
        self._prepared = prepared
        self._look = look
        self._job = world.ctx.rank_info.job
        self._keys = join_keys(store, self._job)
        self._requests = JoinRequests(self._keys, world.ctx.membership)
        self._first: FirstStepState | None = None
        self._source: PrecopySource | None = None
        """Gives this rank's state to a rank that joins, or has given it."""
        self.shared: dict[str, Stateful] = {}
        """Objects whose state a rank that joins takes over, by name."""

    def follow(self, prepared: PreparedModel) -> None:
        """Let ranks join the training of a model at the ends of its steps."""
        prepared.listeners.subscribe(self._after_step)
        self._requests.precopies = prepared.can_precopy
        if prepared.ranks_each > 1:
            self._requests.refusal = (
                f"{prepared.ranks_each} ranks of a node add up first and talk to the network as "
                'one, and ranks join one by one; start all with local="off", or restart with more '
                "nodes from a checkpoint"
            )
        self._requests.start()

    def close(self) -> None:
        """Let no more ranks in."""
        self._requests.close()
        if self._source is not None:
            self._source.close(_GOODBYE_S)
        self.tell_first_step()

    def tell_first_step(self) -> None:
        """Hand over what the next step begins with, unless done, before a gather or the end."""
        if self._first is not None:
            self._first.tell()

    # ---- members

    def _after_step(self) -> None:
        prepared, membership = self._prepared[0], self._world.ctx.membership
        call = membership.due_request(prepared.steps.step)
        if call is None:
            return
        # Afterwards all have the same members in force.
        prepared.steps.numbers.gather_integers([])
        membership.forget_request(call)
        number, lets_in = divmod(call, 2)
        if lets_in:
            self._answer(number, prepared)
        else:
            self._give(number, prepared)

    def _give(self, number: int, prepared: PreparedModel) -> None:
        """Begin to give the state as it is now to a rank that wants to join."""
        if self._source is not None:
            self._source.close()
            self._source = None
        self._requests.note_given()
        membership = self._world.ctx.membership
        donors = donors_of(len(membership.members), len(prepared.trained))
        job = f"{self._job}/join/{number}/precopy"
        plan = PrecopyPlan(job, donors, len(membership.members))
        if membership.rank >= donors:
            return
        try:
            self._requests.tell_precopy(number, json.dumps(dataclasses.asdict(plan)))
            self._source = prepared.begin_precopy(self._store, plan, self._look)
        except (GradlaneError, RuntimeError, MemoryError) as error:
            log.info("rank %d: a rank that joins gets its state later: %s", membership.rank, error)

    def _answer(self, number: int, prepared: PreparedModel) -> None:
        """Connect to a rank that wants to join, and move to a new world if all members can."""
        membership = self._world.ctx.membership
        if self._source is not None:
            prepared.steps.update.wait_for_all()
            self._source.end()
        count, step = len(membership.members), prepared.steps.step
        invitation = Invitation(
            count, count + 1, membership.generation + 1, step, f"{self._job}/join/{number}"
        )
        connected: Connected | None = None
        failure = "a member could not connect, or was lost meanwhile"
        try:
            world, scopes = self._other_world(
                membership.rank, invitation, prepared.options, self._look_for_losses
            )
            if membership.leads:
                self._requests.invite(number, invitation)
            connected = prepared.connect_beside(world, self._source)
        except (GradlaneError, ValueError, RuntimeError, MemoryError) as error:
            failure = str(error)
        answers = prepared.steps.numbers.gather_integers([int(connected is not None)])
        if connected is None or answers != [[1]] * count:
            if connected is not None:
                connected.abort(failure)
            self._requests.settle(number, failure)
            log.warning(
                "rank %d: a rank that wanted to join did not, and training goes on without it: %s",
                membership.rank,
                failure,
            )
            return
        self._requests.settle(number, JOINED)
        residuals: dict[str, Tensor] = {}
        try:
            residuals = prepared.residuals.for_more_ranks(count + 1)
            prepared.close(_GOODBYE_S)
        except RegisterError as error:
            connected.abort(str(error))
            raise
        except GradlaneError as error:
            # A member was lost since all agreed; the new world goes on without it.
            log.info("rank %d: leaving the old world: %s", membership.rank, error)
        change = self._move(world, scopes, invitation)
        first = self._first_step_state(world, prepared.optimizer, connected)
        self._prepared[0] = prepared.moved_to(world, connected, first.tell, residuals)
        self.follow(self._prepared[0])
        membership.tell(change)
        self._first = first

    def _look_for_losses(self) -> None:
        """Raise when a member was lost since a rank was let in."""
        self._look()
        if self._world.ctx.membership.is_pending:
            raise SessionFailedError("a member was lost while a rank joined", None)

    # ---- the rank that joins

    def join(
        self, model: nn.Module, optimizer: Optimizer, defer: bool | None, buffers: str
    ) -> PreparedModel:
        """Join the training of a model.

        Args:
            model: the user's.
            optimizer: the user's.
            defer: as in `Session.prepare`.
            buffers: how buffers are kept.

        Raises:
            ValueError: the model or the optimizer cannot take part.
            GradlaneError: the ranks differ, or the members let nobody in until the time limit.
        """
        attributes = attributes_of(optimizer)

        precopy: PrecopyTarget | None = None

        def begin_precopy(told: bytes) -> Callable[[], bool]:
            nonlocal precopy
            plan = PrecopyPlan(**json.loads(told))
            begun = precopy = PrecopyTarget(self._world.ctx, self._store, plan, model, optimizer)
            return lambda: begun.is_ready

        deadline = SuspendAwareDeadline(self._world.ctx.options.network.connect_timeout_s)
        tries = 0
        while True:
            request, precopy = JoinRequest(self._keys), None
            try:
                invitation = request.wait_for_invitation(deadline, begin_precopy)
                deadline = SuspendAwareDeadline(deadline.limit_s)
                tries += 1
                options = self._world.ctx.options
                world, scopes = self._other_world(
                    invitation.rank, invitation, options, request.has_joined
                )
                connected = connect_to_join(
                    world, model, optimizer, buffers, attributes, precopy=precopy
                )
                try:
                    first = self._first_step_state(world, optimizer, connected)
                    request.wait_for_outcome(SuspendAwareDeadline(CONNECT_S), connected.look)
                except BaseException as error:
                    connected.abort(str(error))
                    raise
                break
            except BaseException as error:
                # Also where the program is interrupted: threads that receive would outlive it.
                if precopy is not None:
                    precopy.close(f"{type(error).__name__}: {error}")
                is_final = isinstance(error, _FINAL)
                is_ours = isinstance(error, GradlaneError) and not is_final
                if not is_ours or tries == _TRIES_MAX or deadline.is_over():
                    raise
                log.warning("this rank asks to join again: %s", error)
        change = self._move(world, scopes, invitation)
        prepared = PreparedModel(
            world.ctx,
            world.meet,
            model,
            optimizer,
            defer,
            buffers,
            connected=connected,
            attributes=attributes,
            steps_before=invitation.step,
        )
        self._prepared.append(prepared)
        membership = world.ctx.membership
        membership.forget_request(2 * request.number + 1)
        membership.tell(change)
        first.take_over()
        return prepared

    # ---- both

    def _other_world(
        self,
        rank: int,
        invitation: Invitation,
        options: Options,
        look: Callable[[], object],
    ) -> tuple[JoinedWorld, SessionScopes]:
        """Return a new world, as this rank sees it, and the places where its ranks agree.

        Raises:
            ValueError: the session's options do not go with so many ranks.
        """
        options.check_world(invitation.world_size)
        limit_s = min(options.network.connect_timeout_s, CONNECT_S)
        network = replace(options.network, connect_timeout_s=limit_s)
        rank_info = RankInfo(rank, invitation.world_size, invitation.job, restart=0)
        # Where ranks join, each talks to the network by itself.
        local = replace(options.local, mode=OFF)
        options = replace(options, network=network, local=local)
        ctx = replace(self._world.ctx, rank_info=rank_info, options=options)
        scopes = SessionScopes(self._store.as_rank(rank), rank_info, limit_s, ctx.deadlocks, look)
        return JoinedWorld(ctx, scopes.open, self._store), scopes

    def _first_step_state(
        self, world: JoinedWorld, optimizer: Optimizer, connected: Connected
    ) -> FirstStepState:
        scope = world.meet()
        scope.mark_connected(world.ctx.options.network.progress_timeout_s, connected.look)
        return FirstStepState(scope, optimizer, self.shared, world.ctx.checkpoints)

    def _move(
        self, world: JoinedWorld, scopes: SessionScopes, invitation: Invitation
    ) -> MembershipChange:
        """Move to a new world, whose members are told later."""
        ctx = world.ctx
        # The time limit was for this start alone; also a model prepared anew has single ranks.
        options = replace(self._world.ctx.options, local=ctx.options.local)
        self._world.move(replace(ctx, options=options), scopes)
        return ctx.membership.open_with(
            ctx.rank_info,
            invitation.generation,
            invitation.step + 1,
            f"rank {invitation.rank} has joined",
        )
