"""What is said of a step that is about to begin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gradlane.training.model.rank_status import RankStatus
from gradlane.training.modules.forward_order import ForwardOrder


@dataclass
class StepStart:
    """Says how a step begins; the stages fill it.

    Attributes:
        last_step: number of the training step before.
        wait_for_weighting: returns the number of ranks over the samples of all, once it is known.
        shadow: this rank goes along without data.
        passes: this rank takes no part in it.
        status: tells all ranks how this one trains; None: they are told nothing.
        weight: factor of this rank's gradients, or None.
        measures: the norm of all gradients will be asked for, on all ranks.
        settings: hyper-parameters for updates on the servers, as JSON.
        order: in which a forward has used the tensors, for all ranks to send in, or None.
    """

    last_step: int
    wait_for_weighting: Callable[[], float]
    shadow: bool = False
    passes: bool = False
    status: RankStatus | None = None
    weight: int | None = None
    measures: bool = False
    settings: str | None = None
    order: ForwardOrder | None = None
