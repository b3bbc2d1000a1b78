"""Times of a step from its marks: forwards of modules, and gradients.

Time begins with the step's first forward. Work before it in the loop (fetching the next batch)
might as well follow the previous step, since steps repeat, so it counts at the end. Waits for other
ranks are removed: all later times move forward by their length.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gradlane.formats.profile import BatchTime
from gradlane.planning.profiler.tape import (
    EVALUATION,
    STEP_BEGIN,
    STEP_END,
    WAIT_BEGIN,
    WAIT_END,
)

Call = tuple[float, float]
"""Start and end of a module's forward."""


@dataclass
class RecordedStep:
    """A step, in seconds since the start of its first forward, without waits."""

    compute_s: float
    forward_s: float
    """End of the last forward before the first gradient that is complete."""
    calls: dict[int, list[Call]]
    """Calls by module number."""
    ready_s: dict[int, float]
    """Time of the last part of a gradient, by parameter number."""
    gradients: dict[int, int]
    """Number of parts of a gradient, by parameter number."""
    evaluates: bool
    """True if the model also ran in evaluation mode."""


def read_step(marks: Sequence[tuple[int, float]], modules: int) -> RecordedStep:
    """Compute the times of one step.

    Args:
        marks: (code, seconds). Codes from 0: module m begins 2m and ends 2m + 1; the gradient of
            parameter p is 2 `modules` + p. Below 0: those of `gradlane.planning.profiler.tape`.
        modules: number of modules.

    Returns:
        The step; `ready_s` is empty if it had no gradient.
    """
    compute = _without_waits(marks)
    begin_s = end_s = origin_s = 0.0
    started = evaluates = False
    open_calls: list[tuple[int, float]] = []
    outermost_ends_s: list[float] = []
    calls: defaultdict[int, list[Call]] = defaultdict(list)
    ready_s: dict[int, float] = {}
    gradients: Counter[int] = Counter()
    for code, moment_s in marks:
        now_s = compute(moment_s)
        if code >= 2 * modules:
            ready_s[code - 2 * modules] = now_s
            gradients[code - 2 * modules] += 1
        elif code >= 0 and code % 2 == 0:
            if not started:
                started, origin_s = True, now_s
            open_calls.append((code // 2, now_s))
        elif code >= 0:
            # Calls that an exception left have no end: the one that ends closes them, too.
            while open_calls:
                module, start_s = open_calls.pop()
                if module == code // 2:
                    calls[module].append((start_s, now_s))
                    if not open_calls:
                        outermost_ends_s.append(now_s)
                    break
        elif code == STEP_BEGIN:
            begin_s = now_s
        elif code == STEP_END:
            end_s = now_s
        elif code == EVALUATION:
            evaluates = True
    if not started:
        origin_s = begin_s
    first_ready_s = min(ready_s.values(), default=end_s)
    before_s = [one_s for one_s in outermost_ends_s if one_s <= first_ready_s]
    return RecordedStep(
        compute_s=end_s - begin_s,
        forward_s=max(before_s, default=origin_s) - origin_s,
        calls={
            module: sorted((start_s - origin_s, end_s - origin_s) for start_s, end_s in found)
            for module, found in calls.items()
        },
        ready_s={parameter: moment_s - origin_s for parameter, moment_s in ready_s.items()},
        gradients=dict(gradients),
        evaluates=evaluates,
    )


def _without_waits(marks: Sequence[tuple[int, float]]) -> Callable[[float], float]:
    """Return a function from moments to compute time; moments within a wait map to its
    beginning."""
    begins_s: list[float] = []
    ends_s: list[float] = []
    waited_s: list[float] = [0.0]
    begin_s: float | None = None
    for code, moment_s in marks:
        if code == WAIT_BEGIN:
            begin_s = moment_s
        elif code == WAIT_END and begin_s is not None:
            begins_s.append(begin_s)
            ends_s.append(moment_s)
            waited_s.append(waited_s[-1] + max(moment_s - begin_s, 0.0))
            begin_s = None
    if not ends_s:
        return lambda moment_s: moment_s

    def compute(moment_s: float) -> float:
        ended = bisect_right(ends_s, moment_s)
        if ended < len(ends_s):
            # Another thread may go on while the program waits.
            moment_s = min(moment_s, begins_s[ended])
        return moment_s - waited_s[ended]

    return compute


class StepMedians:
    """Medians over many steps."""

    def __init__(self, steps: Iterable[RecordedStep]) -> None:
        """Use the training steps; those that also evaluated only if there are no others."""
        trained = [step for step in steps if step.ready_s]
        self._steps = [step for step in trained if not step.evaluates] or trained

    def __len__(self) -> int:
        return len(self._steps)

    def batch(self) -> BatchTime:
        """Return the duration of steps, with quartiles."""
        times_s = [step.compute_s for step in self._steps]
        if len(times_s) == 1:
            return BatchTime(1, times_s[0], times_s[0], times_s[0])
        lower_s, median_s, upper_s = statistics.quantiles(times_s, n=4, method="inclusive")
        return BatchTime(len(times_s), median_s, lower_s, upper_s)

    def forward_s(self) -> float:
        """Return the duration of forward."""
        return statistics.median(step.forward_s for step in self._steps)

    def ready_s(self, parameter: int) -> float | None:
        """Return when a parameter's gradient is ready; None if it never has one."""
        found = [step.ready_s[parameter] for step in self._steps if parameter in step.ready_s]
        return statistics.median(found) if found else None

    def gradients(self, parameter: int) -> int:
        """Return the number of parts of a parameter's gradient in most steps that have one."""
        found = [step.gradients[parameter] for step in self._steps if parameter in step.gradients]
        return statistics.mode(found) if found else 0

    def start_s(self, module: int) -> float | None:
        """Return when forward first calls a module; None if it never does."""
        found = [step.calls[module][0][0] for step in self._steps if module in step.calls]
        return statistics.median(found) if found else None

    def calls(self, module: int) -> tuple[Call, ...]:
        """Return a module's calls in a step; if their number differs, those of the most common
        number."""
        found = [step.calls[module] for step in self._steps if module in step.calls]
        if not found:
            return ()
        count = statistics.mode(len(calls) for calls in found)
        like = [calls for calls in found if len(calls) == count]
        return tuple(
            (
                statistics.median(calls[index][0] for calls in like),
                statistics.median(calls[index][1] for calls in like),
            )
            for index in range(count)
        )
