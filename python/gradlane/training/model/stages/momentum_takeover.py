"""The codec `dgc` applies the momentum of torch's SGD in its place (Lin et al. 2018, section 3.2).

SGD adds `weight_decay * parameter` to the gradient before its momentum, so it is added here before
the codec's; what arrives is the velocity, which the update takes off the parameter without another
momentum or weight decay. The groups of the optimizer keep their values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradlane.training.model.stages.stage import StepStage
from gradlane.training.model.stages.step_start import StepStart


class MomentumTakeover(StepStage):
    """Gives gradients their weight decay, and steps what arrives without momentum."""

    def __init__(
        self, optimizer: Optimizer, codecs: Mapping[int, str], parameters: Sequence[Tensor]
    ) -> None:
        """Take momentum over.

        Args:
            optimizer: the user's; torch's SGD where it has momentum.
            codecs: codecs that keep momentum, by `id` of the parameter.
            parameters: trained parameters by tensor number.
        """
        names = ", ".join(sorted({text.partition(":")[0] for text in codecs.values()}))
        super().__init__("momentum takeover", f"codec {names}: it applies the momentum of SGD")
        self._optimizer = optimizer
        self._codecs = codecs
        self._parameters = parameters
        self._decays: dict[int, float] = {}
        """Weight decay that goes with a gradient of this step, by `id` of the parameter."""

    def begin(self, start: StepStart) -> None:
        """Keep the weight decay of groups that have momentum, for the gradients of the step."""
        self._decays = self._find_decays()

    def before_send(self, index: int, gradient: Tensor) -> None:
        """Add the weight decay of a group that has momentum to a fresh gradient, in place."""
        parameter = self._parameters[index]
        decay = self._decays.get(id(parameter), 0.0)
        if decay:
            with torch.no_grad(), torch.inference_mode(False):
                gradient.add_(parameter.detach(), alpha=decay)

    def _find_decays(self) -> dict[int, float]:
        return {
            id(parameter): float(group["weight_decay"])
            for group in self._optimizer.param_groups
            if group.get("momentum")
            for parameter in list.__iter__(group["params"])
            if id(parameter) in self._codecs
        }

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
