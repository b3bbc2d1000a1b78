"""Building blocks of architecture descriptions: layers with shapes and operation counts.

A layer here always owns parameters; pooling, activations and additions own none and take next to
no time, so they are left out. One multiplication with its addition counts as two operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

NORM_OPERATIONS_PER_ELEMENT = 4
"""Batch normalization: subtract the mean, divide by the deviation, scale and shift."""


@dataclass(frozen=True)
class ParameterShape:
    """A parameter tensor of a layer."""

    name: str
    """Full name, as in `named_parameters()`."""
    shape: tuple[int, ...]
    """Size of each dimension."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class ModelLayer:
    """A module with parameters, and the work of its forward for one sample."""

    name: str
    """Module name: the parameters' names without their last part."""
    parameters: tuple[ParameterShape, ...]
    """Parameters in the order in which the module registers them."""
    operations: int
    """Floating-point operations a sample in forward."""
    kind: str
    """Class of the module in torch, such as `Conv2d`; of fully connected ones always `Linear`."""
    positions: int = 1
    """Vectors of one sample that the layer is applied to: words of a sentence, patches."""


@dataclass(frozen=True)
class Architecture:
    """A model as a chain of layers in forward order."""

    name: str
    layers: tuple[ModelLayer, ...]
    batch_size: int
    """Samples a step that `batch_time_s` is stated for."""
    batch_time_s: float
    """Default time of forward and backward of one batch, on the accelerator that `device` names."""
    device: str = "a slow GPU"
    forward_share: float = 1 / 3
    """Forward's part of the batch time; backward computes two gradients for each product of
    forward, or one where weights are frozen."""

    @property
    def parameters(self) -> tuple[ParameterShape, ...]:
        """All parameters in forward order."""
        return tuple(parameter for layer in self.layers for parameter in layer.parameters)

    @property
    def numel(self) -> int:
        """Number of parameters of the whole model."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def operations(self) -> int:
        """Floating-point operations of one sample's forward."""
        return sum(layer.operations for layer in self.layers)


@dataclass(frozen=True)
class FeatureMap:
    """Shape of the activations of one sample between two layers."""

    channels: int
    height: int
    width: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.channels * self.height * self.width

    def pooled(self, kernel: int, stride: int, padding: int = 0) -> FeatureMap:
        """Return the shape after pooling with a square kernel."""
        return FeatureMap(
            self.channels,
            output_size(self.height, kernel, stride, padding),
            output_size(self.width, kernel, stride, padding),
        )


def output_size(size: int, kernel: int, stride: int, padding: int) -> int:
    """Return the length of a spatial dimension after a convolution or pooling (rounded down)."""
    return (size + 2 * padding - kernel) // stride + 1


class LayerList:
    """Collects layers in forward order while it follows the shape of the activations."""

    def __init__(self) -> None:
        self.layers: list[ModelLayer] = []

    def add(
        self, name: str, operations: int, kind: str, positions: int = 1, **shapes: tuple[int, ...]
    ) -> None:
        """Append a layer whose parameters are given as keyword arguments, in order."""
        parameters = tuple(ParameterShape(f"{name}.{key}", shape) for key, shape in shapes.items())
        self.layers.append(ModelLayer(name, parameters, operations, kind, positions))

    def convolution(
        self,
        name: str,
        source: FeatureMap,
        channels: int,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
        bias: bool = False,
    ) -> FeatureMap:
        """Append a two-dimensional convolution and return the shape of its output."""
        kernel_height, kernel_width = (kernel, kernel) if isinstance(kernel, int) else kernel
        pad_height, pad_width = (padding, padding) if isinstance(padding, int) else padding
        target = FeatureMap(
            channels,
            output_size(source.height, kernel_height, stride, pad_height),
            output_size(source.width, kernel_width, stride, pad_width),
        )
        weight = (channels, source.channels, kernel_height, kernel_width)
        operations = 2 * target.numel * source.channels * kernel_height * kernel_width
        if bias:
            operations += target.numel
            self.add(name, operations, "Conv2d", weight=weight, bias=(channels,))
        else:
            self.add(name, operations, "Conv2d", weight=weight)
        return target

    def batch_norm(self, name: str, source: FeatureMap) -> FeatureMap:
        """Append a batch normalization with scale and shift, which keeps the shape."""
        size = (source.channels,)
        operations = NORM_OPERATIONS_PER_ELEMENT * source.numel
        self.add(name, operations, "BatchNorm2d", weight=size, bias=size)
        return source

    def linear(
        self,
        name: str,
        inputs: int,
        outputs: int,
        *,
        positions: int = 1,
        bias: bool = True,
        more_operations: int = 0,
    ) -> None:
        """Append a fully connected layer that is applied at each of `positions` positions.

        `more_operations` are those of what comes before it and owns no parameters, such as
        attention before its output projection.
        """
        operations = positions * 2 * inputs * outputs + more_operations
        weight = (outputs, inputs)
        if bias:
            operations += positions * outputs
            self.add(name, operations, "Linear", positions, weight=weight, bias=(outputs,))
        else:
            self.add(name, operations, "Linear", positions, weight=weight)

    def layer_norm(
        self, name: str, width: int, *, positions: int, more_operations: int = 0
    ) -> None:
        """Append a normalization of vectors with scale and shift."""
        operations = positions * NORM_OPERATIONS_PER_ELEMENT * width + more_operations
        self.add(name, operations, "LayerNorm", positions, weight=(width,), bias=(width,))

    def embedding(self, name: str, words: int, width: int, *, positions: int) -> None:
        """Append a table of vectors, of which each position copies one: it multiplies nothing."""
        self.add(name, positions * width, "Embedding", positions, weight=(words, width))
