"""A run of the study: its task, its scheme and their numbers."""

from __future__ import annotations

from dataclasses import dataclass

from gradlane.lab.accuracy.schemes import StudyScheme, parse_scheme
from gradlane.lab.accuracy.tasks import Task, task_of


@dataclass(frozen=True)
class Run:
    """One run: what makes it different from all others.

    Attributes:
        task: a task, as `task_of` takes it.
        scheme: text of a scheme.
        layers: of `exchange.LAYERS`: those whose weights alone are encoded.
        seed: of model, batches and draws.
        workers: how many are emulated.
        steps: how many are taken.
    """

    task: str
    scheme: str
    layers: str
    seed: int
    workers: int
    steps: int

    def parsed(self) -> tuple[Task, StudyScheme]:
        """Return the task and the scheme.

        Raises:
            ValueError: one of them is unknown.
        """
        return task_of(self.task), parse_scheme(self.scheme, self.workers)
