"""Count how often each parameter gets a gradient in one step, and learn from the steps so far.

A parameter may get several gradients before `optimizer.step()`: several losses, the two halves of
a discriminator's batch, accumulation, checkpoints that run backward in pieces. Only the sum may be
sent, and nothing announces the last part. So the largest number seen in a step that was taken is
remembered, and the sum leaves when it is reached. A number that is not reached only means that the
gradient leaves at `optimizer.step()`; one that is exceeded is an error. So the number never falls;
where it is missed in step after step, the program is told.
"""

from __future__ import annotations

_STEPS = 3
"""Steps in a row after which a missed number is no last batch of an epoch."""


class BackwardPassCounter:
    """Counts gradients of trained parameters."""

    def __init__(self, count: int) -> None:
        """Start without knowledge of `count` parameters."""
        self._expected = [0] * count
        self._fired = [0] * count
        self._missed_steps = 0
        """Steps in a row in which a gradient waited for more than came."""
        self._was_told = False

    def begin(self) -> None:
        """Begin a step."""
        self._fired = [0] * len(self._fired)

    def is_last(self, index: int) -> bool:
        """Count a gradient; returns whether it is the last one that is to be expected."""
        fired = self._fired[index] + 1
        self._fired[index] = fired
        return fired == self._expected[index]

    def learn(self) -> str:
        """Remember the numbers of a step that was taken.

        Returns:
            What keeps gradients from leaving in backward, once it has for some steps; else empty.
        """
        fired, before = self._fired, self._expected
        self._expected = list(map(max, before, fired))
        short = (
            []
            if fired == before
            else [index for index, count in enumerate(fired) if 0 < count < before[index]]
        )
        if self._was_told:
            return ""
        self._missed_steps = self._missed_steps + 1 if short else 0
        self._was_told = self._missed_steps == _STEPS
        if not self._was_told:
            return ""
        return (
            f"gradients wait for optimizer.step() in place of leaving inside backward(): a "
            f"parameter had {before[short[0]]} of them in a step, and has {fired[short[0]]} now; "
            "run every backward() of a step but the last inside `with session.no_sync():`, in "
            "every step, to have them leave earlier (said once)"
        )
