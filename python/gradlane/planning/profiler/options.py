"""The options of a recording, as `gradlane profile` takes them."""

from __future__ import annotations

from dataclasses import dataclass

from gradlane.training.options.option_fields import check_options, option, read_int

WARMUP_MIN = 2
"""Least number of steps before the recorded ones; they find the model."""
STEPS_MAX = 200
"""Most steps that are kept; older ones are dropped."""


@dataclass(frozen=True)
class RecordingOptions:
    """Which steps of a script are recorded."""

    steps: int = option(30, "Recorded steps.", least=1, most=STEPS_MAX)
    warmup: int = option(5, "Steps before them.", least=WARMUP_MIN)
    run_to_end: bool = option(False, "Let the script go on after the last step.", name="to_the_end")
    batch_size: int | None = option(
        None, "Samples in a step, where the model's inputs do not tell.", read=read_int
    )

    def __post_init__(self) -> None:
        """Raise `ValueError` for an option that is out of its range."""
        check_options(self)
