"""Runs scenarios, several at once, each beside an undisturbed run of the same training."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.faults.cluster import (
    new_folder,
    run_faulted,
    run_undisturbed,
)
from tests.faults.going_on.scenario import GoingOnScenario
from tests.faults.outcome import complete_checkpoints
from tests.faults.scenario import (
    REFERENCE_STEPS,
    STEPS_AFTER_RESTART,
    Scenario,
    draw,
)
from tests.faults.verdict import Problem, bound_s, judge_restart, judge_run
from tests.forked_programs import ForkedPrograms

_KEEP_ALL = 100
_RUNS_AT_ONCE = 3


@dataclass(frozen=True)
class Result:
    """The outcome of one fault.

    Attributes:
        scenario: the fault.
        problems: none where all is as it should be.
        seconds: from the fault until the last rank ended.
        errors: each rank's error, or "".
        is_late: whether the program did not come by the moment, and the fault came later.
        skipped: why it could not run here, or "".
        pause_s: seconds in which a rank that went on completed no step, less a usual one's; None:
            none went on.
        joined: whether a rank has joined.
    """

    scenario: Scenario | GoingOnScenario
    problems: list[Problem] = field(default_factory=list)
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)
    is_late: bool = False
    skipped: str = ""
    pause_s: float | None = None
    joined: bool = False

    @property
    def word(self) -> str:
        """Return the verdict in a word or two."""
        if self.skipped:
            return "skipped"
        return ", ".join(dict.fromkeys(problem.kind for problem in self.problems)) or "ok"

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return {
            **self.scenario.to_json(),
            "verdict": self.word,
            "problems": [problem.to_json() for problem in self.problems],
            "seconds": round(self.seconds, 2),
            "errors": self.errors,
            "is_late": self.is_late,
            "skipped": self.skipped,
            "pause_s": self.pause_s,
            "joined": self.joined,
        }


@dataclass(frozen=True)
class Reference:
    """An undisturbed run of a training.

    Attributes:
        checkpoint: folder with all of its checkpoints.
        digests: of the model, by step.
    """

    checkpoint: Path
    digests: dict[int, str]


class Campaign:
    """Runs scenarios; a context that owns all files."""

    def __init__(
        self, programs: ForkedPrograms, why_no_namespaces: str | None, keep: Path | None = None
    ) -> None:
        """Start.

        Args:
            programs: forks the ranks.
            why_no_namespaces: why scenarios in namespaces are skipped, or None.
            keep: folder for the files of all runs, which stay; None: they are removed.
        """
        self._why_no_namespaces = why_no_namespaces
        self._programs = programs
        self._keeps = keep is not None
        self._root = Path(tempfile.mkdtemp(prefix="gradlane-faults-") if keep is None else keep)
        self._references: dict[tuple[str, int], Future[Reference]] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Campaign:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove all files."""
        if not self._keeps:
            shutil.rmtree(self._root, ignore_errors=True)

    def run_all(self, seeds: Iterable[int], jobs: int = _RUNS_AT_ONCE) -> Iterator[Result]:
        """Run scenarios, and yield each result in the order of the seeds."""
        with ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(self.run, self.draw(seed)) for seed in seeds]
            try:
                for future in futures:
                    yield future.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def draw(self, seed: int) -> Scenario | GoingOnScenario:
        """Draw a scenario."""
        return draw(seed)

    def run(self, scenario: Scenario | GoingOnScenario) -> Result:
        """Play one scenario where this machine can."""
        if scenario.namespaces and self._why_no_namespaces is not None:
            return Result(scenario, skipped=f"no namespaces: {self._why_no_namespaces}")
        try:
            return self.play(scenario)
        except Exception:
            # A defect of the campaign is a failure, and no reason to lose all other results.
            text = traceback.format_exc(limit=-4)
            return Result(scenario, [Problem("not run", None, text)])

    def play(self, scenario: Scenario | GoingOnScenario) -> Result:
        """Run one scenario, and the restart after it, and judge both."""
        assert isinstance(scenario, Scenario)
        reference = self._reference(scenario.training, scenario.world_size)
        place = new_folder(self._root, f"seed-{scenario.seed}")
        checkpoint = place / "checkpoint"
        checkpoint.mkdir(parents=True)
        for step, folder in complete_checkpoints(reference.checkpoint).items():
            if step <= scenario.start_step:
                shutil.copytree(folder, checkpoint / folder.name)
        began_s = time.monotonic()
        outcome = run_faulted(
            self._programs, place / "faulted", scenario, checkpoint, bound_s(scenario)
        )
        problems = judge_run(scenario, outcome)
        complete = list(complete_checkpoints(checkpoint))
        last_step = max(complete, default=0) + STEPS_AFTER_RESTART
        restarted = run_undisturbed(
            self._programs,
            place / "restarted",
            scenario.training,
            scenario.world_size,
            checkpoint,
            last_step,
            keep=2,
        )
        problems += judge_restart(
            scenario, outcome, complete, restarted, reference.digests, checkpoint
        )
        if not self._keeps:
            shutil.rmtree(place, ignore_errors=True)
        seconds = max((end.after_s for end in outcome.ends), default=time.monotonic() - began_s)
        return Result(scenario, problems, seconds, outcome.errors, outcome.is_late)

    def _reference(self, training: str, world_size: int) -> Reference:
        key = (training, world_size)
        with self._lock:
            mine = key not in self._references
            future = self._references.setdefault(key, Future())
        if mine:
            try:
                future.set_result(self._make_reference(training, world_size))
            except BaseException as error:
                future.set_exception(error)
        return future.result()

    def _make_reference(self, training: str, world_size: int) -> Reference:
        place = new_folder(self._root, "undisturbed")
        checkpoint = place / "checkpoint"
        checkpoint.mkdir(parents=True)
        outcome = run_undisturbed(
            self._programs,
            place / "run",
            training,
            world_size,
            checkpoint,
            REFERENCE_STEPS,
            keep=_KEEP_ALL,
        )
        for end in outcome.ends:
            if end.code != 0:
                raise RuntimeError(
                    f"undisturbed run of {key_text(training, world_size)} failed: "
                    f"rank {end.rank}: {end.errors[-2000:]}"
                )
        return Reference(checkpoint, outcome.ends[0].digests())


def key_text(training: str, world_size: int) -> str:
    """Return words for a training in a world."""
    return f"{training!r} on {world_size} ranks"
