"""New members come into force as `optimizer.step()` returns, where training goes on."""

from __future__ import annotations

from collections.abc import Callable

from gradlane.training.model.rank_status import Statuses
from gradlane.training.model.stages.stage import StepStage
from gradlane.training.rendezvous.membership import Membership


class MemberChanges(StepStage):
    """Puts new members into force, if all ranks of the step that has ended know them."""

    def __init__(self, membership: Membership) -> None:
        """Change the members of a session."""
        super().__init__("membership", "going_on=True: training goes on without lost ranks")
        self._membership = membership

    def after_step(
        self, wait_for_statuses: Callable[[], Statuses], training_step_of: Callable[[int], int]
    ) -> None:
        """Change the members; a rank that does not know new ones yet does not wait."""
        if self._membership.is_pending:
            known = [one.generation or 0 for one in wait_for_statuses().values()]
            self._membership.put_into_force(known, training_step_of)
