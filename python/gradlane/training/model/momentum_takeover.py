"""The codec `dgc` applies the momentum of torch's SGD in its place (Lin et al. 2018, section 3.1).

SGD adds `weight_decay * parameter` to the gradient before its momentum, so it is added here before
the codec's; what arrives is the velocity, which the update takes off the parameter without another
momentum or weight decay. The groups of the optimizer keep their values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradlane.training.carrier import Carrier
from gradlane.training.rendezvous.tensor_table import TensorEntry


class MomentumTakeover:
    """Carries gradients with their weight decay, and steps what arrives without momentum."""

    def __init__(
        self,
        carrier: Carrier,
        optimizer: Optimizer,
        trained: Sequence[TensorEntry],
        codecs: Mapping[int, str],
    ) -> None:
        """Stand between the steps of a model and its carrier.

        Args:
            carrier: of the gradients.
            optimizer: the user's; torch's SGD where it has momentum.
            trained: table entries by tensor number.
            codecs: codecs that keep momentum, by `id` of the parameter.
        """
        self._carrier = carrier
        self._optimizer = optimizer
        self._trained = trained
        self._codecs = codecs
        self._step = -1
        self._decays: dict[int, float] = {}
        """Weight decay that goes with a gradient of this step, by `id` of the parameter."""

    def submit(self, index: int, step: int, gradient: Tensor) -> None:
        """Submit a gradient, with the weight decay of a group that has momentum."""
        if step != self._step:
            self._step, self._decays = step, self._find_decays()
        parameter = self._trained[index].tensor
        decay = self._decays.get(id(parameter), 0.0)
        if decay:
            with torch.no_grad():
                gradient.add_(parameter.detach(), alpha=decay)
        self._carrier.submit(index, step, gradient)

    def _find_decays(self) -> dict[int, float]:
        return {
            id(parameter): float(group["weight_decay"])
            for group in self._optimizer.param_groups
            if group.get("momentum")
            for parameter in list.__iter__(group["params"])
            if id(parameter) in self._codecs
        }

    def submit_absent(self, index: int, step: int) -> Tensor:
        """Submit the absence of a gradient."""
        return self._carrier.submit_absent(index, step)

    def collect(self, arrived: Sequence[tuple[int, Tensor]]) -> None:
        """Make results readable."""
        self._carrier.collect(arrived)

    def broadcast_initial(
        self, entries: Sequence[TensorEntry], first: bool, without: Collection[int] = ()
    ) -> None:
        """Run step 0."""
        self._carrier.broadcast_initial(entries, first, without)

    def close(self) -> None:
        """Stop using the channel."""
        self._carrier.close()

    def groups_for_step(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return groups in which parameters whose momentum has been applied have none.

        Args:
            groups: of the optimizer, or of a part of its step.
        """
        found = []
        for group in groups:
            own: list[Tensor] = []
            taken: list[Tensor] = []
            for parameter in list.__iter__(group["params"]):
                is_taken = id(parameter) in self._codecs and group.get("momentum")
                (taken if is_taken else own).append(parameter)
            if own or not taken:
                found.append({**group, "params": own})
            if taken:
                found.append({**group, "momentum": 0.0, "weight_decay": 0.0, "params": taken})
        return found
