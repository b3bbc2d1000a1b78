"""Optimizer steps that happen later than the user's call, in as many parts as gradients arrive.

Every part runs with the hyper-parameters of the moment of `optimizer.step()`, without grad,
inference mode or autocast, whatever is in force where it is triggered; the optimizer's own groups
are never written.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradlane.errors import UsageError


class DeferredUpdate:
    """The recorded step of one optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        step: Callable[[], Any],
        parameters: Sequence[Tensor],
        index_of: dict[int, int],
    ) -> None:
        """Drive an optimizer.

        Args:
            optimizer: the user's.
            step: its own `step`, as it was before it was replaced.
            parameters: trained parameters by tensor number.
            index_of: their numbers, by `id`.
        """
        self._optimizer = optimizer
        self._step = step
        self._parameters = parameters
        self._index_of = index_of
        self._groups: list[dict[str, Any]] = []
        self._place: dict[int, tuple[int, int]] = {}

    def record(self) -> None:
        """Keep every group's hyper-parameters as they are now.

        Raises:
            UsageError: the optimizer was given a parameter that the model did not have.
        """
        groups: list[dict[str, Any]] = []
        place: dict[int, tuple[int, int]] = {}
        for number, group in enumerate(self._optimizer.param_groups):
            groups.append({key: _kept(value) for key, value in group.items() if key != "params"})
            for position, parameter in enumerate(group["params"]):
                index = self._index_of.get(id(parameter))
                if index is not None:
                    place[index] = (number, position)
                elif parameter.requires_grad and parameter.numel() > 0:
                    raise UsageError(
                        f"group {number} of the optimizer holds a parameter of shape "
                        f"{tuple(parameter.shape)} that was not trained when the model was "
                        "prepared; open a new session and prepare it again"
                    )
        self._groups, self._place = groups, place

    def apply(self, arrived: Iterable[tuple[int, Tensor]]) -> None:
        """Step the parameters whose averaged gradients are given, in one call of the optimizer.

        Args:
            arrived: tensor numbers and averaged gradients, laid out like the parameters.
        """
        members: dict[int, list[tuple[int, Tensor]]] = {}
        stepped: list[Tensor] = []
        for index, gradient in arrived:
            place = self._place.get(index)
            if place is not None:
                parameter = self._parameters[index]
                parameter.grad = gradient
                stepped.append(parameter)
                members.setdefault(place[0], []).append((place[1], parameter))
        if not stepped:
            return
        own_groups = self._optimizer.param_groups
        self._optimizer.param_groups = [
            {
                **self._groups[number],
                "params": [parameter for _, parameter in sorted(members[number], key=_position)],
            }
            for number in sorted(members)
        ]
        try:
            with undisturbed():
                self._step()
        finally:
            self._optimizer.param_groups = own_groups
            for parameter in stepped:
                parameter.grad = None


def undisturbed() -> ExitStack:
    """Return a context without inference mode and autocast; grad mode is the optimizer's own."""
    stack = ExitStack()
    if torch.is_inference_mode_enabled():
        stack.enter_context(torch.inference_mode(False))
    for device_type in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
    return stack


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, (list, dict, set)) else value


def _position(member: tuple[int, Tensor]) -> int:
    return member[0]
