"""The campaign of local updates that go on."""

from __future__ import annotations

from pathlib import Path

from tests.faults.going_on.campaign import GoingOnCampaign
from tests.faults.going_on.scenario import GoingOnScenario
from tests.faults.local_updates.scenario import STEPS, LocalScenario, draw
from tests.faults.local_updates.verdict import judge
from tests.faults.outcome import Outcome
from tests.faults.verdict import Problem


class LocalCampaign(GoingOnCampaign):
    """Runs faults of local updates that go on."""

    program = "tests.faults.local_updates.rank_program"
    steps = STEPS

    def draw(self, seed: int) -> LocalScenario:
        """Draw a scenario."""
        return draw(seed)

    def judge(
        self, scenario: GoingOnScenario, outcome: Outcome, checkpoint: Path
    ) -> tuple[list[Problem], float | None]:
        """Return problems; how long steps take tells nothing of exchanges."""
        assert isinstance(scenario, LocalScenario)
        return judge(scenario, outcome), None
