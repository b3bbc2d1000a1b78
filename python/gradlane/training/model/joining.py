"""Connect a model in a world that a rank joins: everyone gets rank 0's values and optimizer state.

The program of a rank that joins begins its loop with the next step. What the others' programs still
do at the end of theirs, such as a step of their schedulers, is handed over once rank 0 has come to
that next step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
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
    broadcast_state,
    hyperparameters_of,
)
from gradlane.training.model.connecting import Connected, connect
from gradlane.training.model.verification import ModelSpec
from gradlane.training.rendezvous.rendezvous import RendezvousScope

_KEY = "first step"


class Stateful(Protocol):
    """Something whose state a rank that joins takes over, such as a scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Take a state over."""


def connect_to_join(
    ctx: SessionContext,
    meet: Callable[[], RendezvousScope],
    model: nn.Module,
    optimizer: Optimizer,
    buffers: str,
    attributes: dict[str, Any],
    checked: ModelSpec | None = None,
) -> Connected:
    """Connect to all ranks of a world, of which rank 0 gives its values and optimizer state.

    Args:
        ctx: the session's.
        meet: opens a scope where the ranks agree.
        model: the user's.
        optimizer: the user's.
        buffers: how buffers are kept.
        attributes: what `attributes_of` gave when the program prepared the model.
        checked: the model as it was checked then, and is now; None: check it.

    Raises:
        ValueError: the model or the optimizer cannot take part.
        GradlaneError: the ranks differ, or cannot reach each other.
    """
    connected = connect(ctx, meet(), model, optimizer, buffers, checked)
    try:
        broadcast_state(ctx, meet(), [], optimizer, attributes, source=0)
    except BaseException as error:
        with contextlib.suppress(ctx.core.ChannelError):
            connected.abort(f"{type(error).__name__} while handing the state over: {error}")
        raise
    return connected


class FirstStepState:
    """Hyper-parameters and shared objects as they are when rank 0 begins its next step."""

    def __init__(
        self,
        scope: RendezvousScope,
        optimizer: Optimizer,
        shared: Mapping[str, Stateful],
    ) -> None:
        """Hand nothing over yet.

        Args:
            scope: of all ranks, for this alone.
            optimizer: of the model.
            shared: objects that each rank has, by name.
        """
        self._scope = scope
        self._optimizer = optimizer
        self._shared = shared
        self._is_told = scope.rank_info.rank > 0

    def tell(self) -> None:
        """Hand over what rank 0 has now; once, and on rank 0 alone."""
        if self._is_told:
            return
        self._is_told = True
        try:
            state = {name: one.state_dict() for name, one in self._shared.items()}
            told = pack({"groups": hyperparameters_of(self._optimizer), "shared": state})
        except UnstorableError as error:
            told = pack({"refused": f"in its optimizer or a shared object, {error}"})
        try:
            self._scope.put(_KEY, told)
        except GradlaneError as error:
            log.warning("the rank that joins does not get what it begins with: %s", error)

    def take(self) -> None:
        """Wait until rank 0 has handed it over, and take it over.

        Raises:
            UsageError: it cannot be taken over.
            GradlaneError: rank 0 does not hand it over in time, or the session has failed.
        """
        told = self._scope.get(_KEY, 0)
        own = self._scope.rank_info.rank
        try:
            state = unpack(told, torch.device("cpu"))
            if "refused" in state:
                raise UsageError(
                    f"rank 0 cannot hand over what rank {own} begins with: {state['refused']}"
                )
            if set(state["shared"]) != set(self._shared):
                raise UsageError(
                    f"rank 0 shares {sorted(state['shared'])} and rank {own}, which joins, "
                    f"{sorted(self._shared)}: call session.share_state() alike on all ranks, "
                    "before prepare()"
                )
            adopt_hyperparameters(self._optimizer, state["groups"])
            for name, one in self._shared.items():
                one.load_state_dict(state["shared"][name])
        except (FormatError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"rank {own} cannot take over what rank 0 begins the next step with: {error!r}; do "
                "all ranks have the same program and version of gradlane?"
            ) from error
