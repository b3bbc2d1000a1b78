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
from torch.utils._python_dispatch import _disable_current_modes

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
        self._stepped: set[int] = set()
        self._leaves_zeros = False
        self._leaves_none = False
        self._empty: list[tuple[int, int, Tensor]] = []

    def record(self) -> None:
        """Keep every group's hyper-parameters as they are now.

        Raises:
            UsageError: the optimizer was given a parameter that the model did not have.
        """
        groups: list[dict[str, Any]] = []
        place: dict[int, tuple[int, int]] = {}
        empty: list[tuple[int, int, Tensor]] = []
        for number, group in enumerate(self._optimizer.param_groups):
            groups.append({key: _kept(value) for key, value in group.items() if key != "params"})
            for position, parameter in enumerate(list.__iter__(group["params"])):
                index = self._index_of.get(id(parameter))
                if index is not None:
                    place[index] = (number, position)
                elif parameter.numel() == 0:
                    if parameter.grad is not None:
                        empty.append((number, position, parameter))
                elif parameter.requires_grad:
                    raise UsageError(
                        f"group {number} of the optimizer holds a parameter of shape "
                        f"{tuple(parameter.shape)} that was not trained when the model was "
                        "prepared: call session.prepare(model, optimizer) again, on all ranks"
                    )
        self._groups, self._place, self._empty = groups, place, empty
        self._stepped.clear()
        self._leaves_zeros = False
        self._leaves_none = False

    def zero_in_place(self) -> None:
        """Do what `zero_grad(set_to_none=False)` means for gradients that were taken away.

        Torch leaves zeros where a gradient was, with which the next step decays and moves on.
        """
        if self._leaves_none:
            return
        self._leaves_zeros = True
        for index in self._stepped:
            parameter = self._parameters[index]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def leave_none(self) -> None:
        """Do what `zero_grad()` means after `zero_grad(set_to_none=False)`: leave no zeros."""
        self._leaves_zeros = False
        self._leaves_none = True

    def stepped_elsewhere(self, index: int) -> None:
        """A server has stepped a parameter: what `.grad` holds now is as if it were done here."""
        self._stepped.add(index)
        parameter = self._parameters[index]
        if self._leaves_zeros and parameter.grad is None:
            # It may be a read in inference mode that waits.
            with torch.inference_mode(False):
                parameter.grad = torch.zeros_like(parameter)

    def take_away(self) -> None:
        """Take the gradients away that a step done whole has left, as after one done in parts.

        Else they would add up over steps where `zero_grad()` is forgotten, on some ranks perhaps.
        """
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                self._stepped.add(index)
                parameter.grad = None

    def apply(self, arrived: Iterable[tuple[int, Tensor]]) -> None:
        """Step the parameters whose averaged gradients are given, in one call of the optimizer.

        Gradients that have begun to add up for the next step are as they were afterwards.

        Args:
            arrived: tensor numbers and averaged gradients, laid out like the parameters.
        """
        members: dict[int, list[tuple[int, Tensor]]] = {}
        stepped: list[tuple[Tensor, Tensor | None]] = []
        for index, gradient in arrived:
            place = self._place.get(index)
            if place is not None:
                parameter = self._parameters[index]
                stepped.append((parameter, parameter.grad))
                parameter.grad = gradient
                self._stepped.add(index)
                members.setdefault(place[0], []).append((place[1], parameter))
        if not stepped:
            return
        # Nothing of these is exchanged, but the optimizer keeps state of them, too.
        for number, position, parameter in self._empty:
            stepped.append((parameter, parameter.grad))
            parameter.grad = torch.empty_like(parameter)
            members.setdefault(number, []).append((position, parameter))
        self._empty.clear()
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
            for parameter, local in stepped:
                if local is None and self._leaves_zeros and parameter.grad is not None:
                    parameter.grad.zero_()
                else:
                    parameter.grad = local


def undisturbed() -> ExitStack:
    """Return a context without whatever is in force where an update happens to be triggered.

    Inference mode, autocast, tracing, the transforms of torch.func and modes such as
    `FakeTensorMode` are for the forward that waits, not for the update. Grad mode is the
    optimizer's own.
    """
    stack = ExitStack()
    if torch._C._functorch.peek_interpreter_stack() is not None:
        stack.enter_context(torch._C._DisableFuncTorch())
    if torch._C._len_torch_function_stack() > 0:
        stack.enter_context(torch._C.DisableTorchFunction())
    if torch._C._len_torch_dispatch_stack() > 0:
        stack.enter_context(_disable_current_modes())
    if torch.is_inference_mode_enabled():
        stack.enter_context(torch.inference_mode(False))
    for device_type in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
    tracing = torch._C._get_tracing_state()
    if tracing is not None:
        torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
        stack.callback(torch._C._set_tracing_state, tracing)  # type: ignore[attr-defined]
    return stack


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, tuple):
        return tuple(_kept(one) for one in value)
    return copy.copy(value) if isinstance(value, (list, dict, set)) else value


def _position(member: tuple[int, Tensor]) -> int:
    return member[0]
