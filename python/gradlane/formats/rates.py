"""Link rates as text, to and from bits a second.

Prefixes are decimal, as network equipment uses them: 1 gbit is 1,000,000,000 bits a second.
"""

from __future__ import annotations

import re

_PREFIX_BITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_RATE = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgt]?)(bit(?:/s|ps)?|bps)?")
_LEAST_WITHOUT_UNIT = 10**6
"""A smaller number without a unit is one whose unit was forgotten."""


def parse_rate(text: str) -> int:
    """Return bits a second for texts such as `4gbit`, `500mbit`, `10g`, `2.5 Gbit/s`, `1000000000`.

    Raises:
        ValueError: the text is not a positive rate, or a small number without a unit.
    """
    match = _RATE.fullmatch(text.strip().lower())
    rate_bps = int(float(match[1]) * _PREFIX_BITS[match[2]]) if match else 0
    if match and not match[2] and not match[3] and 0 < float(match[1]) < _LEAST_WITHOUT_UNIT:
        raise ValueError(
            f"{text!r} has no unit: {match[1]}gbit for 10^9 bits a second, {match[1]}mbit for 10^6"
        )
    if rate_bps <= 0:
        raise ValueError(
            f"{text!r} is not a rate: write for example 4gbit, 500mbit, 10g, or bits a second"
        )
    return rate_bps


def format_rate(rate_bps: float) -> str:
    """Return a short text for a rate in bits a second, such as `2.5 Gbit/s`."""
    for prefix, bits in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if rate_bps >= bits:
            return f"{rate_bps / bits:.4g} {prefix}bit/s"
    return f"{rate_bps:.4g} bit/s"
