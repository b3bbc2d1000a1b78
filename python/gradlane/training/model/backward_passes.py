"""Count how often each parameter gets a gradient in one step, and learn from the steps so far.

A parameter may get several gradients before `optimizer.step()`: several losses, the two halves of
a discriminator's batch, accumulation, checkpoints that run backward in pieces. Only the sum may be
sent, and nothing announces the last part. So the largest number seen in a step that was taken is
remembered, and the sum leaves when it is reached. A number that is not reached only means that the
gradient leaves at `optimizer.step()`; one that is exceeded is an error.
"""

from __future__ import annotations


class BackwardPassCounter:
    """Counts gradients of trained parameters."""

    def __init__(self, count: int) -> None:
        """Start without knowledge of `count` parameters."""
        self._expected = [0] * count
        self._fired = [0] * count

    def begin(self) -> None:
        """Begin a step."""
        self._fired = [0] * len(self._fired)

    def is_last(self, index: int) -> bool:
        """Count a gradient; returns whether it is the last one that is to be expected."""
        fired = self._fired[index] + 1
        self._fired[index] = fired
        return fired == self._expected[index]

    def learn(self) -> None:
        """Remember the numbers of a step that was taken."""
        self._expected = list(map(max, self._expected, self._fired))
