"""JSON without the extensions and traps of Python's parser.

Text from a file or a peer is refused if it has NaN or Infinity, numbers out of range, a duplicate
key in an object, or nesting that Python cannot parse.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

_INT_DIGITS = 20
"""Digits and sign of a 64-bit integer. Longer ones take quadratic time to parse."""


class FormatError(ValueError):
    """The bytes violate the format; the text names the violation."""


def dumps(value: Any) -> bytes:
    """Return a value of JSON's types as ASCII text."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def loads(content: bytes) -> Any:
    """Parse UTF-8 text.

    Raises:
        FormatError: it is not JSON, or is refused.
    """
    try:
        return json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_object,
            parse_int=_int,
            parse_float=_float,
            parse_constant=_constant,
        )
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(f"its JSON cannot be parsed ({type(error).__name__}: {error})") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise FormatError(f"its JSON has the key {twice[:80]!r} twice in an object")
    return found


def _int(text: str) -> int:
    if len(text) > _INT_DIGITS:
        raise FormatError(f"its JSON has an integer of {len(text)} characters")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise FormatError(f"its JSON has the number {text[:40]}, which is out of range")
    return value


def _constant(text: str) -> NoReturn:
    raise FormatError(f"its JSON has {text}, which JSON does not allow")
