"""The stages of one model, in their order."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradlane.training.model.stages.stage import StepStage

_MOMENTS = tuple(
    name for name, value in vars(StepStage).items() if callable(value) and name[0] != "_"
)
_CHANGES_MEANS = operator.attrgetter("changes_means")
_HIDES_GRADIENTS = operator.attrgetter("hides_gradients")
_NOTES_FORWARDS = operator.attrgetter("notes_forwards")


class StageList:
    """Finds the stages that do something at a moment, once for all steps."""

    def __init__(self, stages: Sequence[StepStage]) -> None:
        """List stages; the first ones are called first."""
        self._stages = tuple(stages)
        self.on: Mapping[Callable[..., Any], tuple[StepStage, ...]] = {
            getattr(StepStage, moment): tuple(one for one in stages if _overrides(one, moment))
            for moment in _MOMENTS
        }
        """By method of `StepStage`, the stages that have one of their own."""
        self.keeps_means = any(one.keeps_means for one in stages)
        """Whether means never come to `.grad`."""

    @property
    def changes_means(self) -> bool:
        """Whether a stage changes means of this step as they arrive."""
        return any(map(_CHANGES_MEANS, self._stages))

    @property
    def hides_gradients(self) -> bool:
        """Whether a stage refuses looks at `.grad` though the step has ended."""
        return any(map(_HIDES_GRADIENTS, self._stages))

    @property
    def notes_forwards(self) -> bool:
        """Whether a stage is to see which tensors modules use."""
        return any(map(_NOTES_FORWARDS, self._stages))

    def counters(self) -> dict[str, float]:
        """Return the numbers of all stages."""
        return {name: value for one in self._stages for name, value in one.counters.items()}

    def describe(self) -> list[dict[str, Any]]:
        """Return the stages in order: name, reason and the moments at which each acts."""
        return [
            {
                "stage": one.name,
                "reason": one.reason,
                "acts": [moment for moment in _MOMENTS if _overrides(one, moment)],
            }
            for one in self._stages
        ]


def _overrides(stage: StepStage, moment: str) -> bool:
    return getattr(type(stage), moment) is not getattr(StepStage, moment)
