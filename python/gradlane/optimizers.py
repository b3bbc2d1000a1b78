"""Which optimizers can be driven how, and what is read from them.

An optimizer steps *per parameter* when the update of one parameter needs nothing of another, and
`step()` leaves parameters without a gradient alone. Only then can it be given some of the gradients
now and the rest later with the same result to the last bit.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from gradlane.table import Entry, names_of

_PER_PARAMETER_NAMES = (
    "SGD",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "Adadelta",
    "Adagrad",
    "ASGD",
    "Adafactor",
    "Muon",
)
_REFUSED = {
    "LBFGS": "it evaluates the model many times in a step and mixes all parameters",
    "SparseAdam": "it needs sparse gradients, which cannot be averaged",
}
_SERVER_KEYS = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")


def steps_per_parameter(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to step per parameter.

    Those of `torch.optim` are known. Any other class says so with an attribute
    `steps_per_parameter = True`.
    """
    declared = getattr(optimizer, "steps_per_parameter", None)
    if declared is not None:
        return bool(declared)
    known = {getattr(torch.optim, name, None) for name in _PER_PARAMETER_NAMES}
    for base in type(optimizer).__mro__:
        if base in known:
            inherited: Callable[..., Any] = getattr(base, "step")  # noqa: B009
            # torch wraps `step` of each class once it is used.
            return inspect.unwrap(type(optimizer).step) is inspect.unwrap(inherited)
    return False


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether somebody looks on at each step, and must not see it done in parts."""
    from torch.optim import optimizer as module

    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or module._global_optimizer_pre_hooks
        or module._global_optimizer_post_hooks
    )


def check_optimizer(optimizer: Optimizer, entries: Sequence[Entry]) -> None:
    """Check that an optimizer fits the model.

    Args:
        optimizer: the user's.
        entries: the model's tensor table.

    Raises:
        ValueError: the optimizer cannot be driven, or its parameters are not the model's.
    """
    for base in type(optimizer).__mro__:
        reason = _REFUSED.get(base.__name__) if base.__module__.startswith("torch.") else None
        if reason is not None:
            raise ValueError(f"optimizer {base.__name__} is not supported: {reason}")
    if optimizer.defaults.get("differentiable"):
        raise ValueError("an optimizer with differentiable=True is not supported")
    model_parameters = {id(entry.tensor): entry for entry in entries}
    held = set()
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            held.add(id(parameter))
            if id(parameter) not in model_parameters and parameter.numel() > 0:
                raise ValueError(
                    f"group {number} of the optimizer holds a parameter of shape "
                    f"{tuple(parameter.shape)} that the model does not have: prepare one module "
                    "that holds them all, such as nn.ModuleList([model, loss])"
                )
    missing = [entry for entry in entries if entry.trained and id(entry.tensor) not in held]
    if missing:
        raise ValueError(
            f"the optimizer does not hold {names_of(missing)}, which are trained: call "
            "requires_grad_(False) on them, or give them to the optimizer"
        )


def check_server_optimizer(optimizer: Optimizer, entries: Sequence[Entry]) -> None:
    """Check that an optimizer can run on the owners of the slices.

    Raises:
        ValueError: it is not plain SGD without state, or a parameter is not in plain memory.
    """
    if not isinstance(optimizer, SGD) or not steps_per_parameter(optimizer):
        raise ValueError(
            f'update="server" runs torch.optim.SGD, not {type(optimizer).__name__}; '
            'use update="worker" (the default) for any other optimizer'
        )
    if any("momentum_buffer" in state for state in optimizer.state.values()):
        raise ValueError(
            'update="server" cannot continue from a momentum buffer yet; use update="worker"'
        )
    for entry in entries:
        if entry.trained and (
            entry.tensor.device.type != "cpu" or entry.tensor.stride() != entry.stride
        ):
            raise ValueError(
                f'update="server" writes parameters in place: {entry.name!r} must be dense and on '
                'the CPU; use update="worker" instead'
            )


def server_rows(optimizer: Optimizer, index_of: dict[int, int]) -> str:
    """Return every tensor's SGD hyper-parameters as the JSON that the core reads.

    Args:
        optimizer: plain SGD.
        index_of: number of each trained parameter, by `id`.
    """
    rows = []
    for group in optimizer.param_groups:
        shared = {key: _number(group[key]) for key in _SERVER_KEYS}
        for parameter in group["params"]:
            if id(parameter) in index_of:
                rows.append({"tensor": index_of[id(parameter)], **shared})
    rows.sort(key=lambda row: row["tensor"])
    return json.dumps(rows)


def _number(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return value if isinstance(value, bool) else float(value)
