"""Registered arrays, and the memory of pushed ones that the core may use.

An array on the host whose elements lie one after the other is lent as it is, and its mean lands in
it. One that may not be written, or cannot say, is copied once; its mean lands in the copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np

from gradlane.errors import ArrayRefusedError
from gradlane.training.arrays.dlpack import HOST_DEVICES, DlpackView, device_name, read_dlpack
from gradlane.training.options.codec_choice import CodedTensor

HostArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]
"""An array of NumPy's, of any shape and dtype."""

_CORE_DTYPES = {
    "float32": ("f32", 1, 4),
    "float16": ("f16", 1, 2),
    "bfloat16": ("bf16", 1, 2),
    "float64": ("f64", 1, 8),
    "complex64": ("f32", 2, 8),
    "complex128": ("f64", 2, 16),
}
"""How elements are averaged, how many numbers one is, and its bytes."""


@dataclass(frozen=True)
class Slot:
    """One registered array.

    Attributes:
        name: the user's.
        shape: sizes of its dimensions; row-major.
        dtype: as NumPy names it.
        position: where the forward pass needs it; smaller is sooner.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    position: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * _CORE_DTYPES[self.dtype][2]

    def row(self) -> dict[str, Any]:
        """Return what ranks compare; JSON-serializable."""
        strides = [prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        return {
            "name": self.name,
            "numel": self.numel,
            "dtype": self.dtype,
            "role": "parameter",
            "shape": list(self.shape),
            "stride": strides,
        }

    def plan_row(self) -> dict[str, Any]:
        """Return the slot in the plan's terms."""
        dtype, lanes, _ = _CORE_DTYPES[self.dtype]
        return {
            "name": self.name,
            "numel": self.numel * lanes,
            "dtype": dtype,
            "role": "parameter",
        }

    def coded(self) -> CodedTensor:
        """Return the slot as codecs see it; complex numbers are pairs."""
        dtype, lanes, _ = _CORE_DTYPES[self.dtype]
        return CodedTensor(self.name, dtype, self.shape + ((2,) if lanes == 2 else ()))

    def empty(self) -> HostArray:
        """Return memory of its own for a result.

        Raises:
            ArrayRefusedError: NumPy does not know the dtype.
        """
        return np.empty(self.shape, dtype=_numpy_dtype(self))


@dataclass(frozen=True)
class Loan:
    """Memory that the core uses until the result is there.

    Attributes:
        pointer: address of the first element.
        nbytes: size.
        result: the user's array once the mean has landed.
        owner: the object that owns the memory.
    """

    pointer: int
    nbytes: int
    result: Any
    owner: object


def make_slot(name: str, shape: Sequence[int], dtype: Any, position: int) -> Slot:
    """Check what is to be registered.

    Args:
        name: not empty.
        shape: sizes of the dimensions; at least one element in all.
        dtype: a NumPy dtype or scalar type, a torch or JAX dtype, or a name.
        position: where the forward pass needs it.

    Raises:
        ArrayRefusedError: there is nothing to average, or the dtype cannot be averaged.
    """
    if not isinstance(name, str) or not name:
        raise ArrayRefusedError(
            f"an array is registered under the name {name!r}: give a text", "name"
        )
    sizes = tuple(int(size) for size in shape)
    if prod(sizes) < 1 or min(sizes, default=1) < 0:
        raise ArrayRefusedError(
            f"array {name!r} has shape {sizes}, which has no elements: leave it out", "shape"
        )
    known = dtype_name(dtype)
    if known not in _CORE_DTYPES:
        raise ArrayRefusedError(
            f"array {name!r} has dtype {known}, which cannot be averaged; supported are "
            f"{', '.join(_CORE_DTYPES)}",
            "dtype",
        )
    return Slot(name, sizes, known, int(position))


def dtype_name(dtype: Any) -> str:
    """Return a dtype of NumPy, torch or JAX, or the name of one, as NumPy names it."""
    text = str(dtype).removeprefix("torch.")
    if text in _CORE_DTYPES:
        return text
    try:
        return str(np.dtype(dtype).name)
    except TypeError:
        return text


def borrow(slot: Slot, array: Any) -> Loan:
    """Return the memory of an array that is pushed, or of a copy where it may not be written.

    Raises:
        ArrayRefusedError: shape, dtype, layout or device are not as registered; nothing was sent.
    """
    if isinstance(array, np.ndarray):
        return _borrow_numpy(slot, array)
    if not hasattr(array, "__dlpack__") or not hasattr(array, "__dlpack_device__"):
        raise ArrayRefusedError(
            f"array {slot.name!r} is a {type(array).__name__}, which is neither NumPy's nor "
            "speaks DLPack (__dlpack__): convert it, for example with numpy.asarray",
            "type",
        )
    device = array.__dlpack_device__()
    if int(device[0]) not in HOST_DEVICES:
        raise ArrayRefusedError(
            f"array {slot.name!r} is on {device_name(device)}, and arrays are sent from the "
            "host's memory: copy it there first",
            "device",
        )
    try:
        view = read_dlpack(array)
    except (BufferError, RuntimeError, ValueError) as error:
        raise ArrayRefusedError(
            f"array {slot.name!r} ({type(array).__name__}) cannot be read through DLPack: {error}",
            "type",
        ) from error
    _check(slot, view.shape, view.dtype, _is_row_major(view.shape, view.strides))
    if view.writable:
        return Loan(view.pointer, slot.nbytes, array, view.capsule)
    return _lend(_copied(slot, view))


def landing(slot: Slot) -> Loan:
    """Return memory for a result where this rank has nothing to contribute."""
    return _lend(slot.empty())


def scratch(slot: Slot) -> Loan:
    """Return memory for a result that nobody looks at."""
    return _lend(np.empty(slot.nbytes, dtype=np.uint8))


def _borrow_numpy(slot: Slot, array: HostArray) -> Loan:
    _check(slot, array.shape, dtype_name(array.dtype), array.flags.c_contiguous)
    if not array.dtype.isnative:
        raise ArrayRefusedError(
            f"array {slot.name!r} has the other byte order: convert it with "
            "array.astype(array.dtype.newbyteorder('='))",
            "dtype",
        )
    return _lend(array if array.flags.writeable and array.flags.aligned else array.copy())


def _lend(array: HostArray) -> Loan:
    return Loan(array.ctypes.data, array.nbytes, array, array)


def _copied(slot: Slot, view: DlpackView) -> HostArray:
    copy = slot.empty()
    ctypes.memmove(copy.ctypes.data, view.pointer, slot.nbytes)
    return copy


def _check(slot: Slot, shape: tuple[int, ...], dtype: str, row_major: bool) -> None:
    if tuple(shape) != slot.shape:
        raise ArrayRefusedError(
            f"array {slot.name!r} has shape {tuple(shape)}, and was registered as {slot.shape}",
            "shape",
        )
    if dtype != slot.dtype:
        raise ArrayRefusedError(
            f"array {slot.name!r} has dtype {dtype}, and was registered as {slot.dtype}", "dtype"
        )
    if not row_major:
        raise ArrayRefusedError(
            f"array {slot.name!r} is not contiguous in row-major order, so that it cannot be sent "
            "from where it is: push numpy.ascontiguousarray(array)",
            "layout",
        )


def _is_row_major(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> bool:
    if strides is None:
        return True
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _numpy_dtype(slot: Slot) -> np.dtype[Any]:
    dtype: Any = slot.dtype
    if slot.dtype == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise ArrayRefusedError(
                f"array {slot.name!r} is of dtype bfloat16 and needs memory of its own here, and "
                "NumPy has no such dtype without the package ml_dtypes: install it, or push "
                "arrays that may be written",
                "dtype",
            ) from None
        dtype = ml_dtypes.bfloat16
    found: np.dtype[Any] = np.dtype(dtype)
    return found
