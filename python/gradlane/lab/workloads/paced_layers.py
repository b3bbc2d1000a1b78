"""Layers that compute for real and are stretched to a fixed time, in forward and in backward.

A paced layer is the layer of torch that it derives from, with the same parameters and the same
results to the bit. Its gradients leave it when its time is over, not when they are computed, as
they would on an accelerator that takes this long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gradlane.lab.workloads.pacing import PacingClock
from gradlane.planning.models.timings import Stage

BACKWARD_FACTOR = 2.0
"""Backward lasts this many times as long as forward."""

Compute = Callable[..., torch.Tensor]


class Pacer:
    """Runs the operations of one model on one clock, and can record their sequence."""

    def __init__(self, clock: PacingClock) -> None:
        """Create a pacer on `clock`."""
        self.clock = clock
        self.scale = 1.0
        """Factor on the nominal duration of every operation."""
        self._record: list[tuple[float, tuple[torch.Tensor, ...]]] | None = None

    def run(self, forward_s: float, compute: Compute, *inputs: torch.Tensor) -> torch.Tensor:
        """Compute `compute(*inputs)` in `forward_s`, and its gradients in twice that time.

        Nothing is stretched without gradients (evaluation) or where the clock is disabled.

        Args:
            forward_s: nominal seconds of the forward.
            compute: a pure function of the inputs that returns one tensor.
            inputs: all tensors that it reads, parameters among them.

        Returns:
            The result, connected to the graph of autograd.
        """
        if self._record is not None:
            self._record.append((forward_s, inputs))
        if not self.clock.enabled or not torch.is_grad_enabled():
            return compute(*inputs)
        result: torch.Tensor = _PacedOperation.apply(
            self.clock, forward_s * self.scale, compute, *inputs
        )
        return result

    def stages(self, model: nn.Module, forward: Callable[[], object]) -> list[Stage]:
        """Run `forward` once without gradients and list the operations that it consists of.

        Args:
            model: owns the parameters; gives them their names.
            forward: calls the model, and the loss.

        Returns:
            The stages in forward order, with nominal, scaled durations.
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._record = []
        with torch.no_grad():
            forward()
        record, self._record = self._record, None
        stages = []
        for number, (forward_s, inputs) in enumerate(record):
            parameters = tuple(
                (names[id(tensor)], tensor.numel(), tensor.element_size())
                for tensor in inputs
                if id(tensor) in names
            )
            name = parameters[0][0].rpartition(".")[0] if parameters else f"operation {number}"
            duration_s = forward_s * self.scale
            stages.append(Stage(name, duration_s, duration_s * BACKWARD_FACTOR, parameters))
        return stages


class _PacedOperation(torch.autograd.Function):
    """An operation with a graph of its own, whose gradients are handed out when its time is up."""

    @staticmethod
    def forward(
        ctx: Any, clock: PacingClock, forward_s: float, compute: Compute, *inputs: torch.Tensor
    ) -> torch.Tensor:
        clock.begin(forward_s)
        ctx.clock, ctx.backward_s = clock, forward_s * BACKWARD_FACTOR
        wanted = ctx.needs_input_grad[3:]
        # Aliases, so that hooks on the parameters see the outer graph only, and once.
        with torch.enable_grad():
            ctx.inner_inputs = [
                tensor.detach().requires_grad_(want)
                for tensor, want in zip(inputs, wanted, strict=True)
            ]
            ctx.inner_result = compute(*ctx.inner_inputs)
        clock.finish()
        return ctx.inner_result.detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.clock.begin(ctx.backward_s)
        wanted = [tensor for tensor in ctx.inner_inputs if tensor.requires_grad]
        found = iter(torch.autograd.grad(ctx.inner_result, wanted, gradients[0]))
        result = tuple(next(found) if tensor.requires_grad else None for tensor in ctx.inner_inputs)
        del ctx.inner_inputs, ctx.inner_result
        ctx.clock.finish()
        return (None, None, None, *result)


class PacedLinear(nn.Linear):
    """`nn.Linear`, optionally followed by an activation within the same time."""

    def __init__(
        self,
        pacer: Pacer,
        inputs: int,
        outputs: int,
        forward_s: float,
        activation: Compute | None = None,
    ) -> None:
        """Create the layer with torch's own initialization."""
        super().__init__(inputs, outputs)
        self._pacer, self._forward_s, self._activation = pacer, forward_s, activation

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map the last dimension of `input` from `inputs` to `outputs` values."""
        return self._pacer.run(self._forward_s, self._compute, input, self.weight, self.bias)

    def _compute(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        result = functional.linear(input, weight, bias)
        return result if self._activation is None else self._activation(result)


class PacedConvolution(nn.Conv2d):
    """`nn.Conv2d` with a 3x3 kernel that keeps the size, followed by an activation."""

    def __init__(
        self, pacer: Pacer, inputs: int, outputs: int, forward_s: float, activation: Compute
    ) -> None:
        """Create the layer with torch's own initialization."""
        super().__init__(inputs, outputs, 3, padding=1)
        self._pacer, self._forward_s, self._activation = pacer, forward_s, activation

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map images (samples, inputs, height, width) to `outputs` channels."""
        assert self.bias is not None
        return self._pacer.run(self._forward_s, self._compute, input, self.weight, self.bias)

    def _compute(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        return self._activation(functional.conv2d(input, weight, bias, padding=1))


class PacedLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` over the last dimension."""

    def __init__(self, pacer: Pacer, size: int, forward_s: float) -> None:
        """Create the layer with torch's own initialization."""
        super().__init__(size)
        self._pacer, self._forward_s = pacer, forward_s

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize `input` over its last dimension."""
        return self._pacer.run(self._forward_s, self._compute, input, self.weight, self.bias)

    def _compute(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        return functional.layer_norm(input, input.shape[-1:], weight, bias, self.eps)


class PacedEmbedding(nn.Embedding):
    """`nn.Embedding` with a dense gradient."""

    def __init__(self, pacer: Pacer, rows: int, size: int, forward_s: float) -> None:
        """Create the layer with small normal values (standard deviation 0.02)."""
        super().__init__(rows, size)
        nn.init.normal_(self.weight, std=0.02)
        self._pacer, self._forward_s = pacer, forward_s

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Look up rows by number (int64, any shape)."""
        return self._pacer.run(self._forward_s, functional.embedding, input, self.weight)


class PacedOperation(nn.Module):
    """A function without parameters, such as the core of attention, as a paced module."""

    def __init__(self, pacer: Pacer, compute: Compute, forward_s: float) -> None:
        """Create a module that calls `compute`."""
        super().__init__()
        self._pacer, self._compute, self._forward_s = pacer, compute, forward_s

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Apply the function."""
        return self._pacer.run(self._forward_s, self._compute, *inputs)
