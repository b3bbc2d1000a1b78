"""Training on after a session: each rank would train alone, without a word.

A loop that has slipped out of the `with` of its session finds a plain model and a plain optimizer.
The optimizer's next step is refused if the session has averaged nothing of its model, else warned
of, once. So is the first step of another optimizer over that model.
"""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradlane.errors import UsageError
from gradlane.training.model.lazy_list import plain
from gradlane.training.model.optimizers import gradlane_hook

_watched: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
"""Handles of the hooks on optimizers whose session has ended."""


@dataclass
class _EndedModel:
    """A model whose session has closed: its optimizer, its parameters by `id`, how it trained."""

    optimizer: weakref.ref[Optimizer]
    parameters: dict[int, weakref.ref[Tensor]]
    steps: int
    world_size: int

    def holds(self, parameter: Tensor) -> bool:
        known = self.parameters.get(id(parameter))
        return known is not None and known() is parameter

    @property
    def is_gone(self) -> bool:
        return all(one() is None for one in self.parameters.values())


_ended: list[_EndedModel] = []


def watch(optimizer: Optimizer, steps: int, world_size: int) -> None:
    """Have an optimizer's next step say that it is one rank's alone.

    Args:
        optimizer: of a model whose session has closed.
        steps: that the model has trained in it.
        world_size: number of ranks that it was trained on.
    """
    forget(optimizer)
    refers = weakref.ref(optimizer)

    def before_step(*_: Any) -> None:
        stepped = refers()
        if stepped is not None:
            forget(stepped)
        _tell(steps, world_size)

    _watched[optimizer] = optimizer.register_step_pre_hook(gradlane_hook(before_step))
    parameters = {
        id(parameter): weakref.ref(parameter)
        for group in optimizer.param_groups
        for parameter in plain(group["params"])
    }
    _ended[:] = [one for one in _ended if not one.is_gone]
    _ended.append(_EndedModel(refers, parameters, steps, world_size))


def forget(optimizer: Optimizer) -> None:
    """Let an optimizer step again, as another session trains with it."""
    handle = _watched.pop(optimizer, None)
    if handle is not None:
        handle.remove()
    _forget_models_of(optimizer)


def _models_of(optimizer: Optimizer) -> list[_EndedModel]:
    """Return the ended models of an optimizer, by the first and last parameter of each group."""
    ends = [
        list.__getitem__(parameters, at)  # Waits for nothing.
        for group in optimizer.param_groups
        if list.__len__(parameters := group["params"])
        for at in (0, -1)
    ]
    return [model for model in _ended if any(map(model.holds, ends))]


def _forget_models_of(optimizer: Optimizer) -> list[_EndedModel]:
    found = _models_of(optimizer) if _ended else []
    _ended[:] = [one for one in _ended if all(one is not other for other in found)]
    return found


@gradlane_hook
def _before_any_step(optimizer: Optimizer, *_: Any) -> None:
    """Warn of the first step of another optimizer than the one that was prepared."""
    if not _ended or optimizer in _watched:
        return
    for model in _forget_models_of(optimizer):
        warnings.warn(
            f"another {type(optimizer).__name__} than the prepared optimizer steps a model whose "
            f"session was closed after step {model.steps}: this rank trains alone, and its model "
            f"parts from those of the other {model.world_size - 1}, unless something else averages "
            "its gradients; prepare it in a session, or train on one rank alone if that is meant",
            UserWarning,
            stacklevel=4,
        )


# Once: torch goes through these hooks in any thread, so that none can be taken out.
register_optimizer_step_pre_hook(_before_any_step)


def _tell(steps: int, world_size: int) -> None:
    """Warn, or refuse.

    Raises:
        UsageError: no step was taken in the session.
    """
    if steps == 0:
        raise UsageError(
            "optimizer.step() after the session was closed, in which its model has trained no "
            f"step: each of the {world_size} ranks would train a model of its own; move the loop "
            "into the `with` of the session, before session.close()"
        )
    warnings.warn(
        f"optimizer.step() after the session was closed: from step {steps} on this rank trains "
        f"alone, and its model parts from those of the other {world_size - 1}; move the loop into "
        "the `with` of the session, or train on one rank alone if that is meant",
        UserWarning,
        stacklevel=5,
    )
