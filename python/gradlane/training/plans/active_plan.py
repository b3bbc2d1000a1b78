"""The plan of a session: given, or found while a model trains and then applied."""

from __future__ import annotations

from collections.abc import Callable

from gradlane.errors import GradlaneError
from gradlane.formats.link_report import LinkReport
from gradlane.training.model.prepared import CLOSE_TIMEOUT_S, PreparedModel
from gradlane.training.options.options import Options
from gradlane.training.options.strategy import ROWS
from gradlane.training.plans.plan import Plan
from gradlane.training.plans.planning_wing import PlanSearch, start_plan_search
from gradlane.training.rendezvous.rendezvous import RendezvousScope


class ActivePlan:
    """The session's last plan, and the models that are recorded to find one."""

    def __init__(
        self,
        options: Options,
        meet: Callable[[], RendezvousScope],
        prepared: list[PreparedModel],
        abort: Callable[[str], None],
    ) -> None:
        """Start without a plan.

        Args:
            options: the session's.
            meet: opens a rendezvous scope.
            prepared: the session's models; a switched one is replaced in the list.
            abort: aborts the session.
        """
        self.plan: Plan | None = None
        self._options = options
        self._meet = meet
        self._prepared = prepared
        self._abort = abort
        self._learnings: dict[int, PlanSearch] = {}

    def learn(self, prepared: PreparedModel, links: LinkReport, rule: str) -> None:
        """Record a model's first steps to find its plan by a rule."""
        learning = start_plan_search(
            prepared,
            links,
            self._options,
            self._meet,
            lambda plan: self._switch(prepared, plan),
            rule,
        )
        self._learnings[id(prepared)] = learning
        prepared.listeners.subscribe(learning.after_step)

    def forget(self, prepared: PreparedModel) -> None:
        """Stop recording a model."""
        learning = self._learnings.pop(id(prepared), None)
        if learning is not None:
            learning.stop()

    def stop(self) -> None:
        """Stop recording all models."""
        for learning in self._learnings.values():
            learning.stop()
        self._learnings.clear()

    def _switch(self, prepared: PreparedModel, plan: Plan) -> None:
        """Apply a plan; a collective call between two steps."""
        self._learnings.pop(id(prepared), None)
        self.plan = plan
        options = plan.settings.applied_to(self._options)
        in_force = prepared.schemes
        if options == self._options and all(
            in_force.get(name) in (scheme, ROWS) for name, scheme in plan.schemes.items()
        ):
            return
        position = self._prepared.index(prepared)
        try:
            self._prepared[position] = prepared.reconnected(options, CLOSE_TIMEOUT_S, plan.schemes)
        except GradlaneError as error:
            self._abort(f"the plan could not be put into force: {error}")
            raise
