"""Checks of the lab's numeric options."""

from __future__ import annotations

from collections.abc import Iterable


def check_ranges(ranges: Iterable[tuple[str, float, float, float]]) -> None:
    """Refuse options that are out of range.

    Args:
        ranges: name, value, least and most of each option.

    Raises:
        ValueError: an option is out of its range; the message names it.
    """
    for name, value, least, most in ranges:
        if not least <= value <= most:
            raise ValueError(f"{name} is {value}, but must be {least} to {most}")
