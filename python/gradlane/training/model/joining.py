"""Connect a model in a world that a rank joins, and give that rank what it lacks of the state.

Most of it has come before, while the others trained (`model/precopy.py`): whatever has other bits
on the new rank than on its donor is sent now, so that all have the same in any case.

The program of a rank that joins begins its loop with the next step. What the others' programs do at
the end of theirs, such as a step of their schedulers, is handed over once one of them has come to
that next step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from gradlane.errors import GradlaneError, UsageError
from gradlane.formats.serialization.pieces import pack, unpack
from gradlane.formats.serialization.strict_json import FormatError
from gradlane.formats.serialization.structure import UnstorableError
from gradlane.training.connection import SessionContext
from gradlane.training.log import log
from gradlane.training.model.broadcast_state import (
    adopt_hyperparameters,
    adopt_state,
    describe_state,
    hyperparameters_of,
    state_entries,
)
from gradlane.training.model.channel_setup import Connected, connect
from gradlane.training.model.precopy import (
    DONORS_MAX,
    PrecopySource,
    PrecopyTarget,
    digest_of,
    donors_of,
    pair_context,
    shares_of,
    transfer,
)
from gradlane.training.model.verification import ModelSpec
from gradlane.training.rendezvous.bounded_store import BoundedStore
from gradlane.training.rendezvous.rendezvous import RendezvousScope

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
        job = f"{self.ctx.rank_info.job}/from-{donor}"
        ctx = pair_context(self.ctx, job, joins=self.joins)
        rank_info = ctx.rank_info
        scope = RendezvousScope(
            self.store.as_rank(rank_info.rank),
            rank_info,
            0,
            # The rank that joins comes when the slowest donor has given all.
            ctx.options.network.progress_timeout_s,
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
    precopy: PrecopySource | PrecopyTarget | None = None,
) -> Connected:
    """Connect all ranks of a world, and give the one that joins the others' state.

    Args:
        world: the ranks.
        model: the user's.
        optimizer: the user's.
        buffers: how buffers are kept.
        attributes: what `attributes_of` gave when the program prepared the model.
        checked: the model as it was checked then, and is now; None: check it.
        precopy: what this rank has of the state, or has given; None: nothing.

    Raises:
        ValueError: the model or the optimizer cannot take part.
        GradlaneError: the ranks differ, or cannot reach each other.
    """
    ctx = world.ctx
    connected = connect(ctx, world.meet(), model, optimizer, buffers, checked, spreads=False)
    try:
        _hand_over(world, connected, optimizer, attributes, precopy)
        if connected.layout.buffers is not None:
            connected.layout.buffers.start()
    except BaseException as error:
        connected.abort(f"{type(error).__name__} while handing the state over: {error}")
        raise
    return connected


def _hand_over(
    world: JoinedWorld,
    connected: Connected,
    optimizer: Optimizer,
    attributes: dict[str, Any],
    precopy: PrecopySource | PrecopyTarget | None,
) -> None:
    """Give the rank that joins what it lacks of parameters, buffers and optimizer's state."""
    rank, last = world.ctx.rank_info.rank, world.ctx.rank_info.world_size - 1

    def look() -> None:
        world.look(connected)

    meeting = world.meet()
    meeting.mark_connected(world.ctx.options.network.progress_timeout_s, look)
    if rank == 0:
        meeting.put("state", describe_state(optimizer, attributes))
    known: dict[int, bytes] = {}
    if world.joins:
        known = {} if precopy is None else precopy.finish(look)
        adopt_state(optimizer, meeting.get("state", 0), rank, 0)
    donors = range(donors_of(last, len(connected.spec.trained)))
    shares = shares_of(connected.spec.entries, state_entries(optimizer), len(donors))

    def run(donor: int) -> int:
        ctx, scope = world.pair(connected, donor)
        share = shares[donor]
        if world.joins:
            held = [known.get(id(one.tensor), b"").hex() for one in share]
            scope.put("held", json.dumps(held))
            lacking = json.loads(scope.get("lacking", 0))
        else:
            held = json.loads(scope.get("held", 1))
            # A rank that holds nothing has given up: this one would give its rest in vain.
            given = precopy.finish(look) if precopy is not None and any(held) else {}
            own = [(given.get(id(one.tensor)) or digest_of(one)).hex() for one in share]
            lacking = [place for place, digest in enumerate(own) if digest != held[place]]
            scope.put("lacking", json.dumps(lacking))
        sent = [share[place] for place in lacking]
        transfer(ctx, scope, sent, [donor, last])
        return sum(entry.nbytes for entry in sent)

    takes_part = donors if world.joins else [donor for donor in donors if donor == rank]
    with ThreadPoolExecutor(DONORS_MAX) as pool:
        waited_bytes = sum(pool.map(run, takes_part))
    if world.joins:
        all_bytes = sum(entry.nbytes for share in shares for entry in share)
        log.info(
            "rank %d: the others waited for %.4g of %.4g MB of state",
            rank,
            waited_bytes / 1e6,
            all_bytes / 1e6,
        )


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
            log.warning(
                "the rank that joins gets no hyper-parameters and shared objects: %s", error
            )

    def take_over(self) -> None:
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
                    f"the members cannot hand rank {own} what it needs to join: {state['refused']}"
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
