"""Where a model is in its step: the state that all parts of the kernel share, and its only lock."""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Callable

from gradlane.training.model.failure_latch import FailureLatch
from gradlane.training.model.kernel.update_lock import UpdateLock
from gradlane.training.model.stages.stage_list import StageList

_NO_BACKWARD = -2
"""No number of a backward, and not what torch tells outside of one."""


class Phase(enum.Enum):
    """Where a model is in its step."""

    IDLE = "idle"
    """All parameters are up to date."""
    LOCAL = "local"
    """Gradients add up in `.grad` and nothing was sent, as inside `session.no_sync()`."""
    BACKWARD = "backward"
    """A step has begun on the channel; each gradient leaves once its last part is there."""
    ATTACHED = "attached"
    """The averaged gradients are in `.grad`, before the user's `optimizer.step()`."""
    PENDING = "pending"
    """The step has ended here; parameters are updated as their gradients arrive."""


class Phases:
    """Holds the phase, what is pending, and the flags that keep reads fast.

    Whoever changes any of it holds the lock: several threads may run forward and backward of one
    model, and one more may save it meanwhile.
    """

    def __init__(self, failure: FailureLatch, stages: StageList) -> None:
        """Start between two steps.

        Args:
            failure: the model's; every call raises it.
            stages: those of the model.
        """
        self.failure = failure
        self._stages = stages
        self.lock = threading.RLock()
        self.update_lock = UpdateLock(self.lock)
        """The same lock, for a wait for updates."""
        self.phase = Phase.IDLE
        self.pending: set[int] = set()
        """Tensors whose results are to come: numbers leave after the update of their parameters."""
        self.accumulates = False
        """Whether gradients only add up on this rank, as inside `session.no_sync()`."""
        self.steps_whole = False
        """Whether an optimizer steps on `.grad` now, without the lock."""
        self.evaluates_again = False
        """Whether the next backward is of another evaluation in the same step of training."""
        self.running_backwards: weakref.WeakValueDictionary[int, Callable[[], None]] = (
            weakref.WeakValueDictionary()
        )
        """By number, what each calls as it ends; torch lets go of that of one that raised, too."""
        self.counting_in = _NO_BACKWARD
        """The backward of which gradients of the step are taken as they come; nothing but their
        count is looked at."""
        self.reads_wait = False
        """Whether a read of a parameter may have to wait; while it is down, nothing is asked."""
        self.lists_wait = False
        """The same for parameters that are listed."""
        self.notes_forwards = False
        """Whether a stage is to see which tensors modules use."""
        failure.subscribe(self.refresh)
        self.refresh()

    @property
    def awaits_step(self) -> bool:
        """Whether the step's means will be changed as they arrive, and it has not ended."""
        return self.phase is Phase.BACKWARD and self._stages.changes_means

    def stop_counting(self) -> None:
        """Have the next gradient looked at closely."""
        self.counting_in = _NO_BACKWARD

    def refresh(self) -> None:
        """Bring the flags up to date, after any change."""
        self.counting_in = _NO_BACKWARD
        self.notes_forwards = self._stages.notes_forwards
        failed = self.failure.error is not None
        self.lists_wait = failed or bool(self.pending) or self.notes_forwards
        self.reads_wait = self.lists_wait or (
            self.phase is Phase.BACKWARD
            and (self._stages.keeps_means or self._stages.changes_means)
        )
