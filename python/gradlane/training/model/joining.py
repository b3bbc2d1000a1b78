"""Connect a model in a world that a rank joins: everyone gets rank 0's values and optimizer state.

The program of a rank that joins begins its loop with the next step. What the others' programs do at
the end of theirs, such as a step of their schedulers, is handed over once one of them has come to
that next step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from gradlane.errors import GradlaneError, UsageError
from gradlane.formats.serialization.pieces import pack, unpack
from gradlane.formats.serialization.strict_json import FormatError
from gradlane.formats.serialization.structure import UnstorableError
from gradlane.training.connection import SessionContext, open_channel
from gradlane.training.log import log
from gradlane.training.model.broadcast_state import (
    adopt_hyperparameters,
    adopt_state,
    broadcast_and_finish,
    describe_state,
    hyperparameters_of,
    state_entries,
)
from gradlane.training.model.connecting import Connected, connect
from gradlane.training.model.verification import ModelSpec
from gradlane.training.options.going_on import GoingOn
from gradlane.training.rendezvous.bounded_store import BoundedStore
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from gradlane.training.rendezvous.tensor_table import TensorEntry

_DONORS_MAX = 4
"""Ranks that share in sending the state; more fill no port that these leave empty."""
_GOODBYE_S = 10.0
_KEY = "first step"


class Stateful(Protocol):
    """Something whose state a rank that joins takes over, such as a scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Take a state over."""


@dataclass(frozen=True)
class JoinedWorld:
    """The world that a rank joins, which is the last one there.

    Attributes:
        ctx: the session's, for this world.
        meet: opens a scope where all its ranks agree.
        store: the rendezvous store.
    """

    ctx: SessionContext
    meet: Callable[[], RendezvousScope]
    store: BoundedStore

    @property
    def joins(self) -> bool:
        """Whether this rank is the one that joins."""
        return self.ctx.rank_info.rank == self.ctx.rank_info.world_size - 1

    def pair(self, connected: Connected, donor: int) -> tuple[SessionContext, RendezvousScope]:
        """Return a context and a scope of two ranks: a donor, and the one that joins."""
        ctx = self.ctx
        job = f"{ctx.rank_info.job}/from-{donor}"
        rank_info = RankInfo(int(self.joins), world_size=2, job=job, restart=0)
        # What is lost meanwhile ends the transfer.
        rendezvous = replace(ctx.options.rendezvous, join=False)
        options = replace(ctx.options, going_on=GoingOn(on=False), rendezvous=rendezvous)
        ctx = replace(ctx, rank_info=rank_info, options=options)
        scope = RendezvousScope(
            self.store.as_rank(rank_info.rank),
            rank_info,
            0,
            ctx.options.network.connect_timeout_s,
            connected.scope.incarnation,
            lambda: self.look(connected),
        )
        return ctx, scope

    def look(self, connected: Connected) -> None:
        """Raise if a rank of this world was lost before it is in force.

        Raises:
            GradlaneError: one was.
        """
        connected.look()
        self.ctx.membership.check_unchanged(self.ctx.rank_info.job)


def connect_to_join(
    world: JoinedWorld,
    model: nn.Module,
    optimizer: Optimizer,
    buffers: str,
    attributes: dict[str, Any],
    checked: ModelSpec | None = None,
) -> Connected:
    """Connect all ranks of a world, and give the one that joins the others' state.

    Args:
        world: the ranks.
        model: the user's.
        optimizer: the user's.
        buffers: how buffers are kept.
        attributes: what `attributes_of` gave when the program prepared the model.
        checked: the model as it was checked then, and is now; None: check it.

    Raises:
        ValueError: the model or the optimizer cannot take part.
        GradlaneError: the ranks differ, or cannot reach each other.
    """
    ctx = world.ctx
    connected = connect(ctx, world.meet(), model, optimizer, buffers, checked, spreads=False)
    ctx.membership.follow(ctx.core, connected.channel, connected.scope)
    try:
        _hand_over(world, connected, optimizer, attributes)
        if connected.layout.buffers is not None:
            connected.layout.buffers.start()
    except BaseException as error:
        connected.abort(f"{type(error).__name__} while handing the state over: {error}")
        raise
    return connected


def _hand_over(
    world: JoinedWorld, connected: Connected, optimizer: Optimizer, attributes: dict[str, Any]
) -> None:
    """Send parameters, buffers and optimizer's state to the rank that joins, from some donors."""
    meeting, rank = world.meet(), world.ctx.rank_info.rank
    donors = range(min(world.ctx.rank_info.world_size - 1, _DONORS_MAX))
    if rank == 0:
        meeting.put("state", describe_state(optimizer, attributes))
    elif world.joins:
        adopt_state(optimizer, meeting.get("state", 0), rank, 0)
    shares = _shared_out(connected.spec.entries, state_entries(optimizer), len(donors))
    own = donors if world.joins else [donor for donor in donors if donor == rank]

    def run(donor: int) -> None:
        ctx, scope = world.pair(connected, donor)
        rows = [entry.bytes_row() for entry in shares[donor]]
        channel = open_channel(ctx, scope, rows, None, update="worker")
        ranks = [donor, world.ctx.rank_info.world_size - 1]
        doing = "handing over the state"
        broadcast_and_finish(ctx, channel, shares[donor], not world.joins, ranks, doing, _GOODBYE_S)

    with ThreadPoolExecutor(_DONORS_MAX) as pool:
        for _ in pool.map(run, [donor for donor in own if shares[donor]]):
            pass


def _shared_out(
    entries: Sequence[TensorEntry], state: Sequence[TensorEntry], donors: int
) -> list[list[TensorEntry]]:
    """Share tensors out among donors.

    Args:
        entries: the model's; those that are not trained, such as buffers that can be each rank's
            own, are rank 0's.
        state: the optimizer's.
        donors: how many there are.
    """
    shares: list[list[TensorEntry]] = [[] for _ in range(donors)]
    loads = [0] * donors
    shares[0] += [entry for entry in entries if not entry.trained]
    loads[0] = sum(entry.nbytes for entry in shares[0])
    others = [*(entry for entry in entries if entry.trained), *state]
    for entry in sorted(others, key=lambda entry: entry.nbytes, reverse=True):
        donor = loads.index(min(loads))
        shares[donor].append(entry)
        loads[donor] += entry.nbytes
    return shares


class FirstStepState:
    """What the members begin their next step with, beside parameters and optimizer's state.

    These are hyper-parameters, shared objects, and where checkpoints stand.
    """

    def __init__(
        self,
        scope: RendezvousScope,
        optimizer: Optimizer,
        shared: Mapping[str, Stateful],
        checkpoints: Stateful | None,
    ) -> None:
        """Hand nothing over yet.

        Args:
            scope: of all ranks, for this alone; the last one joins.
            optimizer: of the model.
            shared: objects that each rank has, by name.
            checkpoints: takes those of the session; None: none are taken.
        """
        self._scope = scope
        self._optimizer = optimizer
        self._shared = shared
        self._checkpoints = checkpoints
        self._members = range(scope.rank_info.world_size - 1)
        self._is_told = False

    def tell(self) -> None:
        """Hand over what this member has now, which all have alike; once."""
        if self._is_told:
            return
        self._is_told = True
        rank = self._scope.rank_info.rank
        try:
            state: dict[str, Any] = {"groups": hyperparameters_of(self._optimizer)}
            state["shared"] = {name: one.state_dict() for name, one in self._shared.items()}
            if self._checkpoints is not None:
                state["checkpoints"] = self._checkpoints.state_dict()
            told = pack(state)
        except UnstorableError as error:
            told = pack({"refused": f"in its optimizer or a shared object, {error}"})
        try:
            self._scope.put(f"{_KEY}/{rank}", told)
        except GradlaneError as error:
            log.warning("the rank that joins does not get what it begins with: %s", error)

    def take(self) -> None:
        """Wait until a member has handed it over, and take it over.

        Raises:
            UsageError: it cannot be taken over.
            GradlaneError: nobody hands it over in time, or the session has failed.
        """
        # Whichever is first: a member may be lost meanwhile.
        told = self._scope.get_first({rank: f"{_KEY}/{rank}" for rank in self._members})
        own = self._scope.rank_info.rank
        try:
            state = unpack(told, torch.device("cpu"))
            if "refused" in state:
                raise UsageError(
                    f"the others cannot hand over what rank {own} begins with: {state['refused']}"
                )
            if set(state["shared"]) != set(self._shared):
                raise UsageError(
                    f"the others share {sorted(state['shared'])} and rank {own}, which joins, "
                    f"{sorted(self._shared)}: call session.share_state() alike on all ranks, "
                    "before prepare()"
                )
            adopt_hyperparameters(self._optimizer, state["groups"])
            for name, one in self._shared.items():
                one.load_state_dict(state["shared"][name])
            if self._checkpoints is not None:
                self._checkpoints.load_state_dict(state["checkpoints"])
        except (FormatError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"rank {own} cannot take over what the others begin the next step with: {error!r}; "
                "do all ranks have the same program and version of gradlane?"
            ) from error
