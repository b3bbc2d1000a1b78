"""A real `nn.Module` chain whose accelerator sleeps and yields gradients of the real sizes.

Each layer owns its parameters and is called as a module, so that hooks, DistributedDataParallel
and autograd see what they see with a model that computes. A gradient is written within the time
of its own backward, or earlier while the accelerator sleeps, so that writing it costs no step time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from gradlane.lab.workloads.gradients import (
    PATTERN_ELEMENTS,
    Float32Array,
    GradientPattern,
    hash_of,
)
from gradlane.lab.workloads.pacing import PacingClock
from gradlane.lab.workloads.schedule import ReplayLayer

WRITE_AHEAD_MARGIN_S = 0.001
"""Writing ahead stops this long before the end of an operation; a piece takes a third of it."""


class GradientFill:
    """Writes one gradient into memory piece by piece, so that it can stop when time is up."""

    def __init__(
        self, target: torch.Tensor, pattern: torch.Tensor, shift: int, scale: np.float32
    ) -> None:
        """Prepare to fill `target` (flat, float32) from `pattern` (`PATTERN_ELEMENTS` long)."""
        self._target = target
        self._pattern = pattern
        self._shift = shift
        self._scale = float(scale)
        self._written = 0

    @property
    def done(self) -> bool:
        """Whether every element has been written."""
        return self._written == self._target.numel()

    def advance(self) -> None:
        """Write the next piece: at most one length of the pattern, one pass over its memory."""
        start = (self._written + self._shift) % PATTERN_ELEMENTS
        length = min(PATTERN_ELEMENTS - start, self._target.numel() - self._written)
        end = self._written + length
        torch.mul(
            self._pattern[start : start + length],
            self._scale,
            out=self._target[self._written : end],
        )
        self._written = end


class Accelerator:
    """What the layers of one replayed model share: the clock, the step, and pending backwards."""

    def __init__(self, clock: PacingClock, pattern: GradientPattern, rank: int) -> None:
        """Create the stand-in for the accelerator of `rank`."""
        self.clock = clock
        self.pattern = pattern
        self.pattern_tensor = torch.from_numpy(pattern.values)
        self.rank = rank
        self.step = 0
        self.tape: list[SleepingLayer] = []
        """Layers whose forward has run and whose backward has not, in forward order."""

    def begin_step(self, step: int) -> None:
        """Forget what was not finished and make gradients of `step` from now on."""
        for layer in self.tape:
            layer.drop_fills()
        self.tape.clear()
        self.step = step

    def write_ahead(self) -> None:
        """Use the time that is left in this operation to write the gradients that come next."""
        for layer in reversed(self.tape):
            for fill in layer.fills():
                while not fill.done:
                    if self.clock.remaining_s() < WRITE_AHEAD_MARGIN_S:
                        return
                    fill.advance()


class SleepingLayer(nn.Module):
    """A layer that takes its time in forward and in backward and passes its input through."""

    def __init__(self, layer: ReplayLayer, accelerator: Accelerator, first_index: int) -> None:
        """Create the layer with parameters of zeros, but for a seeded last element of each.

        Args:
            layer: names, shapes and nominal durations.
            accelerator: what it shares with the other layers.
            first_index: number of its first parameter among the model's parameters.
        """
        super().__init__()
        self.forward_s = layer.forward_s
        self.backward_s = layer.backward_s
        self._accelerator = accelerator
        self._first_index = first_index
        self._memory: list[Float32Array] = []
        self._fills: list[GradientFill | None] | None = None
        for index, shape in enumerate(layer.parameters, start=first_index):
            values = torch.zeros(shape.shape)
            bits = hash_of(accelerator.pattern.seed, index) >> 41
            values.view(-1)[-1] = bits * 2.0**-23
            # Touched here, because the kernel maps new memory as slowly as a step may last. The
            # memory is NumPy's, so that each gradient is a tensor with a storage of its own, as a
            # computed one is: nobody has to copy it for fear of another reader.
            self._memory.append(np.full(shape.numel, 0.0, dtype=np.float32))
            self.register_parameter(shape.name.rpartition(".")[2], nn.Parameter(values))

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        """Sleep for the forward's time and return a copy of `activation`, whatever its shape."""
        if torch.is_grad_enabled():
            self._accelerator.tape.append(self)
        result: torch.Tensor = _Sleep.apply(activation, self, *self._own_parameters())
        return result

    def _own_parameters(self) -> list[nn.Parameter]:
        return list(self.parameters(recurse=False))

    def run_forward(self) -> None:
        """Take the forward's time."""
        clock = self._accelerator.clock
        clock.begin(self.forward_s)
        clock.finish()

    def run_backward(self) -> list[torch.Tensor | None]:
        """Take the backward's time and return a gradient for each parameter that wants one."""
        accelerator = self._accelerator
        accelerator.clock.begin(self.backward_s)
        while accelerator.tape and accelerator.tape.pop() is not self:
            pass  # Layers after this one got no backward: their output was not used.
        pieces = self._prepare()
        for fill in pieces:
            while fill is not None and not fill.done:
                fill.advance()
        gradients = [
            None if fill is None else torch.from_numpy(self._memory[index]).view(parameter.shape)
            for index, (parameter, fill) in enumerate(
                zip(self._own_parameters(), pieces, strict=True)
            )
        ]
        self._fills = None
        if self.backward_s > 0.0:
            accelerator.write_ahead()
        accelerator.clock.finish()
        return gradients

    def fills(self) -> list[GradientFill]:
        """What is to be written for the pending backward."""
        return [fill for fill in self._prepare() if fill is not None]

    def drop_fills(self) -> None:
        """Forget what was written for a backward that will not come."""
        self._fills = None

    def _prepare(self) -> list[GradientFill | None]:
        """Return one fill for each parameter, None for frozen ones, choosing the memory.

        Memory is reused from step to step: a layer's forward has waited for the last step's
        average, so nobody reads the old gradient any more. Where the user still holds one
        in `.grad` (accumulation), new memory is taken.
        """
        if self._fills is None:
            accelerator = self._accelerator
            self._fills = []
            for offset, parameter in enumerate(self._own_parameters()):
                if not parameter.requires_grad:
                    self._fills.append(None)
                    continue
                if _shares_memory(parameter.grad, self._memory[offset]):
                    self._memory[offset] = np.empty(parameter.numel(), dtype=np.float32)
                shift, scale = accelerator.pattern.shift_and_scale(
                    self._first_index + offset, accelerator.rank, accelerator.step
                )
                target = torch.from_numpy(self._memory[offset])
                self._fills.append(GradientFill(target, accelerator.pattern_tensor, shift, scale))
        return self._fills


def _shares_memory(gradient: torch.Tensor | None, memory: Float32Array) -> bool:
    return gradient is not None and gradient.data_ptr() == memory.ctypes.data


class _Sleep(torch.autograd.Function):
    """Connects a sleeping layer and its parameters to the graph of autograd."""

    @staticmethod
    def forward(
        ctx: Any, activation: torch.Tensor, layer: SleepingLayer, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.layer = layer
        layer.run_forward()
        return activation.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        own = ctx.layer.run_backward()
        return (gradients[0], None, *own)


class ReplayModel(nn.Module):
    """Layers called one after another, in the tree of modules that their dotted names spell."""

    def __init__(self, layers: Sequence[ReplayLayer], accelerator: Accelerator) -> None:
        """Create all layers.

        Args:
            layers: in forward order.
            accelerator: shared by all layers.

        Raises:
            ValueError: if two layers have the same name.
        """
        super().__init__()
        self._chain: list[SleepingLayer] = []
        created: dict[str, SleepingLayer] = {}
        first_index = 0
        for layer in layers:
            if layer.name in created:
                raise ValueError(f"two layers are named '{layer.name}'")
            created[layer.name] = SleepingLayer(layer, accelerator, first_index)
            self._chain.append(created[layer.name])
            first_index += len(layer.parameters)
        for name, module in created.items():
            self._attach(name, module, created)

    def _attach(self, name: str, module: SleepingLayer, layers: dict[str, SleepingLayer]) -> None:
        owner: nn.Module = self
        path = name.split(".")
        for depth, part in enumerate(path[:-1], start=1):
            if part not in owner._modules:
                owner.add_module(part, layers.get(".".join(path[:depth]), nn.Module()))
            owner = owner.get_submodule(part)
        if path[-1] not in owner._modules:
            owner.add_module(path[-1], module)

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        """Call every layer; the activation keeps its shape, whatever it is."""
        for layer in self._chain:
            activation = layer(activation)
        return activation
