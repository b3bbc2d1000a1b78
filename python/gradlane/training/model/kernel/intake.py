"""Gradients as autograd and programs give them, and the beginning of the step that they are of.

`take_gradient` is the way in. A gradient that the program has put into `.grad` by itself is found
when it calls for the end of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NoReturn

from torch import Tensor

from gradlane.errors import UsageError
from gradlane.training.model.backward_passes import BackwardPassCounter
from gradlane.training.model.gradient_hooks import GradientHooks
from gradlane.training.model.kernel.parts import KernelParts
from gradlane.training.model.kernel.phases import Phase
from gradlane.training.model.kernel.update import StepUpdate
from gradlane.training.model.local_gradients import LocalGradients
from gradlane.training.model.missing_gradients import without_gradients
from gradlane.training.model.model_structure import ModelStructure
from gradlane.training.model.rank_status import StepEnding
from gradlane.training.model.stages.stage import StepStage
from gradlane.training.model.stages.step_start import StepStart
from gradlane.training.modules.forward_order import inside_backward
from gradlane.training.modules.gradient_intake import raw_grad
from gradlane.training.torch_internals import graph_task_id, queue_callback


class Intake:
    """Takes gradients, begins a step with the first one, and submits each with its last part."""

    def __init__(
        self,
        parts: KernelParts,
        update: StepUpdate,
        hooks: GradientHooks,
        structure: ModelStructure,
        check_unchanged: Callable[[], None],
    ) -> None:
        """Start before the first step.

        Args:
            parts: those below.
            update: takes means that are still to come.
            hooks: those on the parameters.
            structure: the modules and parameters that were prepared.
            check_unchanged: raises `UsageError` if the model is not the one that was prepared.
        """
        self._phases = parts.phases
        self._failure = parts.phases.failure
        self._exchange = parts.exchange
        self._update = update
        self._updates = parts.updates
        self._stages = parts.stages
        self._exempt = parts.exempt
        self._hooks = hooks
        self._structure = structure
        self._check_unchanged = check_unchanged
        self._trained = parts.exchange.layout.trained
        self._passes = BackwardPassCounter(len(self._trained))
        self._local = LocalGradients(self._trained)

    # ---- gradients as backward gives them

    def take_gradient(self, index: int, parameter: Tensor) -> None:
        """Note a parameter's fresh gradient, and submit it if it is whole: the hook.

        Raises:
            UsageError: the gradient comes at a moment, or in a form, that has no meaning.
            GradlaneError: the session has failed.
        """
        phases = self._phases
        if phases.steps_whole:
            # No lock: the thread that steps has it, and may wait for this one.
            self.refuse_inside_step(index)
        with phases.lock:
            if (
                graph_task_id() != phases.counting_in
                or phases.accumulates
                or self._exchange.is_submitted[index]
                or not parameter.requires_grad
            ):
                # No variable holds the gradient: it is lent as it is if there is no other
                # reference. If it was frozen since the forward, torch runs the hook anyway.
                if raw_grad(parameter) is None and not parameter.requires_grad:
                    return
                if not self.admit(index, parameter):
                    return
            if self._passes.is_last(index):
                self._exchange.submit(index)
            else:
                self._exchange.look(index)

    def admit(self, index: int, parameter: Tensor) -> bool:
        """Look at the moment of a gradient in `.grad`; return whether it is taken now.

        Others are taken at the end of this backward, or add up on this rank.

        Raises:
            UsageError: the gradient comes at a moment that has no meaning.
            GradlaneError: the session has failed.
        """
        phases = self._phases
        if graph_task_id() not in phases.running_backwards and (
            self.note_backward() and self._hooks.move_last(index, parameter)
        ):
            return False
        if (
            phases.phase is not Phase.BACKWARD
            or self._stages.changes_means
            or self._exchange.is_submitted[index]
        ):
            self.check_in_time(index)
        if phases.accumulates:
            gradient = raw_grad(parameter)
            if gradient is not None:
                self._local.keep(index, gradient)
            return False
        if not self._stages.changes_means:
            phases.counting_in = graph_task_id()
        return True

    def count(self, index: int) -> bool:
        """Count a gradient; return whether it is the last one that is to be expected."""
        return self._passes.is_last(index)

    def refuse_inside_step(self, index: int) -> NoReturn:
        """Refuse a gradient that comes while an optimizer steps.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"backward() inside optimizer.step(): the gradient of {self._trained[index].name!r} "
            f"came while step {self._exchange.training_step} was being applied; give such an "
            "optimizer a closure, or call backward() before step()"
        )

    def check_in_time(self, index: int) -> None:
        """Begin a step with its first gradient, and refuse one that comes too late.

        Raises:
            UsageError: its gradient was sent already.
        """
        if self._phases.awaits_step:
            # A backward of a forward before clipping.
            self._update.attach()
        if self._phases.phase is not Phase.BACKWARD:
            self._begin_local()
            if not self._phases.accumulates:
                self.begin()
        elif self._exchange.is_submitted[index]:
            self._refuse_late_gradient(index)

    def note_backward(self) -> bool:
        """Note the backward that this thread is in, until it ends; returns whether it is new."""
        task, running = graph_task_id(), self._phases.running_backwards
        if task in running or task == -1:
            return False
        self._structure.check_still_frozen()
        ended = functools.partial(self._end_backward, task)
        running[task] = ended
        queue_callback(ended)
        return True

    def _end_backward(self, task: int) -> None:
        """Give gradients that the program keeps their means before backward returns, as DDP does:
        no look at them can be noticed."""
        phases = self._phases
        phases.running_backwards.pop(task, None)
        phases.stop_counting()
        if (
            phases.phase is Phase.BACKWARD
            and not (phases.running_backwards or phases.accumulates)
            and not (self._stages.keeps_means or self._stages.changes_means)
            and self._failure.error is None
            and self._exchange.is_watched()
        ):
            for stage in self._stages.on[StepStage.waited]:
                why = "keeps references to gradients, which get the means in it"
                stage.waited(self._exchange.training_step, why)
            self._update.attach()

    def _refuse_late_gradient(self, index: int) -> NoReturn:
        refusal = UsageError(
            f"parameter {self._trained[index].name!r} got another gradient in step "
            f"{self._exchange.training_step} after its gradient had been sent: it got more of them "
            "than in any step before; run every backward() of a step but the last inside `with "
            "session.no_sync():`"
        )
        # Submitted memory cannot be taken back, so no rank can end this step.
        self._failure.fail(refusal)
        self._exchange.abort(str(refusal))
        raise refusal

    # ---- a step begins

    def _begin_local(self) -> None:
        """Leave whatever phase there was: gradients add up locally from now on."""
        phases = self._phases
        self._failure.raise_failure()
        if phases.phase is Phase.LOCAL:
            return
        self._update.wait_for_all()
        if phases.phase is Phase.ATTACHED:
            # As with DDP: the new gradients add up on the averaged ones, and are averaged again.
            self._exchange.end()
            for stage in self._stages.on[StepStage.ended]:
                stage.ended(StepEnding.CARRIED_ON)
        for stage in self._stages.on[StepStage.local]:
            stage.local(by_hand=False)
        self._local.clear()
        self._updates.begin()
        phases.phase = Phase.LOCAL
        phases.refresh()

    def begin(self, *, shadow: bool = False) -> None:
        """Begin a step on the channel; `shadow`: this rank goes along without data."""
        exchange = self._exchange
        if self._phases.evaluates_again:
            exchange.repeat_training_step()
        elif not any(status.shadow for status in exchange.statuses().values()):
            # Ranks that went along without data get the others' parameters at the end of join().
            for stage in self._stages.on[StepStage.before_step]:
                stage.before_step(exchange.training_step + 1)
        start = StepStart(exchange.training_step, exchange.wait_for_statuses, shadow)
        for stage in self._stages.on[StepStage.begin]:
            stage.begin(start)
        self._updates.begin()
        exchange.begin(start)
        self._passes.begin()
        self._update.begin(waits=not shadow)
        self._phases.refresh()

    def average_local(self) -> None:
        """Begin to average what was only accumulated here, if that may be done now.

        Raises:
            UsageError: it was changed since backward.
            GradlaneError: the session has failed.
        """
        with self._phases.lock:
            may_send = not (self._phases.accumulates or self._exempt.depth or inside_backward())
            if may_send and not self._stages.keeps_means:
                self._failure.raise_failure()
                self.check_local()
                self.begin()

    def check_local(self) -> None:
        """Check that what was accumulated here is as backward left it.

        Raises:
            UsageError: it was changed since.
        """
        self._local.check(self._exchange.training_step + 1)

    def learn(self) -> str:
        """Remember how often gradients came; returns what is to be told of it, or empty."""
        return self._passes.learn()

    # ---- gradients that no backward gives

    def require_gradients(self, call: str) -> None:
        """Take gradients in `.grad`, and refuse a call for which there are none.

        Raises:
            UsageError: there are none, or the model was changed, so that they may be elsewhere.
        """
        has_gradients = self.take_by_hand()
        self._check_unchanged()
        if has_gradients:
            return
        # Refuses an optimizer that holds other parameters now.
        self._exempt.run(self._updates.record_all)
        raise without_gradients(call, self._exchange.training_step, self._trained)

    def take_by_hand(self) -> bool:
        """Take gradients in `.grad` for local ones where no backward made them.

        Returns:
            Whether there are gradients of any kind.
        """
        if self._phases.phase not in (Phase.IDLE, Phase.PENDING):
            return True
        self._update.wait_for_all()
        if all(raw_grad(entry.tensor) is None for entry in self._trained):
            return False
        self._local.clear()
        for stage in self._stages.on[StepStage.local]:
            stage.local(by_hand=True)
        self._phases.phase = Phase.LOCAL
        return True

    def forget(self, number: int) -> None:
        """Forget the accumulated gradients of an optimizer, which the program resets."""
        self._local.forget(self._updates.indices_of(number))
