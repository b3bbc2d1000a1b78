"""Which ranks have data in the steps of one model, inside `session.join()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from gradlane.training.model.rank_status import Statuses


class Participation:
    """Notes the ranks with data in the steps of one model since the join began."""

    def __init__(self, throws: bool, stop: Callable[[], NoReturn]) -> None:
        """Start with all ranks there.

        Args:
            throws: whether all ranks break off when the first one has run out of data.
            stop: brings all ranks out of their loops.
        """
        self.throws = throws
        self.stop = stop
        self.last_there: list[int] = []
        """The ranks with data in the last step that had some."""
        self.uneven = False
        """Whether a rank has run out before another one."""
        self.over = False
        """Whether no rank has data."""

    def use_statuses(self, statuses: Statuses) -> None:
        """Learn from the statuses of the next step who takes part."""
        there = [rank for rank, status in statuses.items() if not status.shadow]
        if not there:
            self.over = True
            return
        self.last_there = there
        self.uneven = self.uneven or len(there) < len(statuses)
