"""Read the description of an array in a DLPack capsule, without consuming it.

The capsule is not consumed: a reference to it keeps the memory alive, and when it goes, its own
destructor gives the memory back. Follows dlpack.h, version 1.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

_MAJOR = 1
_READ_ONLY, _IS_COPIED = 1, 2
_CPU, _CUDA_HOST, _ROCM_HOST = 1, 3, 11
HOST_DEVICES = (_CPU, _CUDA_HOST, _ROCM_HOST)
"""Device types whose memory the processor reads like its own: plain, and pinned for a device."""
_DEVICES = {2: "a CUDA device", 7: "a Vulkan device", 8: "a Metal device", 10: "a ROCm device"}
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


@dataclass(frozen=True)
class DlpackView:
    """The description in a capsule.

    Attributes:
        pointer: address of the first element.
        shape: sizes of the dimensions.
        strides: in elements; None: row-major without gaps.
        dtype: as NumPy names it, such as `float32` or `bfloat16`.
        writable: whether a result may be written there: only a capsule of version 1 can say so.
        capsule: keeps the memory alive.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str
    writable: bool
    capsule: object


def device_name(device: tuple[int, int]) -> str:
    """Return what `__dlpack_device__` said, in words."""
    kind, number = int(device[0]), int(device[1])
    return f"{_DEVICES.get(kind, f'a device of DLPack type {kind}')} (number {number})"


def read_dlpack(array: Any) -> DlpackView:
    """Ask an array on the host for a capsule and read it.

    Args:
        array: has `__dlpack__`; its device is one of `HOST_DEVICES`.

    Raises:
        BufferError: the array cannot be exported, or in a form that is unknown here.
    """
    try:
        capsule = array.__dlpack__(max_version=(_MAJOR, 0))
    except TypeError:
        # Exporters of before DLPack 1.0 know no versions.
        capsule = array.__dlpack__()
    address = _address(capsule, b"dltensor_versioned")
    if address:
        versioned = _Versioned.from_address(address)
        if versioned.major != _MAJOR:
            raise BufferError(f"its DLPack capsule is of version {versioned.major}, not {_MAJOR}")
        writable = not versioned.flags & (_READ_ONLY | _IS_COPIED)
        return _view(versioned.tensor, writable, capsule)
    address = _address(capsule, b"dltensor")
    if not address:
        raise BufferError(f"__dlpack__ returned {capsule!r}, which is no DLPack capsule")
    return _view(_Tensor.from_address(address), False, capsule)


def _view(tensor: _Tensor, writable: bool, capsule: object) -> DlpackView:
    if tensor.lanes != 1:
        raise BufferError(f"its elements are vectors of {tensor.lanes} numbers")
    ndim = tensor.ndim
    return DlpackView(
        pointer=(tensor.data or 0) + tensor.byte_offset,
        shape=tuple(tensor.shape[:ndim]),
        strides=tuple(tensor.strides[:ndim]) if tensor.strides else None,
        dtype=f"{_KINDS.get(tensor.code, f'code{tensor.code}_')}{tensor.bits}",
        writable=writable,
        capsule=capsule,
    )


def _address(capsule: object, name: bytes) -> int:
    """Return the address that a capsule holds under a name; 0 if it is no capsule of that name."""
    if not _IS_VALID(capsule, name):
        return 0
    return _POINTER(capsule, name) or 0


_IS_VALID = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_POINTER = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
