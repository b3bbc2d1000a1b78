"""The codecs of sessions as objects, such as `TopK(ratio=0.01)`, and codecs by themselves: `Codec`.

`gradlane.init(codec=gradlane.codecs.Qsgd(bits=8))` is `codec="qsgd:bits=8"`. `Codec` encodes torch
tensors and NumPy arrays, contiguous f32 values on the CPU. It has no state: residuals and the
position of the values are the caller's, as in `gradlane.ddp`. `docs/codecs.md` describes each codec
and its bytes. Its arithmetic is in Rust: a new codec goes into `crates/gradlane-codec/src/encode/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gradlane.errors import RefusedError
from gradlane.training.core import load_codecs
from gradlane.training.options.codec_choice import local_clip
from gradlane.training.options.codec_options import (
    F16,
    Bf16,
    CodecOptions,
    Dgc,
    Fp8,
    Int8,
    OneBit,
    Qsgd,
    TopK,
    codec_text,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "BROADCAST",
    "F16",
    "Array",
    "Bf16",
    "Codec",
    "CodecOptions",
    "Dgc",
    "Fp8",
    "Int8",
    "OneBit",
    "Qsgd",
    "TopK",
]

BROADCAST = -1
"""The leg from an owner to all ranks; other legs are the ranks of workers."""

Array: TypeAlias = "torch.Tensor | npt.NDArray[Any]"
"""A torch tensor on the CPU or a NumPy array, contiguous."""


class Codec:
    """An encoding of gradients, such as `Codec("qsgd:bits=4")`.

    Args:
        spec: the codec, as an object such as `Qsgd(bits=4)`, or its text: `f32`, `bf16`, `f16`,
            `onebit`, `qsgd:bits=4`, `int8`, `fp8`, `topk:ratio=0.001`,
            `dgc:ratio=0.001,momentum=0.9`.
        shape: sizes of the tensor in storage order, if the codec depends on them
            (`onebit` by columns).

    Raises:
        ValueError: the text names no codec, and the message lists valid ones; or it has `clip`,
            which sessions and DDP's hook apply to all gradients together.
    """

    def __init__(self, spec: str | CodecOptions, shape: Sequence[int] = ()) -> None:
        spec = codec_text(spec)
        self._codec = load_codecs().Codec(spec, list(shape))
        if local_clip(spec):
            raise RefusedError(
                f"codec {spec!r} by itself clips nothing: the norm is that of all gradients of a "
                "rank, of which it sees a part; leave clip out and scale the gradients before"
            )
        self.spec: str = self._codec.spec
        """The canonical text."""
        self.granule: int = self._codec.granule
        """Number of elements whose multiples may begin a part of a tensor."""
        self.is_fixed_size: bool = self._codec.is_fixed_size
        """True if the length of an encoding depends on the number of elements alone."""
        self.is_unbiased: bool = self._codec.is_unbiased
        """True if the expectation of a decoded value is the value."""
        self.residual_width: int = self._codec.residual_width
        """f32 numbers of a residual for each value; 0: the codec keeps none."""

    def __repr__(self) -> str:
        return f"Codec({self.spec!r})"

    @property
    def name(self) -> str:
        """The name without options."""
        return self.spec.partition(":")[0]

    def wire_bytes_max(self, elements: int, *, step: int = 0, leg: int = 0) -> int:
        """Return the largest encoded size of so many values; exact for a fixed-size codec."""
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
            residual: unsent parts of earlier steps, f32, `residual_width` numbers for each value,
                zeros at first; it is added before encoding and replaced by the new unsent part.
            seed: of the job; draws of stochastic codecs depend on it and on the arguments below.
            step: number of the step.
            tensor: number of the tensor.
            leg: rank of the worker, or `BROADCAST`.
            first_element: position in its tensor of the first value.

        Returns:
            The bytes, uint8, an array of the kind of `values`.

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
        """Encode values to the front of a byte buffer, and return the number of bytes.

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
        """Decode bytes into so many f32 values, an array of the kind of `wire`.

        Raises:
            ValueError: the bytes are no encoding of so many values.
        """
        values = np.empty(elements, dtype=np.float32)
        self.decode_into(wire, values)
        return _like(wire, values)

    def decode_into(self, wire: Array, values: Array) -> None:
        """Decode bytes into existing f32 values.

        Raises:
            ValueError: as for `decode`.
        """
        self._codec.decode(_bytes(wire), _floats(values, "the values"))

    def decode_add(self, wire: Array, values: Array) -> None:
        """Decode bytes and add them to existing f32 values.

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
            raise RefusedError(f"{label} must be a contiguous array of {name}, not {values.dtype}")
        return int(values.ctypes.data)
    if str(values.dtype) != f"torch.{name}" or not values.is_contiguous():
        raise RefusedError(f"{label} must be a contiguous tensor of {name}, not {values.dtype}")
    if values.device.type != "cpu":
        raise RefusedError(f"{label} are on {values.device}; codecs run on the CPU")
    return values.data_ptr()
