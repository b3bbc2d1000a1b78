"""What is said of a step that is about to begin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gradlane.training.model.rank_status import RankStatus, Statuses


@dataclass
class StepStart:
    """Says how a step begins; the stages fill it.

    Attributes:
        last_step: number of the training step before.
        wait_for_statuses: returns those of all ranks in this step.
        shadow: this rank goes along without data.
        status: tells all ranks how this one trains; None: they are told nothing.
        weight: factor of this rank's gradients, or None.
        measures: the norm of all gradients will be asked for, on all ranks.
        on_channel: called with the channel's number of the step once it has begun there, before
            anything is submitted.
    """

    last_step: int
    wait_for_statuses: Callable[[], Statuses]
    shadow: bool = False
    status: RankStatus | None = None
    weight: int | None = None
    measures: bool = False
    on_channel: list[Callable[[int], None]] = field(default_factory=list)
