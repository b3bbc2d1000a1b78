"""A call after each step of an optimizer.

Torch's own step hooks would be called twice by a class whose `step` calls that of its base.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from gradlane.training.modules.compiled import compile_disabled
from gradlane.training.torch_internals import mark_as_wrapped, patch_step


class StepHook:
    """Calls a function after each step of one optimizer, until it is removed."""

    def __init__(self, optimizer: Optimizer, stepped: Callable[[], None]) -> None:
        """Take the place of the optimizer's `step`.

        Args:
            optimizer: the user's.
            stepped: called when a step has returned.
        """
        patch_step(optimizer)
        self._optimizer = optimizer
        self._had_own_step = "step" in vars(optimizer)
        self._step_whole = step_whole = optimizer.step
        self._removed = False
        hook, tell = self, compile_disabled(stepped)

        def step(self: Optimizer, *arguments: Any, **named: Any) -> Any:
            """Step, and count it."""
            result = step_whole(*arguments, **named)
            if not hook._removed:
                tell()
            return result

        # Another session that prepares the optimizer looks for the code that steps.
        step.__wrapped__ = step_whole  # type: ignore[attr-defined]
        mark_as_wrapped(step, step_whole)
        self._own_step = types.MethodType(step, optimizer)
        vars(optimizer)["step"] = self._own_step

    def remove(self) -> None:
        """Give the optimizer its own `step` again, where nothing has wrapped this one since."""
        self._removed = True
        own = vars(self._optimizer)
        if own.get("step") is self._own_step:
            del own["step"]
            if self._had_own_step:
                own["step"] = self._step_whole
