"""Runs faults of stores, several at once."""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.faults.campaign import Campaign, Result
from tests.faults.cluster import Run, new_folder
from tests.faults.on_store.scenario import FORGING, HARMLESS, SILENT, StoreScenario, draw
from tests.faults.outcome import Outcome, RankEnd
from tests.faults.scenario import (
    CHECKPOINT_EVERY,
    CLOSE_TIMEOUT_S,
    PROGRESS_TIMEOUT_S,
    SILENCE_TIMEOUT_S,
    Scenario,
)
from tests.faults.verdict import SLACK_S, Problem, last_frames, named_ranks
from tests.waiting import eventually

_CONNECT_TIMEOUT_S = 20.0
_ANSWERS_WITHIN_S = 60.0
_ENDS_WITHIN_S = 20.0
_KILL_AFTER_S = 0.1
BOUND_S = _CONNECT_TIMEOUT_S + 2 * PROGRESS_TIMEOUT_S + SILENCE_TIMEOUT_S + CLOSE_TIMEOUT_S
"""Seconds from the fault within which every rank has to end, on a machine that is not busy."""


class StoreCampaign(Campaign):
    """Runs faults of stores; a context that owns all files."""

    def draw(self, seed: int) -> StoreScenario:
        """Draw a scenario."""
        return draw(seed)

    def play(self, scenario: Scenario) -> Result:  # type: ignore[override]
        """Run one scenario, and judge it."""
        assert isinstance(scenario, StoreScenario)
        place = new_folder(self._root, f"store-{scenario.seed}")
        (place / "checkpoint").mkdir(parents=True)
        outcome, problems = self._run_faulted(scenario, place)
        problems += judge(scenario, outcome)
        if not self._keeps:
            shutil.rmtree(place, ignore_errors=True)
        seconds = max(end.after_s for end in outcome.ends)
        return Result(scenario, problems, seconds, outcome.errors, outcome.is_late)

    def _run_faulted(self, scenario: StoreScenario, place: Path) -> tuple[Outcome, list[Problem]]:
        """Train until the fault, let it happen, and wait until all ranks have ended."""
        folder = place / "faulted"
        run = Run(self._programs, folder, scenario.kind, scenario.world_size, scenario, None)
        options = {
            "connect_timeout_s": _CONNECT_TIMEOUT_S,
            "silence_timeout_s": SILENCE_TIMEOUT_S,
            "progress_timeout_s": PROGRESS_TIMEOUT_S,
            "checkpoint_keep": 2,
            "checkpoint_every": CHECKPOINT_EVERY,
        }
        problems: list[Problem] = []
        with run.running(options, place / "checkpoint", scenario.last_step, digests=True):
            if scenario.fault not in SILENT:
                run.start("attacker", "tests.faults.on_store.attacker")
            run.wait_for_moment()
            self._inject(run, folder, scenario)
            run.wait(
                [rank for rank in range(scenario.world_size) if rank not in scenario.silenced],
                run.outcome.fault_s + BOUND_S + SLACK_S,
            )
            if scenario.agent and scenario.fault in HARMLESS:
                problems += self._check_store(run)
        run.look_for_left_over()
        return run.outcome, problems

    def _inject(self, run: Run, folder: Path, scenario: StoreScenario) -> None:
        if scenario.fault in SILENT:
            run.signal("agent", signal.SIGSTOP if scenario.fault == "stop" else signal.SIGKILL)
        else:
            (folder / "attack").touch()
            assert eventually((folder / "attacked").exists, _ANSWERS_WITHIN_S)
        run.inject(scenario.fault, ())
        if scenario.killed is not None:
            time.sleep(_KILL_AFTER_S)
            run.inject("kill", (scenario.killed,))
        if scenario.wakes_after_s is not None:
            time.sleep(scenario.wakes_after_s)
            run.signal("agent", signal.SIGCONT)

    def _check_store(self, run: Run) -> Iterator[Problem]:
        """Check that the store answers others than the ranks, and ends when it is told to."""
        run.start("client", "tests.faults.on_store.client")
        if not eventually(lambda: run.code_of("client") is not None, _ANSWERS_WITHIN_S):
            yield Problem("hang", None, "the store does not answer a new client")
        elif run.code_of("client") != 0:
            yield Problem("silent", None, "the store does not serve a new client")
        run.signal("agent", signal.SIGTERM)
        if not eventually(lambda: run.code_of("agent") is not None, _ENDS_WITHIN_S):
            yield Problem("hang", None, "SIGTERM does not end `gradlane store`")
        elif run.code_of("agent") != 0:
            yield Problem("silent", None, f"`gradlane store` ends with {run.code_of('agent')}")


def judge(scenario: StoreScenario, outcome: Outcome) -> list[Problem]:
    """Judge how the ranks ended, and that those that came through trained as one."""
    if not outcome.is_reached:
        text = f"no rank reached the moment; errors: {outcome.errors}"
        return [Problem("not run", None, text)]
    problems = [Problem("left over", None, one) for one in outcome.left_over]
    ends = [end for end in outcome.ends if end.rank not in scenario.silenced]
    for end in ends:
        problems += _check_end(scenario, end)
    through = [end for end in ends if end.code == 0 and end.is_done]
    digests = {end.rank: end.digests().get(scenario.last_step) for end in through}
    if len(set(digests.values())) > 1:
        problems.append(Problem("split", None, f"digests of the last step: {digests}"))
    is_done_early = scenario.moment == "close" or all(
        end.last_step == scenario.last_step for end in ends
    )
    if through and len(through) < len(ends) and not is_done_early and not scenario.going_on:
        said = [f"rank {end.rank}: {error['text']}" for end in ends if (error := end.error)]
        ranks = [end.rank for end in through]
        problems.append(Problem("ended", None, f"{ranks} came through; {said}"))
    return problems


def _check_end(scenario: StoreScenario, end: RankEnd) -> Iterator[Problem]:
    if end.code is None:
        yield Problem("hang", end.rank, f"not ended after the bound; {last_frames(end.traces)}")
    elif end.code < 0:
        yield Problem(
            "foreign error", end.rank, f"ended by signal {-end.code}: {end.errors[-300:]}"
        )
    elif end.error is None:
        if not (end.code == 0 and end.is_done):
            yield Problem("silent", end.rank, f"ended with {end.code}: {end.errors[-300:]}")
        if "Traceback" in end.errors or "Exception raised from" in end.errors:
            yield Problem("foreign error", end.rank, f"beside success: {end.errors[-400:]}")
    else:
        said, culprit = end.error["text"], end.error["culprit"]
        shown = f"(error.rank {culprit}) {end.error['type']}: {said[:500]}"
        if not end.error["ours"]:
            yield Problem("foreign error", end.rank, shown)
        elif scenario.fault in HARMLESS or (_is_short(scenario) and scenario.fault == "stop"):
            yield Problem("ended", end.rank, f"{shown}")
        elif scenario.fault in SILENT and ("store" not in said or named_ranks(said) - {0}):
            yield Problem("misnamed", end.rank, f"not the store: {shown}")
        elif scenario.fault in FORGING and scenario.killed is None and _blames(end.error):
            yield Problem("misnamed", end.rank, f"no rank is at fault: {shown}")


def _blames(error: dict[str, Any]) -> bool:
    """Return whether an error blames a rank, and not the store for which that rank gave up."""
    gave_up = re.match(r"rank \d+ gave up: ", error["text"]) and "store" in error["text"]
    return error["culprit"] is not None and not gave_up


def _is_short(scenario: StoreScenario) -> bool:
    """Return whether a stopped store goes on before anybody gives up waiting for it."""
    return scenario.wakes_after_s is not None and scenario.wakes_after_s <= 2.0
