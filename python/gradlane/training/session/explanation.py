"""What each step of the prepared models passes, as `Session.explain` tells it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ExplainedModel:
    """The stages of one model.

    Attributes:
        model: name of its class.
        stages: in order, each with `stage`, `reason` and `acts`, the moments at which it acts.
    """

    model: str
    stages: Sequence[dict[str, Any]]

    def __str__(self) -> str:
        width = max((len(one["stage"]) for one in self.stages), default=0)
        rows = [
            f"{number:3}. {one['stage']:{width}}  {one['reason']}"
            for number, one in enumerate(self.stages, 1)
        ]
        return "\n".join([f"{self.model}:", *rows])


@dataclass(frozen=True)
class Explanation:
    """The stages in force; `str()` is a table of them.

    Attributes:
        models: the prepared models, in the order of `Session.models`.
    """

    models: tuple[ExplainedModel, ...]

    def __repr__(self) -> str:
        return f"<Explanation of {len(self.models)} models>"

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.models)) or "no model is prepared"

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {"models": [{"model": one.model, "stages": list(one.stages)} for one in self.models]}
