"""Judges what came of a fault: no hang, no wrong culprit, nothing lost, nothing left."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.faults.outcome import Outcome, RankEnd, complete_checkpoints
from tests.faults.scenario import (
    BEFORE_CONNECTED,
    CLOSE_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    PROGRESS_TIMEOUT_S,
    SILENCE_TIMEOUT_S,
    Scenario,
)

KINDS = (
    "hang",
    "misnamed",
    "foreign error",
    "silent",
    "ended",
    "late",
    "unnamed",
    "split",
    "lost step",
    "lost checkpoint",
    "other bits",
    "left over",
    "not run",
)
SLACK_S = 25.0
"""For a busy machine: a hang lasts, and nothing here is a matter of a second."""

_RANKS = re.compile(r"\branks? (\d+(?:(?:, | and )\d+)*)")
_NODES = re.compile(r"\bnodes? (\d+)")
_ASIDE = re.compile(
    r"\((?:reported|noticed)[^()]*\)"  # who said so, and at which call
    r"|; in step \d+, [^;]* outstanding[^;]*; waiting for [^;]*"  # what a step still lacks
)
OR_LINK = re.compile(r", or the (link between \w+ \d+ and \w+ \d+) is cut")
"""What else silence may mean, where no third rank is there to tell."""
_REPORTER = re.compile(
    r"\brank \d+ (?:is not connected|could not connect|cannot reach|waited|waits"
    r"|lost the|lost(?= rank))"
    r"|(?:^|(?<=: ))rank \d+: "
)
"""A rank that says what it saw, itself or in the words of another."""


@dataclass(frozen=True)
class Problem:
    """Something that must not be.

    Attributes:
        kind: one of `KINDS`.
        rank: where, or None.
        text: what was seen.
    """

    kind: str
    rank: int | None
    text: str

    def __str__(self) -> str:
        where = "" if self.rank is None else f" (rank {self.rank})"
        return f"{self.kind}{where}: {self.text}"

    def to_json(self) -> dict[str, object]:
        """Return all fields."""
        return asdict(self)


def bound_s(scenario: Scenario) -> float:
    """Return the seconds from a fault within which every rank that is able to has to end.

    Before the ranks are connected `connect_timeout_s` holds, and others wait a little longer than
    rank 0. Afterwards a rank that is silent is lost after `silence_timeout_s`, and one that is
    connected and takes no part after `progress_timeout_s`, a quarter more on ranks that train
    beside ranks that only serve. Closing lasts as long as it is told to.
    """
    if scenario.moment in BEFORE_CONNECTED:
        limit_s = CONNECT_TIMEOUT_S + SILENCE_TIMEOUT_S
    else:
        limit_s = max(SILENCE_TIMEOUT_S, 1.25 * PROGRESS_TIMEOUT_S)
        if scenario.fault == "freeze the store":
            limit_s += PROGRESS_TIMEOUT_S + CONNECT_TIMEOUT_S
        if scenario.moment == "close" or scenario.fault == "freeze the store":
            limit_s += CLOSE_TIMEOUT_S
    return limit_s + SLACK_S


def named_ranks(text: str) -> set[int]:
    """Return the ranks that an error blames: those it names, except the rank that reports it."""
    text = _ASIDE.sub("", text)
    if "store" in text:
        # A rank that gave up because of the store is not at fault.
        text = re.sub(r"^(?:node \d+ gave up: )?rank \d+ gave up: ", "", text)
    text = _REPORTER.sub("", text)
    return {int(one) for match in _RANKS.findall(text) for one in re.findall(r"\d+", match)}


def judge_run(scenario: Scenario, outcome: Outcome) -> list[Problem]:
    """Judge how the ranks of a faulted run ended, and what they left."""
    if not outcome.is_reached:
        said = [end.error["text"] for end in outcome.ends if end.error]
        return [Problem("not run", None, f"no rank reached the moment; errors: {said}")]
    problems = [Problem("left over", None, one) for one in outcome.left_over]
    for end in outcome.ends:
        is_victim = end.rank in scenario.victims and scenario.fault != "partition"
        if is_victim and scenario.fault in ("kill", "stop"):
            continue
        if end.code is None:
            where = last_frames(end.traces)
            problems.append(Problem("hang", end.rank, f"not ended after the bound; {where}"))
        elif end.code < 0:
            text = f"ended by signal {-end.code} after {end.error}: {end.errors[-300:]}"
            problems.append(Problem("foreign error", end.rank, text))
        elif end.error is None:
            if not (end.code == 0 and end.is_done and may_succeed(scenario, outcome)):
                text = f"ended with {end.code} and no error: {end.errors[-300:]}"
                problems.append(Problem("silent", end.rank, text))
        elif is_victim and scenario.fault == "raise":
            if end.error["type"] != "UserError":
                text = f"{end.error['type']} in place of the program's own: {end.error['text']}"
                problems.append(Problem("misnamed", end.rank, text))
        elif not end.error["ours"]:
            text = f"{end.error['type']}: {end.error['text'][:400]}"
            problems.append(Problem("foreign error", end.rank, text))
        elif not is_victim:
            problems += _misnamed(scenario, end)
    return problems


def may_succeed(scenario: Scenario, outcome: Outcome) -> bool:
    """Return whether ranks may end in good order.

    That is where some have closed, where training does not need what is at fault, and where a fault
    came so late that the ranks at fault had done all their steps. Those that only serve have done
    them when the ranks that train have.
    """
    if scenario.moment == "close":
        return True
    if scenario.fault == "freeze the store":
        return scenario.moment not in BEFORE_CONNECTED or scenario.delay_ms is not None
    trains = range(scenario.workers)
    at_fault = {rank for one in scenario.victims for rank in ([one] if one in trains else trains)}
    steps = [outcome.ends[rank].last_step for rank in at_fault]
    return bool(steps) and min(steps) == scenario.last_step


def _misnamed(scenario: Scenario, end: RankEnd) -> Iterator[Problem]:
    assert end.error is not None
    said, culprit = end.error["text"], end.error["culprit"]
    text = OR_LINK.sub("", said)
    named = named_ranks(text)
    victims = set(scenario.victims)
    shown = f"(error.rank {culprit}) {end.error['type']}: {said[:400]}"
    if not victims:
        if "store" not in text or named - {0}:
            yield Problem("misnamed", end.rank, f"not the store: {shown}")
    elif scenario.fault == "partition":
        # All that others can see of a rank that never came to the store is that it is not there.
        far_end = {0} if end.rank in victims - {0} else victims - {0}
        if scenario.hides_link and named == far_end:
            return
        # Who closes after all others has nobody left to ask which of two ranks is alive.
        other = OR_LINK.search(said)
        if end.last_step == scenario.last_step and other and named_ranks(other[1]) == victims:
            return
        if named != victims:
            yield Problem("misnamed", end.rank, f"not the link: {shown}")
    elif scenario.world_size == 2 and scenario.fault == "cut" and "link between" in text:
        # Of two ranks none can tell which one is cut off.
        if named != {0, 1}:
            yield Problem("misnamed", end.rank, f"not the link: {shown}")
    else:
        nodes = {scenario.node_of(victim) for victim in victims}
        elsewhere = scenario.node_of(end.rank) not in nodes
        told_nodes = {int(one) for one in _NODES.findall(text)}
        if not named and elsewhere and told_nodes and told_nodes <= nodes:
            return
        if not named or named - victims or (culprit is not None and culprit not in victims):
            yield Problem("misnamed", end.rank, f"not the victim: {shown}")


def judge_restart(
    scenario: Scenario,
    before: Outcome,
    complete_at_end: list[int],
    restarted: Outcome,
    digests: dict[int, str],
    checkpoint: Path,
) -> list[Problem]:
    """Judge the run that goes on from what a faulted run left.

    Args:
        scenario: the fault.
        before: the faulted run.
        complete_at_end: steps of its checkpoints that were complete when all had ended.
        restarted: the run that went on.
        digests: of an undisturbed run, by step.
        checkpoint: folder of checkpoints.
    """
    problems = []
    newest = max(complete_at_end, default=0)
    if newest < max(before.complete_before, default=0):
        text = f"step {max(before.complete_before)} was complete at the fault, now {newest} is"
        problems.append(Problem("lost checkpoint", None, text))
    for end in restarted.ends:
        if end.code != 0 or not end.is_done:
            said = end.error["text"] if end.error else end.errors[-400:]
            text = f"the restart ended with {end.code}: {said}"
            problems.append(Problem("lost checkpoint", end.rank, text))
            continue
        if end.rank >= scenario.workers:
            continue
        restored = next(one["step"] for one in end.events if one["event"] == "restored")
        if restored != newest:
            text = f"restored step {restored}, complete is {newest}"
            problems.append(Problem("lost checkpoint", end.rank, text))
        found = end.digests()
        if not scenario.kind.resumes_bits:
            found = {step: found[step] for step in (restored,) if scenario.start_step == 0}
        differing = [step for step, digest in found.items() if digests.get(step) != digest]
        if differing:
            text = f"in steps {differing} from step {restored} on, not an undisturbed run's"
            problems.append(Problem("other bits", end.rank, text))
    if not problems:
        problems += unnamed_files(checkpoint)
    return problems


def unnamed_files(checkpoint: Path) -> Iterator[Problem]:
    """Yield what is in a folder of checkpoints and belongs to none, and manifests that lie."""
    complete = complete_checkpoints(checkpoint)
    for path in checkpoint.rglob("*"):
        step = re.match(r"step-(\d+)", path.relative_to(checkpoint).parts[0])
        # Later steps are those of runs that went further; they are cleared when training comes by.
        is_later = step is not None and int(step[1]) > max(complete, default=0)
        is_incomplete = step is not None and path.is_dir() and path not in complete.values()
        if not is_later and (is_incomplete or path.name.endswith(".tmp")):
            name = path.relative_to(checkpoint)
            yield Problem("left over", None, f"{name} in the folder of checkpoints")
    for folder in complete.values():
        files = json.loads((folder / "manifest.json").read_text())["files"]
        sizes = {one[0]: one[1] for one in files}
        there = {path.name: path.stat().st_size for path in folder.iterdir()}
        del there["manifest.json"]
        if there != sizes:
            text = f"{folder.name} has {there}, its manifest {sizes}"
            yield Problem("lost checkpoint", None, text)


def last_frames(traces: str) -> str:
    """Return the innermost frames of every thread, from what faulthandler wrote."""
    threads = traces[traces.rfind("Fatal") + 1 :].split("\n\n")
    frames = []
    for thread in threads:
        lines = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', thread)
        own = [one for one in lines if "/gradlane/" in one[0] or "/faults/" in one[0]]
        if own:
            shown = [f"{Path(file).name}:{line} {name}" for file, line, name in own[:3]]
            frames.append(" < ".join(shown))
    return " | ".join(frames)
