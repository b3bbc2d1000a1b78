"""Lengths of time as text."""

from __future__ import annotations

import re

_DURATION = re.compile(r"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(us|ms|s|min|h|d)?")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration_s(text: str) -> float:
    """Return seconds for texts such as `100us`, `20ms`, `0.5s`, `10min`, `6h` or `30d`.

    Raises:
        ValueError: the text is no length of time, or has no unit.
    """
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is no length of time: write for example 0.5s, 20ms or 6h")
    if match[2] is None:
        raise ValueError(
            f"{text!r} has no unit: {match[1]}s for seconds, {match[1]}ms for thousandths of one, "
            f"{match[1]}min, {match[1]}h, {match[1]}d"
        )
    return float(match[1]) * _SECONDS[match[2]]


def format_duration_s(seconds: float) -> str:
    """Return a length of time in its largest unit of which there is one, as `1.5 h`; 0 as `0 s`."""
    if not seconds:
        return "0 s"
    fitting = [unit for unit, size in _SECONDS.items() if seconds >= size] or ["us"]
    return f"{seconds / _SECONDS[fitting[-1]]:.3g} {fitting[-1]}"
