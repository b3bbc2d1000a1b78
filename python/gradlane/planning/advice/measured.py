"""A step that was measured beside the simulated one: whether the link's rate can explain it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gradlane.formats.rates import format_rate

CLOSE = 1.15
"""How many times apart two steps are that count as the same."""
SLOWEST_BPS, FASTEST_BPS = 1e5, 1e14
"""Rates between which one is looked for."""
NARROW = 1.02
"""How many times apart the two rates are at which looking ends."""
IMPLAUSIBLE = 50.0
"""How many times slower than its name no link is."""

SINGLE, EXPLAINED, SLOWER_LINK, FASTER_LINK, NOT_BANDWIDTH = (
    "no slower than alone",
    "explained",
    "slower link",
    "faster link",
    "not bandwidth",
)


@dataclass(frozen=True)
class MeasuredStep:
    """What a measured step says about the link."""

    strategy: str
    measured_s: float
    single_s: float
    """A step on one machine."""
    predicted_s: float
    """At the rate that was given."""
    rate_bps: float | None
    """The rate at which the simulated step is as long as the measured one; None: there is none."""
    verdict: str
    """`no slower than alone`, `explained` (by the rate that was given), `slower link`,
    `faster link` or `not bandwidth`."""
    text: str

    def to_json(self) -> dict[str, Any]:
        """Return the fields with the units in their keys."""
        return dict(vars(self))


def explain_step(
    measured_s: float,
    *,
    single_s: float,
    rate_bps: float,
    strategy: str,
    step_at: Callable[[float], float],
) -> MeasuredStep:
    """Find the rate that would explain a measured step.

    Args:
        measured_s: seconds of a step on the cluster.
        single_s: seconds of a step on one machine.
        rate_bps: what the link is said to carry.
        strategy: of the simulated steps.
        step_at: simulates the step over a link of some rate; no longer over a faster one.

    Returns:
        The rate, and whether that can be what the link carries.
    """
    predicted_s = step_at(rate_bps)
    found = None
    if measured_s <= CLOSE * single_s and predicted_s <= CLOSE * single_s:
        verdict = SINGLE
    elif predicted_s / CLOSE <= measured_s <= predicted_s * CLOSE:
        verdict, found = EXPLAINED, rate_bps
    else:
        found = _rate_of(measured_s, step_at)
        if found is None or found * IMPLAUSIBLE < rate_bps:
            verdict = NOT_BANDWIDTH
        else:
            verdict = SLOWER_LINK if found < rate_bps else FASTER_LINK
    text = _text(measured_s, single_s, predicted_s, rate_bps, found, verdict, strategy)
    return MeasuredStep(strategy, measured_s, single_s, predicted_s, found, verdict, text)


def _rate_of(measured_s: float, step_at: Callable[[float], float]) -> float | None:
    """Return the rate of a step's length, between rates whose steps enclose it."""
    slow, fast = SLOWEST_BPS, FASTEST_BPS
    if not step_at(fast) < measured_s <= step_at(slow):
        return None
    while fast / slow > NARROW:
        middle = math.sqrt(slow * fast)
        if step_at(middle) > measured_s:
            slow = middle
        else:
            fast = middle
    return math.sqrt(slow * fast)


def _text(
    measured_s: float,
    single_s: float,
    predicted_s: float,
    rate_bps: float,
    found: float | None,
    verdict: str,
    strategy: str,
) -> str:
    rate = format_rate(rate_bps)
    beside = (
        f"Measured {_time(measured_s)} a step, {_time(single_s)} on one machine; at {rate} "
        f"{strategy} would take {_time(predicted_s)}."
    )
    if verdict == SINGLE:
        return f"{beside} The network costs nothing that could be seen."
    if verdict == EXPLAINED:
        return f"{beside} The link explains it."
    if found is None:
        link = "faster than any link would make it" if measured_s < predicted_s else "slower"
        return (
            f"{beside} Not bandwidth: no link explains it, the step is {link}; look at data "
            "loading, processors and the batch on each rank."
        )
    would = f"A link of {format_rate(found)} would explain it"
    if verdict == NOT_BANDWIDTH:
        return (
            f"{beside} Not bandwidth: only a link of {format_rate(found)} would explain it, "
            f"{rate_bps / found:.0f} times slower than it is called; look at data loading, "
            "processors, latency and evaluation between steps."
        )
    if verdict == FASTER_LINK:
        return (
            f"{beside} {would}, or fewer bytes: 16-bit gradients, or several batches between two "
            "exchanges."
        )
    return (
        f"{beside} {would}: measure it with `gradlane probe`. If it carries that, it is the "
        f"network; if it carries {rate}, it is not bandwidth."
    )


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1.0 else f"{seconds * 1e3:.0f} ms"
