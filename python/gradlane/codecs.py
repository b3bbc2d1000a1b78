"""Codecs for torch tensors and NumPy arrays: a thin, typed surface over the compiled kernels.

A codec encodes contiguous f32 values on the CPU. It keeps no state: residuals and the place of the
values are the caller's, as in `gradlane.ddp`. What each codec does, and the layout of its bytes,
is in `docs/codecs.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gradlane.training.core import load_codecs

if TYPE_CHECKING:
    import torch

BROADCAST = -1
"""The leg of what an owner sends to all ranks; other legs are the ranks of workers."""

Array: TypeAlias = "torch.Tensor | npt.NDArray[Any]"
"""A torch tensor on the CPU or a NumPy array, contiguous."""


class Codec:
    """An encoding of gradients, such as `Codec("qsgd:bits=4")`.

    Args:
        spec: name and options: `f32`, `bf16`, `f16`, `onebit`, `qsgd:bits=4`, `int8`,
            `topk:ratio=0.001`, `dgc:ratio=0.001,momentum=0.9`, ...
        shape: sizes of the tensor in the order of its storage, where the codec depends on them
            (`onebit` by columns).

    Raises:
        ValueError: the text names no codec; the message says what would do.
    """

    def __init__(self, spec: str, shape: Sequence[int] = ()) -> None:
        self._codec = load_codecs().Codec(spec, list(shape))
        self.spec: str = self._codec.spec
        """The canonical text."""
        self.granule: int = self._codec.granule
        """Parts of a tensor begin at multiples of so many elements."""
        self.is_fixed_size: bool = self._codec.is_fixed_size
        """Whether the length of an encoding depends on the number of elements alone."""
        self.is_unbiased: bool = self._codec.is_unbiased
        """Whether the expectation of what is decoded is the value."""
        self.residual_width: int = self._codec.residual_width
        """f32 numbers that a residual has for each value; 0 where none is kept."""

    def __repr__(self) -> str:
        return f"Codec({self.spec!r})"

    @property
    def name(self) -> str:
        """The name without options."""
        return self.spec.partition(":")[0]

    def wire_bytes_max(self, elements: int, *, step: int = 0, leg: int = 0) -> int:
        """Return the most bytes that so many values take; exact where the size is fixed."""
        return self._codec.max_wire_bytes((0, step, 0, leg, 0), elements)

    def encode(
        self,
        values: Array,
        *,
        residual: Array | None = None,
        seed: int = 0,
        step: int = 0,
        tensor: int = 0,
        leg: int = 0,
        first_element: int = 0,
    ) -> Array:
        """Encode values.

        Args:
            values: f32, contiguous, of any shape.
            residual: what earlier steps did not send, f32, `residual_width` numbers for each value,
                zeros at first; it is added before encoding and replaced by what is not sent now.
            seed: of the job: draws of stochastic codecs depend on it and on the place that follows.
            step: number of the step.
            tensor: number of the tensor.
            leg: rank of the worker, or `BROADCAST`.
            first_element: position in its tensor of the first value.

        Returns:
            The bytes, uint8, of the kind that `values` are.

        Raises:
            ValueError: memory of another kind, or lengths that do not match.
        """
        draw_key = (seed, step, tensor, leg, first_element)
        wire = np.empty(self._codec.max_wire_bytes(draw_key, _length(values)), dtype=np.uint8)
        return _like(values, wire[: self._encode(draw_key, values, residual, wire)])

    def encode_into(
        self,
        values: Array,
        wire: Array,
        *,
        residual: Array | None = None,
        seed: int = 0,
        step: int = 0,
        tensor: int = 0,
        leg: int = 0,
        first_element: int = 0,
    ) -> int:
        """Encode values to the front of a buffer of bytes, and return how many bytes that took.

        Raises:
            ValueError: the buffer is shorter than `wire_bytes_max`, or as for `encode`.
        """
        return self._encode((seed, step, tensor, leg, first_element), values, residual, wire)

    def _encode(
        self,
        draw_key: tuple[int, int, int, int, int],
        values: Array,
        residual: Array | None,
        wire: Array,
    ) -> int:
        residual_memory = (0, 0) if residual is None else _floats(residual, "the residual")
        return self._codec.encode(
            draw_key, _floats(values, "the values"), residual_memory, _bytes(wire)
        )

    def decode(self, wire: Array, elements: int) -> Array:
        """Decode bytes into so many values, f32, of the kind that `wire` is.

        Raises:
            ValueError: the bytes are no encoding of so many values.
        """
        values = np.empty(elements, dtype=np.float32)
        self.decode_into(wire, values)
        return _like(wire, values)

    def decode_into(self, wire: Array, values: Array) -> None:
        """Decode bytes into values that are there, f32.

        Raises:
            ValueError: as for `decode`.
        """
        self._codec.decode(_bytes(wire), _floats(values, "the values"))

    def decode_add(self, wire: Array, values: Array) -> None:
        """Decode bytes and add them to values, f32.

        Raises:
            ValueError: as for `decode`.
        """
        self._codec.decode_add(_bytes(wire), _floats(values, "the values"))


def _length(values: Array) -> int:
    return int(values.size) if isinstance(values, np.ndarray) else values.numel()


def _like(model: Array, array: npt.NDArray[Any]) -> Array:
    if isinstance(model, np.ndarray):
        return array
    import torch

    return torch.from_numpy(array)


def _floats(values: Array, label: str) -> tuple[int, int]:
    """Return address and number of f32 values."""
    return _address(values, np.float32, "float32", label), _length(values)


def _bytes(wire: Array) -> tuple[int, int]:
    """Return address and number of bytes."""
    return _address(wire, np.uint8, "uint8", "the encoded bytes"), _length(wire)


def _address(values: Array, dtype: type[Any], name: str, label: str) -> int:
    if isinstance(values, np.ndarray):
        if values.dtype != dtype or not values.flags.c_contiguous:
            raise ValueError(f"{label} must be a contiguous array of {name}, not {values.dtype}")
        return int(values.ctypes.data)
    if str(values.dtype) != f"torch.{name}" or not values.is_contiguous():
        raise ValueError(f"{label} must be a contiguous tensor of {name}, not {values.dtype}")
    if values.device.type != "cpu":
        raise ValueError(f"{label} are on {values.device}; codecs run on the CPU")
    return values.data_ptr()
