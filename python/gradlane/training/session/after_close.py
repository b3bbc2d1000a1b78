"""Training on after a session: each rank would train alone, without a word.

A loop that has slipped out of the `with` of its session finds a plain model and a plain optimizer.
The optimizer's next step is refused if the session has averaged nothing of its model, else warned
of, once.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from torch.optim import Optimizer

from gradlane.errors import UsageError
from gradlane.training.model.optimizers import gradlane_hook

_watched: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
"""Handles of the hooks on optimizers whose session has ended."""


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


def forget(optimizer: Optimizer) -> None:
    """Let an optimizer step again, as another session trains with it."""
    handle = _watched.pop(optimizer, None)
    if handle is not None:
        handle.remove()


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
