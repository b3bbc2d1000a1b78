"""Curves of loss and accuracy in a run of the study, and the steps of their evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from gradlane_papers.accuracy.tasks import Task

EVALUATIONS = 11
"""Evaluations of a run, with the one before the first step."""


@dataclass
class TrainingCurve:
    """Loss and accuracy of a run.

    Attributes:
        evaluated: numbers of steps that were taken before each evaluation.
        loss: on held-out samples, nats.
        accuracy: on held-out samples, 0 to 1.
        wire_bytes: of each step: a worker's encoded gradient and the encoded means.
        uses_exchange: under local updates, whether each step ends with the result of an exchange.
        diverged: whether a loss was no number.
        stale: updates that a gradient is old when it is applied, mean; None where all are new.
    """

    evaluated: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    wire_bytes: list[int] = field(default_factory=list)
    uses_exchange: list[bool] = field(default_factory=list)
    diverged: bool = False
    stale: float | None = None

    def note(self, step: int, task: Task, model: nn.Module) -> None:
        """Evaluate the model after so many steps."""
        loss, accuracy = task.evaluate(model)
        self.evaluated.append(step)
        self.loss.append(loss)
        self.accuracy.append(accuracy)
        self.diverged |= loss != loss


def crossing(xs: Sequence[float], values: Sequence[float], goal: float) -> float | None:
    """Return where a curve first reaches a value, on straight lines; None if it never does.

    Args:
        xs: steps or seconds of the values.
        values: of the curve.
        goal: the value.
    """
    for index, value in enumerate(values):
        if value >= goal:
            if index == 0:
                return float(xs[0])
            share = (goal - values[index - 1]) / (value - values[index - 1])
            return float(xs[index - 1] + share * (xs[index] - xs[index - 1]))
    return None


def evaluation_steps(steps: int) -> list[int]:
    """Return after how many steps a run is evaluated: from 0 to all, evenly spread."""
    return sorted({round(steps * index / (EVALUATIONS - 1)) for index in range(EVALUATIONS)})
