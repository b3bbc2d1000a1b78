"""A real `nn.Module` chain whose accelerator sleeps and yields gradients of the real sizes.

Each layer owns its parameters and is called as a module, so that hooks, DistributedDataParallel
and autograd see what they see with a model that computes. A gradient is written within the time
of its own backward, or earlier while the accelerator sleeps, so that writing it costs no step time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gradlane.lab.workloads.gradients import (
    PATTERN_ELEMENTS,
    Float32Array,
    GradientPattern,
    hash_of,
)
from gradlane.lab.workloads.pacing import PacingClock
from gradlane.planning.models.schedule import ReplayLayer
from gradlane.training.factors.block import Dense, LinearFactors, Part
from gradlane.training.factors.capture import factor_hook_of
from gradlane.training.torch_internals import children_of

UPDATED_ELEMENTS = 64
"""About how many elements of each parameter are updated, and looked at."""
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
    """State shared by the layers of one replayed model: clock, step and pending backwards."""

    def __init__(
        self,
        clock: PacingClock,
        pattern: GradientPattern,
        rank: int,
        operations_per_s: float = math.inf,
    ) -> None:
        """Create the stand-in for the accelerator of `rank`.

        Args:
            clock: what it sleeps by.
            pattern: what gradients are made of.
            rank: whose.
            operations_per_s: nominal speed of products that rebuild gradients; infinite: those
                take no time.
        """
        self.operations_per_s = operations_per_s
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

    gives_factors = True
    """Instances say whether they stand for a layer that has factors."""

    def __init__(
        self, layer: ReplayLayer, accelerator: Accelerator, first_index: int, batch_size: int
    ) -> None:
        """Create the layer with parameters of zeros, but for a seeded last element of each.

        Args:
            layer: names, shapes and nominal durations.
            accelerator: what it shares with the other layers.
            first_index: number of its first parameter among the model's parameters.
            batch_size: samples in a batch.
        """
        super().__init__()
        self.stands_for = layer.kind or type(self).__name__
        self.gives_factors = layer.kind == "Linear" and layer.positions is not None
        self._rows = batch_size * (layer.positions or 1)
        self.factor_rows = self._rows if self.gives_factors else None
        self._factors: list[Float32Array] = []
        self.factor_steps: set[int] = set()
        """Steps in which it gave factors of its weight, not a gradient."""
        self.forward_s = layer.forward_s
        self.backward_s = layer.backward_s
        self._accelerator = accelerator
        self._first_index = first_index
        self.memory: list[Float32Array] = []
        self._fills: list[list[GradientFill]] | None = None
        self._gives_now = False
        for index, shape in enumerate(layer.parameters, start=first_index):
            values = torch.zeros(shape.shape, dtype=torch.float32, device="cpu")
            bits = hash_of(accelerator.pattern.seed, index) >> 41
            values.view(-1)[-1] = bits * 2.0**-23
            # Touched here, because the kernel maps new memory as slowly as a step may last. The
            # memory is NumPy's, so that each gradient is a tensor with a storage of its own, as a
            # computed one is: nobody has to copy it for fear of another reader.
            self.memory.append(np.full(shape.numel, 0.0, dtype=np.float32))
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
        for fill in (one for of_parameter in pieces for one in of_parameter):
            while not fill.done:
                fill.advance()
        gradients = [
            torch.from_numpy(self.memory[index]).view(parameter.shape)
            if fills and not self._gives(index)
            else None
            for index, (parameter, fills) in enumerate(
                zip(self._own_parameters(), pieces, strict=True)
            )
        ]
        self._fills = None
        if self.backward_s > 0.0:
            accelerator.write_ahead()
        accelerator.clock.finish()
        if self._gives_now:
            self._give_factors()
        return gradients

    def _gives(self, offset: int) -> bool:
        """Return whether factors of a parameter, its weight, take the place of the gradient now."""
        return self._gives_now and offset == 0

    def _give_factors(self) -> None:
        """Pass factors of this step to the hook on this layer."""
        tap = factor_hook_of(self)
        assert tap is not None
        outputs, inputs = self.weight_shape
        rows, gradients = (torch.from_numpy(values) for values in self._factors)
        self.factor_steps.add(self._accelerator.step)
        tap.take(LinearFactors(rows.view(-1, inputs), gradients.view(-1, outputs)))

    @property
    def weight_shape(self) -> tuple[int, int]:
        """Rows and columns of its weight, the first parameter of a layer with factors."""
        rows, columns = self._own_parameters()[0].shape
        return rows, columns

    @property
    def factor_bytes(self) -> int:
        """Bytes of the factors of one rank and step."""
        return 4 * self._rows * sum(self.weight_shape)

    def factor_elements(self, number: int) -> int:
        """Return the elements of the inputs (0) or of the output gradients (1)."""
        outputs, inputs = self.weight_shape
        return self._rows * (outputs if number else inputs)

    def rebuild(
        self, contributions: Sequence[Sequence[Part]], divisor: int, out: Tensor, *, aside: bool
    ) -> None:
        """Write the elements of the mean that are looked at, and sleep for the whole product.

        The own factors are multiplied in backward, whose time holds that product already.

        Args:
            contributions: the parts of each rank, in rank order.
            divisor: number of ranks.
            out: where the mean goes.
            aside: on a thread of its own, beside the operations of the model: whoever answers for
                all ranks computes on something else than the model's accelerator.
        """
        accelerator = self._accelerator
        clock = accelerator.clock.beside() if aside else accelerator.clock
        rows = [
            part.inputs.shape[0]
            for parts in contributions
            for part in parts
            if isinstance(part, LinearFactors)
        ]
        others = max(sum(rows) - self._rows, 0)
        clock.begin(2.0 * others * out.numel() / accelerator.operations_per_s)
        elements = updated_elements(out.numel())
        total = np.zeros(len(elements), dtype=np.float32)
        for part in (one for parts in contributions for one in parts):
            if isinstance(part, LinearFactors):
                factors = part.inputs.numpy(), part.output_gradients.numpy()
                total = np.add(total, product_at(*factors, elements))
            elif isinstance(part, Dense):
                total = np.add(total, part.values.reshape(-1).numpy()[elements])
        mean = torch.from_numpy(np.divide(total, np.float32(divisor)))
        out.view(-1)[torch.from_numpy(elements)] = mean
        clock.finish()

    def fills(self) -> list[GradientFill]:
        """Return what the pending backward has to write."""
        return [fill for of_parameter in self._prepare() for fill in of_parameter]

    def drop_fills(self) -> None:
        """Forget what was written for a backward that will not come."""
        self._fills = None

    def _prepare(self) -> list[list[GradientFill]]:
        """Return what is to be written for each parameter, choosing the memory.

        It is a gradient, two factors, or nothing for frozen parameters.

        Memory is reused from step to step: a layer's forward has waited for the last step's
        average, so nobody reads the old gradient any more. Where the user still holds one
        in `.grad` (accumulation), new memory is taken.
        """
        if self._fills is None:
            accelerator = self._accelerator
            self._fills = []
            tap = factor_hook_of(self) if self.gives_factors else None
            self._gives_now = tap is not None and tap.is_open()
            for offset, parameter in enumerate(self._own_parameters()):
                if not parameter.requires_grad:
                    self._fills.append([])
                    continue
                if self._gives(offset):
                    self._fills.append(self._factor_fills())
                    continue
                if _shares_memory(parameter.grad, self.memory[offset]):
                    self.memory[offset] = np.empty(parameter.numel(), dtype=np.float32)
                shift, scale = accelerator.pattern.shift_and_scale(
                    self._first_index + offset, accelerator.rank, accelerator.step
                )
                target = torch.from_numpy(self.memory[offset])
                fill = GradientFill(target, accelerator.pattern_tensor, shift, scale)
                self._fills.append([fill])
        return self._fills

    def _factor_fills(self) -> list[GradientFill]:
        accelerator = self._accelerator
        if not self._factors:
            self._factors = [
                np.zeros(self.factor_elements(one), dtype=np.float32) for one in (0, 1)
            ]
        fills = []
        for number, memory in enumerate(self._factors):
            shift, scale = accelerator.pattern.shift_and_scale(
                factor_index(self._first_index, number), accelerator.rank, accelerator.step
            )
            target = torch.from_numpy(memory)
            fills.append(GradientFill(target, accelerator.pattern_tensor, shift, scale))
        return fills


def updated_elements(numel: int) -> npt.NDArray[np.int64]:
    """Return flat indices of a tensor that are checked: evenly spread, with the last one."""
    stride = max(1, numel // UPDATED_ELEMENTS)
    return np.arange((numel - 1) % stride, numel, stride, dtype=np.int64)


def factor_index(index: int, number: int) -> int:
    """Return the number of a factor of a weight; gradients have those of their parameters.

    Args:
        index: number of the weight.
        number: 0 for the inputs, 1 for the output gradients.
    """
    return -1 - 2 * index - number


def product_at(
    inputs: Float32Array, output_gradients: Float32Array, elements: npt.NDArray[np.int64]
) -> Float32Array:
    """Return elements of the gradient that two factors make, row after row.

    Args:
        inputs: (rows, in_features).
        output_gradients: (rows, out_features).
        elements: flat indices into (out_features, in_features).
    """
    outputs_at, inputs_at = np.divmod(elements, inputs.shape[1])
    total = np.zeros(len(elements), dtype=np.float32)
    for row, gradient in zip(inputs, output_gradients, strict=True):
        total = np.add(total, np.multiply(row[inputs_at], gradient[outputs_at]))
    return total


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

    def __init__(
        self, layers: Sequence[ReplayLayer], accelerator: Accelerator, batch_size: int = 1
    ) -> None:
        """Create all layers.

        Args:
            layers: in forward order.
            accelerator: shared by all layers.
            batch_size: samples in a batch, each with a row in the factors of a layer.

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
            created[layer.name] = SleepingLayer(layer, accelerator, first_index, batch_size)
            self._chain.append(created[layer.name])
            first_index += len(layer.parameters)
        for name, module in created.items():
            self._attach(name, module, created)

    @property
    def layers(self) -> Sequence[SleepingLayer]:
        """All layers in forward order."""
        return self._chain

    def _attach(self, name: str, module: SleepingLayer, layers: dict[str, SleepingLayer]) -> None:
        owner: nn.Module = self
        path = name.split(".")
        for depth, part in enumerate(path[:-1], start=1):
            if part not in children_of(owner):
                owner.add_module(part, layers.get(".".join(path[:depth]), nn.Module()))
            owner = owner.get_submodule(part)
        if path[-1] not in children_of(owner):
            owner.add_module(path[-1], module)

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        """Call every layer; the activation keeps its shape, whatever it is."""
        for layer in self._chain:
            activation = layer(activation)
        return activation
