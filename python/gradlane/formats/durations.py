"""Lengths of time as text."""

from __future__ import annotations

import re

_DURATION = re.compile(r"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(s|ms|us)?")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def parse_duration_s(text: str) -> float:
    """Return seconds for texts such as `0.5s`, `20ms` or `100us`.

    Raises:
        ValueError: the text is no length of time, or has no unit.
    """
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is no length of time: write for example 0.5s or 20ms")
    if match[2] is None:
        raise ValueError(
            f"{text!r} has no unit: {match[1]}s for seconds, {match[1]}ms for thousandths of one"
        )
    return float(match[1]) * _SECONDS[match[2]]
