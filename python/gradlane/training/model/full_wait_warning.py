"""Says once which line of a program makes each of its steps wait for all gradients."""

from __future__ import annotations

import os
import sys

import torch

from gradlane.training.log import log

_STEPS = 3
"""Steps in a row after which it is no single look."""
_OWN = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (torch.__file__, sys.modules["gradlane"].__file__ or "gradlane")
)
"""Where torch and gradlane lie: their lines are none of the program's."""


class FullWaitWarning:
    """Counts steps whose gradients are looked at between `backward()` and `optimizer.step()`."""

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self._last_step = 0
        self._steps = 0
        self._was_told = False

    def note(self, step: int, why: str) -> None:
        """Note that a line of the program, which called this, waits for all means of a step.

        Args:
            step: number of the step.
            why: what the line does, in words that follow its name.
        """
        if self._was_told or step == self._last_step:
            return
        self._steps = self._steps + 1 if step == self._last_step + 1 else 1
        self._last_step = step
        if self._steps == _STEPS:
            self._was_told = True
            log.info(
                "each step waits for all gradients before it updates any: %s %s; to clip by "
                "the global norm without that wait: session.clip_grad_norm_() (said once)",
                _line_of_program(),
                why,
            )


def _line_of_program() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*_OWN, "<")):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
