"""What one rank tells all others with each step, and how it ended its last one."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from gradlane.training.model.buffers import UNKNOWN


class StepEnding(enum.IntEnum):
    """How a rank ended a step."""

    NONE = 0
    STEPPED = 1
    DISCARDED = 2
    CARRIED_ON = 3
    SHADOWED = 4
    EVALUATED = 5


@dataclass(frozen=True)
class RankStatus:
    """One rank's lane.

    Attributes:
        ending: how the rank ended the step before.
        shadow: whether it has no data for this step and goes along inside `session.join()`.
        digest: of its hyper-parameters at its last `optimizer.step()`; 0 if there was none.
        changes: of its buffers since that step, as `BufferPack.changes` counts them.
        changed: name of the first buffer that was changed, or empty.
        sample: digest of a sample of its parameters after that step; 0 if it took none.
        weight: samples behind its gradients of this step; None: it has not said.
        layout: digest of how its parameters lie in memory as the step begins; 0: it has not said.
        generation: number of the newest membership that it knows; None: it gathers numbers.
        request: number of a request to join that it has found; 0: none.
    """

    ending: StepEnding
    shadow: bool
    digest: int
    changes: int = UNKNOWN
    changed: str = ""
    sample: int = 0
    weight: int | None = None
    layout: int = 0
    generation: int | None = 0
    request: int = 0


Statuses = Mapping[int, RankStatus]
"""The statuses of a step, by the ranks that are in its mean, in their order."""


class Gathered(enum.IntEnum):
    """What a rank exchanges bytes for."""

    NONE = 0
    """It trains a step."""
    INTEGERS = 1
    OUTER_GRADIENTS = 2


@dataclass(frozen=True)
class RankNumbers:
    """Some bytes of one rank's numbers.

    Attributes:
        kind: what the rank exchanges them for.
        generation: number of the newest membership that the rank knows; 0 where it trains a step.
        size: how many bytes its numbers have.
        part: those bytes that travelled this time.
    """

    kind: Gathered
    generation: int
    size: int
    part: bytes
