"""Profiles from operation counts: a clock that counts floating-point operations instead of time.

The recorder runs one step with that clock, so every construct is seen as in real time: reused and
tied layers, recomputed activations, the gradients' order in backward. The counts are those of
`torch.utils.flop_counter`: products of matrices, convolutions, attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gradlane.formats.profile import Profile, ProfileError
from gradlane.planning.profiler.nested import tensors_in
from gradlane.planning.profiler.preserving import preserved
from gradlane.planning.profiler.recorder import Recorder
from gradlane.planning.profiler.tape import Clock, Mark

FORWARD_SHARE = 1 / 3
"""Forward's part of a step; backward computes two gradients for each product of forward."""
UNCOUNTED_SHARE = 0.05
"""Part of a step that is spread evenly over all its marks: normalizations, activations and kernel
starts take time without counted operations."""


class OperationClock(Clock):
    """A clock whose moments are numbers of operations since the counter was entered."""

    def __init__(self, counter: FlopCounterMode, uncounted_share: float = 0.0) -> None:
        """Read a counter, and spread a share of the total over the marks."""
        self.now = counter.get_total_flops
        self._uncounted_share = uncounted_share

    def seconds(self, marks: Sequence[Mark]) -> list[tuple[int, float]]:
        """Return the marks in operations."""
        total = marks[-1][1] - marks[0][1]
        if self._uncounted_share == 0.0:
            return [(code, float(count)) for code, count in marks]
        counted = 1.0 - self._uncounted_share if total else 0.0
        return [
            (
                code,
                counted * (count - marks[0][1]) / (total or 1)
                + (1.0 - counted) * index / (len(marks) - 1),
            )
            for index, (code, count) in enumerate(marks)
        ]


def count_operations(model: nn.Module, step: Callable[[], object]) -> dict[str, int]:
    """Run one step and return the operations of each module's forwards, by name.

    Args:
        model: whose modules are counted.
        step: runs forward and backward.

    Raises:
        ProfileError: no gradient reached the model.
    """
    counted = _recorded(model, step, 0.0)
    return {
        module.name: round(sum(end - start for start, end in module.forwards_s))
        for module in counted.modules
    }


def with_operations(profile: Profile, counts: Mapping[str, int]) -> Profile:
    """Return a profile with the operations of its modules.

    Args:
        profile: of the model that was counted.
        counts: operations by the name of the module.
    """
    # Modules in others that are counted are in their counts.
    whole = sum(
        count
        for name, count in counts.items()
        if not any(outer in counts for outer in _enclosing_modules(name))
    )
    modules = tuple(replace(one, flops=counts.get(one.name)) for one in profile.modules)
    return replace(profile, flops=whole, modules=modules)


def _enclosing_modules(name: str) -> list[str]:
    """Return the names of the modules around a module, the model included."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts))] if name else []


def synthetic_profile(
    model: nn.Module,
    example: Any,
    batch_s: float,
    *,
    batch_size: int | None = None,
    name: str | None = None,
) -> Profile:
    """Make the profile of a model from its operations and a batch time.

    A third of the time is forward; within forward and backward, time passes as operations do. One
    forward and backward is run, here, to count them. Models and examples on the device `meta` are
    counted without computing, whatever their size.

    Args:
        model: any module.
        example: what to call it with: a tuple of arguments, a dictionary of keyword arguments, or
            the only argument.
        batch_s: seconds of forward and backward of one batch on the accelerator in question.
        batch_size: samples in the batch; None: the first dimension of its first tensor.
        name: of the model, for people; None: its class.

    Returns:
        The profile, with operation counts.

    Raises:
        ProfileError: the batch time is not positive, or no output leads back to a parameter.
    """

    def step() -> None:
        backward_of(call(model, example))

    return synthetic_step(model, step, batch_s, batch_size=batch_size, name=name)


def synthetic_step(
    model: nn.Module,
    step: Callable[[], object],
    batch_s: float,
    *,
    batch_size: int | None = None,
    name: str | None = None,
) -> Profile:
    """Make the profile, as `synthetic_profile`, of a step function that runs forward and
    backward."""
    if not 0.0 < batch_s < math.inf:
        raise ProfileError(f"batch time must be positive, got {batch_s} s")
    with preserved(model):
        shares = _recorded(model, step, UNCOUNTED_SHARE, batch_size, name)
        counts = count_operations(model, step)
    forward_s = batch_s * FORWARD_SHARE
    stretched = shares.scaled(forward_s / shares.forward_s)
    # Backward has a scale of its own.
    backward_scale = (batch_s - forward_s) / (shares.compute_s - shares.forward_s)
    tensors = tuple(
        replace(
            tensor,
            need_s=min(tensor.need_s, forward_s),
            ready_s=min(forward_s + (was.ready_s - shares.forward_s) * backward_scale, batch_s),
        )
        for tensor, was in zip(stretched.tensors, shares.tensors, strict=True)
    )
    profile = replace(
        stretched,
        forward_s=forward_s,
        compute_s=batch_s,
        tensors=tensors,
        device="synthetic",
        batch=None,
    )
    return with_operations(profile, counts)


def call(model: nn.Module, example: Any) -> Any:
    """Call a model with an example: arguments, keyword arguments, or the only argument."""
    if isinstance(example, tuple):
        return model(*example)
    return model(**example) if isinstance(example, dict) else model(example)


def backward_of(output: Any) -> None:
    """Run backward from every tensor of an output that depends on parameters.

    Raises:
        ProfileError: nothing does.
    """
    roots = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not roots:
        raise ProfileError(
            f"the model returned a {type(output).__name__} without any tensor that leads back to "
            "its parameters: give a model whose output does"
        )
    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def _recorded(
    model: nn.Module,
    step: Callable[[], object],
    uncounted_share: float,
    batch_size: int | None = None,
    name: str | None = None,
) -> Profile:
    """Record one step in operations."""
    with FlopCounterMode(display=False) as counter:
        recorder = Recorder(
            model, batch_size=batch_size, clock=OperationClock(counter, uncounted_share)
        )
        recorder.attach()
        try:
            recorder.begin_step()
            step()
            recorder.end_step()
        finally:
            recorder.detach()
    return recorder.profile(name or type(model).__name__)
