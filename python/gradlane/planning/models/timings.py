"""Times at which gradients are ready and parameters are read, from layers and their durations.

Times are nominal seconds of the emulated accelerator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TensorTiming:
    """Times at which a parameter's gradient is ready and the parameter is next read."""

    name: str
    """Name as in `named_parameters()`."""
    numel: int
    """Number of elements."""
    dtype_bytes: int
    """Bytes an element."""
    ready_s: float
    """Time since the start of the step's forward at which backward has its gradient."""
    need_s: float
    """Time since the start of the *next* step's forward at which that forward first reads it."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole gradient."""
        return self.numel * self.dtype_bytes


@dataclass(frozen=True)
class Stage:
    """An operation of the accelerator: a layer's forward and backward, with its parameters."""

    name: str
    """Module name."""
    forward_s: float
    """Nominal duration of the forward."""
    backward_s: float
    """Nominal duration of the backward."""
    parameters: tuple[tuple[str, int, int], ...] = ()
    """(name, number of elements, bytes an element) of each parameter read by the stage."""


def timings_of(stages: Sequence[Stage]) -> list[TensorTiming]:
    """Return the timings of every parameter of stages that run one after another.

    Forward runs `stages` in order and backward runs them in reverse, without gaps. A parameter
    is needed when its first stage starts, and its gradient is ready when the backward of that
    stage, the last to contribute, ends.

    Args:
        stages: the stages in forward order; a parameter may occur in several (tied weights).

    Returns:
        One timing for each parameter, in the order of first use.
    """
    forward_end_s = sum(stage.forward_s for stage in stages)
    starts_s: list[float] = []
    now_s = 0.0
    for stage in stages:
        starts_s.append(now_s)
        now_s += stage.forward_s
    ready_s = [0.0] * len(stages)
    now_s = forward_end_s
    for index in range(len(stages) - 1, -1, -1):
        now_s += stages[index].backward_s
        ready_s[index] = now_s
    timings: dict[str, TensorTiming] = {}
    for index, stage in enumerate(stages):
        for name, numel, dtype_bytes in stage.parameters:
            if name not in timings:
                timings[name] = TensorTiming(
                    name, numel, dtype_bytes, ready_s[index], starts_s[index]
                )
    return list(timings.values())


def compute_s_of(stages: Sequence[Stage]) -> float:
    """Return the nominal seconds of one step's forward and backward together."""
    return sum(stage.forward_s + stage.backward_s for stage in stages)
