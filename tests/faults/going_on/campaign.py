"""Runs scenarios of trainings that go on, several at once."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

from tests.faults.campaign import Campaign, Result
from tests.faults.cluster import RATE_BPS, Run, Switch, new_folder
from tests.faults.going_on import starting
from tests.faults.going_on.scenario import (
    CHECKPOINT_EVERY,
    STEPS,
    GoingOnScenario,
    Second,
    draw,
)
from tests.faults.going_on.verdict import bound_s, judge, took_part
from tests.faults.outcome import Outcome, complete_checkpoints
from tests.faults.scenario import (
    SILENCE_TIMEOUT_S,
    Scenario,
)
from tests.faults.verdict import Problem

_KEEP_ALL = 100
_POLL_S = 0.002
_SECOND_WITHIN_S = 20.0
_EVENTS = {"agreement": "agreed", "the change": "changed"}


class GoingOnCampaign(Campaign):
    """Runs scenarios of trainings that go on; a context that owns all files."""

    program = "tests.faults.going_on.rank_program"
    steps = STEPS
    local_size = 1
    """Ranks of a node."""

    def draw(self, seed: int) -> GoingOnScenario:
        """Draw a scenario."""
        return draw(seed, self.local_size)

    def play(self, scenario: Scenario | GoingOnScenario) -> Result:
        """Run one scenario, and judge it."""
        assert isinstance(scenario, GoingOnScenario)
        place = new_folder(self._root, f"going-on-{scenario.seed}")
        checkpoint = place / "checkpoint"
        checkpoint.mkdir(parents=True)
        outcome = self._run_faulted(scenario, place / "faulted", checkpoint)
        problems, pause_s = self.judge(scenario, outcome, checkpoint)
        if not self._keeps:
            shutil.rmtree(place, ignore_errors=True)
        seconds = max((end.after_s for end in outcome.ends), default=0.0)
        return Result(
            scenario,
            problems,
            seconds,
            outcome.errors,
            outcome.is_late,
            pause_s=pause_s,
            joined=any(took_part(scenario, end) for end in outcome.ends[scenario.world_size :]),
        )

    def judge(
        self, scenario: GoingOnScenario, outcome: Outcome, checkpoint: Path
    ) -> tuple[list[Problem], float | None]:
        """Return problems, and the seconds without progress, where ranks went on."""
        return judge(scenario, outcome, checkpoint)

    def _run_faulted(self, scenario: GoingOnScenario, folder: Path, checkpoint: Path) -> Outcome:
        """Train until the faults, inject them, and wait until all ranks have ended that can."""
        switch = Switch(scenario.processes + 1, RATE_BPS) if scenario.namespaces else None
        run = Run(
            self._programs,
            folder,
            scenario.kind,
            scenario.world_size,
            scenario,
            switch,
            self.program,
            joiners=scenario.processes - scenario.world_size,
        )
        options = {
            "connect_timeout_s": scenario.connect_timeout_s,
            "silence_timeout_s": SILENCE_TIMEOUT_S,
            "progress_timeout_s": scenario.progress_timeout_s,
            "checkpoint_keep": _KEEP_ALL,
            "checkpoint_every": CHECKPOINT_EVERY,
        }
        with (
            contextlib.nullcontext() if switch is None else switch,
            run.running(options, checkpoint, self.steps),
        ):
            run.wait_for_moment()
            run.outcome.complete_before = list(complete_checkpoints(checkpoint))
            run.inject(scenario.fault, scenario.victims)
            if scenario.second is not None:
                _follow(run, folder, scenario, scenario.second)
            ends = [rank for rank in range(scenario.processes) if rank not in scenario.silenced]
            run.wait(ends, run.outcome.fault_s + bound_s(scenario))
        run.look_for_left_over()
        return run.outcome


class StartingCampaign(GoingOnCampaign):
    """Runs faults of trainings that go on and have not begun."""

    def draw(self, seed: int) -> GoingOnScenario:
        """Draw a scenario."""
        return starting.draw(seed)


def _follow(run: Run, folder: Path, scenario: GoingOnScenario, second: Second) -> None:
    """Inject the second fault when its time has come."""
    word = _EVENTS.get(second.after)
    deadline_s = time.monotonic() + _SECOND_WITHIN_S
    members = [rank for rank in scenario.survivors if rank < scenario.world_size]
    files = [folder / f"rank-{rank}" for rank in members]
    while word is not None and time.monotonic() < deadline_s:
        # Where only a rank was lost that has not joined, no members change.
        is_over = any(map(run.has_ended, members))
        written = [path.read_text() for path in files if path.exists()]
        if is_over or any(f'"event": "{word}"' in one for one in written):
            break
        time.sleep(_POLL_S)
    time.sleep(second.delay_s)
    run.inject(second.fault, (second.victim,))
