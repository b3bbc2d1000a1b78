"""The options of `gradlane lab calibrate`."""

from __future__ import annotations

from dataclasses import dataclass

from gradlane.formats.rates import parse_rate
from gradlane.training.options.option_fields import check_options, on_command_line, option

FLOAT_BYTES = 4
TENSORS = 10
"""Tensors of equal size that a step exchanges."""


@dataclass(frozen=True)
class CalibrationOptions:
    """The options of a calibration."""

    rate_bps: int = option(
        doc="Rate of every port in each direction.", name="rate", read=parse_rate, text="500mbit"
    )
    megabytes: float = option(
        40.0,
        "Gradients that each rank hands over at once, in 10^6 bytes.",
        least=1,
        most=1_000,
    )
    steps: int = option(2, least=1, most=100)
    """Measured steps of a run."""
    repeat: int = option(3, "Turns of all runs; medians count.", least=1, most=100)
    trials: int = option(40, "Single tensors for the latencies.", least=3, most=10_000)

    def __post_init__(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            ValueError: an option is out of its range; the message names it.
        """
        check_options(self, on_command_line)

    @property
    def tensor_elems(self) -> list[int]:
        """Elements of each tensor that is exchanged."""
        return [round(self.megabytes * 1e6 / FLOAT_BYTES / TENSORS)] * TENSORS
