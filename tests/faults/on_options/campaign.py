"""Runs trainings whose ranks have other options each, several at once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from tests.faults.campaign import Campaign, Result
from tests.faults.cluster import Run, new_folder
from tests.faults.on_options.scenario import OptionsScenario, draw
from tests.faults.outcome import Outcome, RankEnd
from tests.faults.scenario import CHECKPOINT_EVERY, CLOSE_TIMEOUT_S, Scenario
from tests.faults.verdict import SLACK_S, Problem, last_frames

_OPTIONS = {
    "connect_timeout_s": 60.0,
    "silence_timeout_s": 30.0,
    "progress_timeout_s": 120.0,
    "checkpoint_keep": 2,
    "checkpoint_every": CHECKPOINT_EVERY,
}
"""Of all ranks, where they have none of their own."""
TOLD_WITHIN_S = 10.0
"""Seconds within which all ranks know that one cannot start, on a machine that is not busy."""
_BOUND_S = 150.0 + CLOSE_TIMEOUT_S
_WORDS = {"buffers": "buffer", "scheme": "strategy", "where": "local"}
"""What else an error may call an option."""


class OptionsCampaign(Campaign):
    """Runs trainings whose ranks have other options each; a context that owns all files."""

    def draw(self, seed: int) -> OptionsScenario:
        """Draw a scenario."""
        return draw(seed)

    def play(self, scenario: Scenario) -> Result:  # type: ignore[override]
        """Run one scenario, and judge it."""
        assert isinstance(scenario, OptionsScenario)
        place = new_folder(self._root, f"options-{scenario.seed}")
        checkpoint, folder = place / "checkpoint", place / "run"
        checkpoint.mkdir(parents=True)
        run = Run(self._programs, folder, scenario.kind, scenario.world_size, scenario, None)
        own = {rank: dict(options) for rank, options in scenario.own.items()}
        for options in own.values():
            if options.get("trace"):
                options["trace"] = str(folder / options["trace"])
        ranks = range(scenario.world_size)
        with run.running(dict(_OPTIONS), checkpoint, scenario.last_step, digests=True, own=own):
            run.wait_for_moment()
            run.inject("", ())
            run.wait(ranks, run.outcome.fault_s + _BOUND_S + SLACK_S)
        run.look_for_left_over()
        problems = judge(scenario, run.outcome)
        if not self._keeps:
            shutil.rmtree(place, ignore_errors=True)
        seconds = max(end.after_s for end in run.outcome.ends)
        return Result(scenario, problems, seconds, run.outcome.errors, run.outcome.is_late)


def judge(scenario: OptionsScenario, outcome: Outcome) -> list[Problem]:
    """Judge whether all trained alike, or all were told which option is at fault, and soon."""
    problems = [Problem("left over", None, one) for one in outcome.left_over]
    through = [end for end in outcome.ends if end.code == 0 and end.is_done]
    for end in outcome.ends:
        problems += _check_end(scenario, end)
    if through and len(through) < len(outcome.ends):
        ranks = [end.rank for end in through]
        problems.append(Problem("split", None, f"{ranks} trained; others: {outcome.errors}"))
    digests = {str(end.digests()) for end in through}
    if len(digests) > 1:
        problems.append(Problem("other bits", None, "the ranks' models differ"))
    if through and scenario.fault == "mistake":
        problems.append(Problem("silent", None, "a mistake was taken"))
    return problems


def _causes(scenario: OptionsScenario, rank: int) -> Iterator[str]:
    """Yield the words of which an error of a rank has to have one."""
    for name in scenario.differing:
        yield name
        yield _WORDS.get(name, name)
    if scenario.fault == "mistake" and rank not in scenario.victims:
        # The option is in the error of the rank that has given it.
        yield from (f"rank {victim}" for victim in scenario.victims)


def _check_end(scenario: OptionsScenario, end: RankEnd) -> Iterator[Problem]:
    if end.code is None:
        yield Problem("hang", end.rank, f"not ended after the bound; {last_frames(end.traces)}")
        return
    if end.error is None:
        if not (end.code == 0 and end.is_done):
            yield Problem("silent", end.rank, f"ended with {end.code}: {end.errors[-300:]}")
        return
    said = end.error["text"]
    shown = f"{end.error['type']}: {said[:400]}"
    is_own = scenario.fault == "mistake" and end.rank in scenario.victims
    if not end.error["ours"] and not (is_own and end.error["type"] in ("ValueError", "TypeError")):
        yield Problem("foreign error", end.rank, shown)
    if scenario.fault == "may be apart":
        yield Problem("ended", end.rank, shown)
    elif not any(word in said for word in _causes(scenario, end.rank)):
        yield Problem("unnamed", end.rank, f"{sorted(scenario.differing)} differ: {shown}")
    elif end.after_s > TOLD_WITHIN_S + SLACK_S:
        yield Problem("late", end.rank, f"after {end.after_s:.0f} s: {shown}")
