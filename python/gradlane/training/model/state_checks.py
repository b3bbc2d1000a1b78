"""Optimizer states as torch keeps them: their tensors, and checks that they fit a model.

A state that servers cannot go on from is refused here, before anything is changed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from gradlane.errors import RefusedError, UsageError
from gradlane.training.rendezvous.tensor_table import TensorEntry

MOMENTUM = "momentum_buffer"
"""The state that SGD keeps for a parameter, if any."""
MEANS = ("exp_avg", "exp_avg_sq")
"""The state that Adam and AdamW keep for a parameter, beside its steps."""


def _check_state(entry: TensorEntry, state: dict[str, Any], names: Iterable[str]) -> None:
    """Check that the servers can go on from a tensor's optimizer state.

    Raises:
        ValueError: something is missing or has another shape; the message names the tensor.
    """
    names = list(names)
    present = [name for name in names if isinstance(state.get(name), Tensor)]
    steps = int(state.get("step", 0))
    if len(names) > 1 and (len(present) not in (0, len(names)) or bool(steps) != bool(present)):
        raise RefusedError(
            f"the optimizer's state of {entry.name!r} has {sorted(state)} after {steps} steps; "
            f"with step, {', '.join(names)} belong together: is it another optimizer's?"
        )
    for name in present:
        if state[name].shape != entry.shape:
            raise RefusedError(
                f"{name} of {entry.name!r} has shape {tuple(state[name].shape)}, the parameter "
                f"{tuple(entry.shape)}: is the checkpoint another model's?"
            )


def digest_of(states: Iterable[dict[str, Any]], names: Iterable[str]) -> str:
    """Return a checksum of optimizer states, by tensor number, for comparison across ranks."""
    names = list(names)
    checksum = 0
    for index, state in enumerate(states):
        for name in names:
            value = state.get(name)
            if isinstance(value, Tensor):
                where = f"{index} {name} {int(state.get('step', 0))}"
                values = value.detach().to("cpu", torch.float32).contiguous().view(-1)
                checksum = zlib.crc32(where.encode(), checksum)
                checksum = zlib.crc32(values.view(torch.uint8).numpy().data, checksum)
    return f"{checksum:08x}"


def check_taken_over(optimizer: Optimizer, trained: Sequence[TensorEntry]) -> str:
    """Check that the servers can go on from the state that an optimizer has.

    Args:
        optimizer: the user's, checked by `check_server_optimizer`.
        trained: table entries of the trained parameters.

    Returns:
        A checksum of the state, for comparison across ranks.

    Raises:
        ValueError: something is missing or has another shape; the message names the tensor.
    """
    states = {id(entry.tensor): optimizer.state.get(entry.tensor, {}) for entry in trained}
    check_states(optimizer, trained, states)
    return digest_of(states.values(), state_names(optimizer))


def check_states(
    optimizer: Optimizer, trained: Iterable[TensorEntry], states: dict[int, dict[str, Any]]
) -> None:
    """Check that the servers can go on from states of parameters, given by `id`.

    Raises:
        ValueError: something is missing or has another shape; the message names the tensor.
    """
    for entry in trained:
        _check_state(entry, states.get(id(entry.tensor), {}), state_names(optimizer))


def state_names(optimizer: Optimizer) -> tuple[str, ...]:
    """Return the names of the tensors that an optimizer may keep for a parameter."""
    return (MOMENTUM,) if isinstance(optimizer, SGD) else MEANS


def states_by_parameter(optimizer: Optimizer, loaded: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Match a state dictionary with parameters; torch refuses what fits nowhere."""
    found: dict[int, dict[str, Any]] = {}
    states = loaded.get("state", {})
    for group, saved in zip(optimizer.param_groups, loaded.get("param_groups", ()), strict=False):
        for parameter, key in zip(group["params"], saved["params"], strict=False):
            if key in states:
                found[id(parameter)] = states[key]
    return found


def mark_incomplete(optimizer: Optimizer) -> None:
    """Make an optimizer whose state is lost refuse to be saved or stepped until it is loaded."""
    handles: list[Any] = []

    def refuse(*_: Any) -> None:
        raise UsageError(
            "this optimizer's state was on the servers of a session that is closed: call "
            "optimizer.state_dict() before the session ends, and load_state_dict() to go on"
        )

    def complete(_: Optimizer) -> None:
        for handle in handles:
            handle.remove()

    handles += [
        optimizer.register_state_dict_pre_hook(refuse),
        optimizer.register_step_pre_hook(refuse),
        optimizer.register_load_state_dict_post_hook(complete),
    ]
