"""State dictionaries as JSON, with tensors taken out and referenced by name.

Values come back equal and of the same type, integer keys, tuples, infinities and the bits of a NaN
included. NumPy's scalars become Python's. Writing refuses a value that could not come back, and
names its path.

In the JSON, `null`, booleans, strings, 64-bit integers, finite numbers and lists stand for
themselves. Every other value is an object with one key, its type: `{"tuple": [...]}`, `{"dict":
[[key, value], ...]}`, `{"tensor": [name, shape, dtype, on_host]}` and so on. A tensor object that a
state holds in several places has the name of the first in all of them, and comes back as one.
"""

from __future__ import annotations

import base64
import binascii
import functools
import math
import re
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradlane.formats.serialization import strict_json
from gradlane.formats.serialization.strict_json import FormatError

DEPTH_MAX = 64
"""Levels of containers in a state."""
_DTYPE_NAMES = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz "
    "float8_e8m0fnu int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex128 complex64 "
    "complex32"
)
DTYPES: dict[str, torch.dtype] = {
    str(getattr(torch, name)): getattr(torch, name)
    for name in _DTYPE_NAMES.split()
    if hasattr(torch, name)
}
"""Dtypes whose tensors can be stored as bytes, by name, as far as this torch has them."""
_DTYPE_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}
_INT_MAX = 1 << 63
_INTEGER = re.compile(r"-?[0-9]+")
_STORABLE_TYPES = (
    "a tensor, a number, a string, bytes, None, or a list, tuple, set or dictionary of them"
)


class UnstorableError(TypeError):
    """A value of a state cannot be stored; the text names its path."""


@dataclass(frozen=True)
class Leaf:
    """A tensor's place in a structure.

    Attributes:
        name: unique in the structure.
        shape: of the tensor.
        dtype: of the tensor.
        on_host: whether the tensor was in the host's memory.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool = True

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def flatten(values: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """Return the JSON structure of a state, and its tensors by name.

    Args:
        values: parts of the state; a path in an error begins with the key of its part.

    Raises:
        UnstorableError: a value cannot be stored; the message has its path.
    """
    tensors = _NamedTensors()
    return _to_tree(values, (), tensors), tensors.by_name


def unflatten(tree: Any, tensor_of: Callable[[Leaf], Any]) -> Any:
    """Return the values of a structure.

    Args:
        tree: from `flatten`; may be untrusted.
        tensor_of: returns the tensor of a leaf.

    Raises:
        FormatError: it is no such structure.
    """
    return _from_tree(tree, tensor_of, 0)


def leaves(tree: Any) -> list[Leaf]:
    """Return the tensors of a structure, in order; one that is in several places once.

    Raises:
        FormatError: it is no structure, or gives one name to different tensors.
    """
    found: list[Leaf] = []
    unflatten(tree, found.append)
    distinct = list(dict.fromkeys(found))
    if len({leaf.name for leaf in distinct}) != len(distinct):
        raise FormatError("its structure gives one name to different tensors")
    return distinct


def to_json(tree: Any) -> bytes:
    """Return a structure as text, after checking that it reads back.

    Raises:
        FormatError: the text does not give the same structure: a defect of this module.
    """
    content = strict_json.dumps(tree)
    read_back = strict_json.loads(content)
    leaves(read_back)
    if read_back != tree:
        raise FormatError("its structure reads back as another one")
    return content


@functools.lru_cache(maxsize=4096)
def _escape_key(key: str) -> str:
    text = key.replace("~", "~0").replace("/", "~1")
    return f"~2{text}" if _INTEGER.fullmatch(text) else text


def tensor_name(path: tuple[Any, ...]) -> str:
    """Return the unique name of the tensor at a path of keys."""
    return "".join(f"/{_key_name(key)}" for key in path)


def _key_name(key: Any) -> str:
    if type(key) is int and -_INT_MAX <= key < _INT_MAX:
        return str(key)
    if type(key) is str:
        return _escape_key(key)
    return "~3" + _escape_key(strict_json.dumps(_to_tree(key, (), None)).decode())


def _format_path(path: tuple[Any, ...]) -> str:
    return str(path[0] if path else "the state") + "".join(f"[{key!r:.60}]" for key in path[1:])


def _unstorable(path: tuple[Any, ...], what: str) -> UnstorableError:
    return UnstorableError(
        f"{_format_path(path)} is {what}, which cannot be stored: keep {_STORABLE_TYPES}"
    )


class _NamedTensors:
    """Tensors of a state; an object that is in several places has the name of the first."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}

    def name(self, value: Tensor, path: tuple[Any, ...]) -> str:
        """Return the name of a tensor that is at a path."""
        name = self._names.setdefault(id(value), tensor_name(path))
        self.by_name.setdefault(name, value)
        return name


def _to_tree(value: Any, path: tuple[Any, ...], tensors: _NamedTensors | None) -> Any:
    """Return the JSON of a value.

    Args:
        value: any.
        path: keys that lead to it.
        tensors: receives the tensors; None: tensors are not allowed, as in hashed values.
    """
    if len(path) > DEPTH_MAX:
        raise _unstorable(path[:4], f"nested deeper than {DEPTH_MAX} levels")
    if isinstance(value, Tensor) and tensors is not None:
        return _tensor_to_tree(value, path, tensors)
    if isinstance(value, np.generic):
        value = _from_numpy(value, path)
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -_INT_MAX <= value < _INT_MAX else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if kind is complex:
        return {"complex": [_to_tree(part, path, None) for part in (value.real, value.imag)]}
    if kind in (bytes, bytearray):
        return {kind.__name__: base64.b64encode(value).decode()}
    if kind is torch.device or (kind is torch.dtype and str(value) in DTYPES):
        return {kind.__name__: str(value)}
    if kind in (list, tuple, torch.Size):
        parts = [_to_tree(one, (*path, index), tensors) for index, one in enumerate(value)]
        return parts if kind is list else {kind.__name__: parts}
    if kind in (set, frozenset):
        parts = [_to_tree(one, (*path, "a member"), None) for one in value]
        return {kind.__name__: sorted(parts, key=strict_json.dumps)}
    if kind in (dict, OrderedDict):
        rows = [
            [_to_tree(key, (*path, "a key"), None), _to_tree(one, (*path, key), tensors)]
            for key, one in value.items()
        ]
        return {kind.__name__: rows}
    raise _unstorable(path, f"a {kind.__module__}.{kind.__qualname__}".replace("builtins.", ""))


def _tensor_to_tree(value: Tensor, path: tuple[Any, ...], tensors: _NamedTensors) -> Any:
    if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise _unstorable(
            path, f"a {type(value).__name__}, a tensor that is more than its elements"
        )
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        raise _unstorable(path, f"a tensor of the layout {value.layout}, or quantized, or nested")
    dtype = _DTYPE_NAME_OF.get(value.dtype)
    if dtype is None or value.is_meta:
        raise _unstorable(path, f"a tensor of {value.dtype} on {value.device}")
    return {"tensor": [tensors.name(value, path), list(value.shape), dtype, value.is_cpu]}


def _from_numpy(value: Any, path: tuple[Any, ...]) -> Any:
    """Return the equal Python scalar of a NumPy scalar."""
    exact = isinstance(value, (np.bool_, np.number, np.str_, np.bytes_))
    plain = value.item() if exact and not isinstance(value, np.timedelta64) else value
    if isinstance(plain, np.generic):
        raise _unstorable(path, f"a numpy.{type(value).__name__}")
    return plain


# ---- back


def _from_tree(tree: Any, tensor_of: Callable[[Leaf], Any], depth: int) -> Any:
    if depth > DEPTH_MAX + 1:
        raise FormatError(f"its structure is nested deeper than {DEPTH_MAX} levels")
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    if isinstance(tree, list):
        return [_from_tree(part, tensor_of, depth + 1) for part in tree]
    if not isinstance(tree, dict) or len(tree) != 1:
        raise FormatError("its structure has an object that is no value")
    ((kind, content),) = tree.items()
    try:
        if kind == "tensor":
            return tensor_of(_leaf(*content))
        if kind in ("dict", "OrderedDict"):
            return _mapping(kind, content, tensor_of, depth)
        if kind in ("tuple", "Size", "set", "frozenset"):
            return _sequence(kind, content, tensor_of, depth)
        return _PLAIN[kind](content)
    except FormatError:
        raise
    except (TypeError, ValueError, KeyError, RuntimeError, struct.error, binascii.Error) as error:
        raise FormatError(f"its structure has a bad {str(kind)[:40]!r} ({error})") from error


def _leaf(name: Any, shape: Any, dtype: Any, on_host: Any) -> Leaf:
    sizes_are_whole = isinstance(shape, list) and all(
        type(size) is int and size >= 0 for size in shape
    )
    if not (isinstance(name, str) and sizes_are_whole and isinstance(on_host, bool)):
        raise FormatError(f"its structure has a bad tensor {str(name)[:80]!r}")
    if dtype not in DTYPES:
        raise FormatError(f"its tensor {name[:80]!r} has the unknown dtype {str(dtype)[:40]}")
    return Leaf(name, tuple(shape), DTYPES[dtype], on_host)


def _mapping(kind: str, rows: Any, tensor_of: Callable[[Leaf], Any], depth: int) -> Any:
    if not isinstance(rows, list):
        raise FormatError("its structure has a dictionary that is no list of pairs")
    found: dict[Any, Any] = OrderedDict() if kind == "OrderedDict" else {}
    for key, part in rows:
        found[_from_tree(key, _no_tensor, depth + 1)] = _from_tree(part, tensor_of, depth + 1)
    if len(found) != len(rows):
        raise FormatError("its structure has a key twice in a dictionary")
    return found


def _sequence(kind: str, content: Any, tensor_of: Callable[[Leaf], Any], depth: int) -> Any:
    if not isinstance(content, list):
        raise FormatError(f"its structure has a {kind} that is no list")
    hashed = kind in ("set", "frozenset")
    parts = [_from_tree(part, _no_tensor if hashed else tensor_of, depth + 1) for part in content]
    made = {"tuple": tuple, "Size": torch.Size, "set": set, "frozenset": frozenset}[kind](parts)
    if len(made) != len(parts):
        raise FormatError(f"its structure has a member twice in a {kind}")
    return made


def _no_tensor(leaf: Leaf) -> Any:
    raise FormatError(f"its structure has the tensor {leaf.name[:80]!r} as a key")


def _float_of(text: str) -> float:
    (value,) = struct.unpack(">d", bytes.fromhex(text))
    return float(value)


def _complex_of(parts: list[Any]) -> complex:
    real, imaginary = (_from_tree(part, _no_tensor, 0) for part in parts)
    return complex(real, imaginary)


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": _float_of,
    "complex": _complex_of,
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "bytearray": lambda text: bytearray(base64.b64decode(text, validate=True)),
    "dtype": lambda text: DTYPES[text],
    "device": lambda text: torch.device(text),
}
