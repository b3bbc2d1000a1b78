"""Says once which line of a program makes each of its steps wait for all gradients."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import FrameType

import torch

from gradlane.training.log import log
from gradlane.training.model.stages.clipping import Clipping
from gradlane.training.model.stages.stage import StepStage
from gradlane.training.model.update_set import UpdateSet

_STEPS = 3
"""Steps in a row after which it is no single look."""
_OWN = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (torch.__file__, sys.modules["gradlane"].__file__ or "gradlane")
)
"""Where torch and gradlane lie."""
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
"""Where Python's own modules lie."""
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""What the paths of installed packages contain."""
_BY_VALUE = torch.nn.utils.clip_grad_value_.__name__


class FullWaitWarning(StepStage):
    """Counts steps whose gradients are looked at between `backward()` and `optimizer.step()`."""

    def __init__(self, updates: UpdateSet, clipping: Clipping) -> None:
        """Nothing was seen yet.

        Args:
            updates: the model's optimizers; those that step whole wait anyway.
            clipping: whether the session clips the step, so that there is no need to advise it.
        """
        super().__init__("hint of full waits", "always: a line that waits for all means is named")
        self._updates = updates
        self._clipping = clipping
        self._last_step = 0
        self._steps = 0
        self._was_told = False
        self.reads_averages = False
        """Whether the program has read averaged gradients between backward and step."""

    def waited(self, step: int, why: str) -> None:
        """Note that a line of the program, which called this, waits for all means of a step."""
        self.reads_averages = True
        if self._was_told or step == self._last_step or not self._updates.defers():
            return
        self._steps = self._steps + 1 if step == self._last_step + 1 else 1
        self._last_step = step
        if self._steps == _STEPS:
            self._was_told = True
            frames = _frames()
            advice = "; to clip by the global norm without that wait: session.clip_grad_norm_()"
            if any(frame.f_code.co_name == _BY_VALUE for frame in frames):
                why, advice = "clips by value, which needs all of them", ""
            log.info(
                "each step waits for all gradients before it updates any: %s %s%s (said once)",
                _line_of_program(frames),
                why,
                "" if self._clipping.norms else advice,
            )


def _frames() -> list[FrameType]:
    """Return what called `waited`, the innermost first."""
    frames = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _line_of_program(frames: list[FrameType]) -> str:
    """Return the line of the program, and that of a library which it has called for it."""
    others = [one for one in frames if not one.f_code.co_filename.startswith((*_OWN, "<"))]
    inner = others[0] if others else frames[-1]
    program = next((one for one in others if not _is_installed(one)), inner)
    via = "" if program is inner else f", in {_place(inner)},"
    return f"{_place(program)}{via}"


def _is_installed(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return path.startswith(_INSTALLED) or any(part in path for part in _PACKAGES)


def _place(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
