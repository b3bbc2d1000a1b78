"""What a session has connected: models, and arrays if there are any."""

from __future__ import annotations

from typing import TypeAlias

from gradlane.training.arrays.exchange import ArrayExchange
from gradlane.training.arrays.registered import RegisteredArrays
from gradlane.training.local_updates.local_model import LocalModel
from gradlane.training.model.prepared import PreparedModel
from gradlane.training.session.models import PreparedModels
from gradlane.training.sharded.model import ShardedModel

ConnectedModel: TypeAlias = PreparedModel | ShardedModel | LocalModel


class SessionParts:
    """The parts of a session that have a channel of their own."""

    def __init__(self, models: PreparedModels, arrays: RegisteredArrays) -> None:
        """List the parts of these."""
        self.models = models
        self.arrays = arrays

    @property
    def step(self) -> int:
        """Training steps of the first model that have ended; 0 before there is one."""
        if self.models.local is not None:
            return self.models.local.step
        if not self.models.prepared:
            return next((one.step for one in self.models.sharded), 0)
        first = self.models.prepared[0]
        return first.steps.step - int(first.in_step)

    def connected_models(self) -> list[ConnectedModel]:
        """Return all models, sharded ones last."""
        local = [] if self.models.local is None else [self.models.local]
        return [*self.models.prepared, *local, *self.models.sharded]

    def all(self) -> list[ConnectedModel | ArrayExchange]:
        """Return the models, and the arrays if there are any."""
        arrays = [] if self.arrays.exchange is None else [self.arrays.exchange]
        return [*self.connected_models(), *arrays]
