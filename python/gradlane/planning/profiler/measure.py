"""`gradlane.profile`: runs some steps of a model and records them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradlane.formats.profile import Profile, ProfileError
from gradlane.planning.profiler.operations import count_operations, with_operations
from gradlane.planning.profiler.options import STEPS_MAX
from gradlane.planning.profiler.preserving import preserved
from gradlane.planning.profiler.recorder import Recorder

Function = Callable[[nn.Module, Any], Any]
"""Takes the model and a batch; runs a whole step, or returns the loss."""


def profile(
    model: nn.Module,
    function: Function,
    batch: Any,
    *,
    steps: int = 20,
    warmup: int = 3,
    batch_size: int | None = None,
    name: str | None = None,
    operations: bool = True,
    on_step: Callable[[int], None] | None = None,
) -> Profile:
    """Run training steps and return their profile: compute times, and times of gradients and
    parameters.

    Moments are taken by hooks; on CUDA they are events, which are read after the steps, so
    nothing waits for the device within one.

    Args:
        model: any module, on the CPU or on one CUDA device, in the mode that it trains in.
        function: called as `function(model, batch)`. Either it runs a step (backward, as often as
            it likes, and the optimizer), or it returns the loss and leaves backward to this.
            The first run decides: whether a gradient appeared.
        batch: passed to the function, the same in each step.
        steps: recorded steps; medians over them are returned.
        warmup: steps before them, at least one.
        batch_size: samples in a step; None: the first dimension of the first tensor that the
            model is called with, summed over its calls in a step; 1 if there is none.
        name: of the model, for readers; None: its class.
        operations: whether one more step is run, untimed, to count operations.
        on_step: called with the number of steps that are done, after each.

    Returns:
        The profile. Gradients, buffers and torch's random state are as before; what the function
        did to parameters and optimizer stays.

    Raises:
        ProfileError: the function neither runs a backward nor returns a loss.
        ValueError: steps or warmup are out of range, or the model cannot be profiled.
    """
    if not 1 <= steps <= STEPS_MAX:
        raise ValueError(f"steps is {steps}, but must be 1 to {STEPS_MAX}")
    if warmup < 1:
        raise ValueError(f"warmup is {warmup}, but the first step has to be left out: at least 1")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, but must be above 0")
    recorder = Recorder(model, batch_size=batch_size)
    with preserved(model):
        step = _step_of(model, function, batch)
        recorder.attach()
        try:
            for number in range(1, warmup + steps):
                if number < warmup:
                    step()
                else:
                    recorder.begin_step()
                    step()
                    recorder.end_step()
                if on_step is not None:
                    on_step(number + 1)
        finally:
            recorder.detach()
        recorded = recorder.profile(name or type(model).__name__)
        if not operations:
            return recorded
        return with_operations(recorded, count_operations(model, step))


def _step_of(model: nn.Module, function: Function, batch: Any) -> Callable[[], None]:
    """Run the first step, find out whether the function runs backward, and return a whole step."""
    gradients = 0

    def count(parameter: Tensor) -> None:
        nonlocal gradients
        gradients += 1

    handles = [
        parameter.register_post_accumulate_grad_hook(count)  # type: ignore[no-untyped-call]
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    try:
        result = function(model, batch)
    finally:
        for handle in handles:
            handle.remove()

    def whole() -> None:
        function(model, batch)

    if gradients:
        return whole
    if not isinstance(result, Tensor) or not result.requires_grad or result.numel() != 1:
        shown = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ProfileError(
            "the function ran no backward that reached the model's parameters, and returned no "
            f"loss either (one number that leads back to them), but {shown}: give "
            "function(model, batch) that does one of the two"
        )

    def loss_and_backward() -> None:
        torch.autograd.backward(function(model, batch))
        model.zero_grad()

    result.backward()  # type: ignore[no-untyped-call]
    model.zero_grad()
    return loss_and_backward
