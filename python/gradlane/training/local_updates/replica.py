"""What a rank trains between exchanges: its copy of a model, and the ranks that have one, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn
from torch.optim import Optimizer

from gradlane.training.connection import SessionContext
from gradlane.training.local_updates.fragments import divide
from gradlane.training.model.channel_setup import Connected, connect
from gradlane.training.model.validation import check_model
from gradlane.training.options.local_updates import Local
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from gradlane.training.rendezvous.tensor_table import TensorEntry, build_table

Form: TypeAlias = dict[str, tuple[Any, ...]]
"""Properties of parameters that stay as they are while they train, by name."""


@dataclass(frozen=True)
class Replica:
    """A rank's copy of a model, or its shard of one, connected to the ranks that have the same.

    Attributes:
        connected: the channel to these ranks.
        name: of the channel, among those that wait.
        ranks: of the world, by their numbers on the channel.
        shards: consecutive ranks that hold a model together; 1: each holds a whole one.
        fragments: tensor numbers, ascending, by fragment.
        frozen: table entries of parameters that are not trained.
        settle: makes this rank's parameters readable and writable, between two steps.
        form: returns the form of the model's parameters.
    """

    connected: Connected
    name: str
    ranks: Sequence[int]
    shards: int
    fragments: Sequence[Sequence[int]]
    frozen: Sequence[TensorEntry]
    settle: Callable[[], None]
    form: Callable[[], Form]


def connect_model(
    ctx: SessionContext,
    scope: RendezvousScope,
    model: nn.Module,
    optimizer: Optimizer,
    local: Local,
) -> Replica:
    """Agree with all ranks, connect to all of them, and take rank 0's values.

    Args:
        ctx: the session's.
        scope: where the ranks agree.
        model: the user's, whole on each rank.
        optimizer: the user's.
        local: how often and how the ranks exchange.

    Raises:
        ValueError: the model or the optimizer cannot take part.
        GradlaneError: the ranks differ, or cannot reach each other.
    """
    try:
        check_model(model)
        trained = [entry for entry in build_table(model) if entry.trained]
        fragments = divide(model, trained, local.fragments)
    except ValueError as error:
        scope.refuse(str(error))
        raise
    connected = connect(ctx, scope, model, optimizer, "local")
    parameters = {id(one) for one in model.parameters()}
    return Replica(
        connected,
        scope.name,
        range(ctx.rank_info.world_size),
        1,
        fragments,
        [
            entry
            for entry in connected.spec.entries
            if not entry.trained and id(entry.tensor) in parameters
        ],
        lambda: None,
        lambda: form_of(model),
    )


def form_of(model: nn.Module) -> Form:
    """Return the form of a model's parameters."""
    return {
        name: (id(one), one.requires_grad, one.dtype, one.shape, one.device)
        for name, one in model.named_parameters()
    }
