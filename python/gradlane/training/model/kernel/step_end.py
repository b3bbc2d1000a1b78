"""What ends a step: `optimizer.step()` takes it, `zero_grad()` forgets it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from gradlane.errors import UsageError
from gradlane.training.log import log
from gradlane.training.model.deferred_update import undisturbed
from gradlane.training.model.kernel.intake import Intake
from gradlane.training.model.kernel.parts import KernelParts
from gradlane.training.model.kernel.phases import Phase
from gradlane.training.model.kernel.update import StepUpdate
from gradlane.training.model.rank_status import Statuses, StepEnding
from gradlane.training.model.stages.stage import StepStage, Touch
from gradlane.training.modules.forward_order import inside_backward
from gradlane.training.modules.gradient_intake import raw_grad, set_raw_grad


class StepEnd:
    """Records the step of an optimizer and has it done: now, or as gradients arrive."""

    def __init__(
        self,
        parts: KernelParts,
        update: StepUpdate,
        intake: Intake,
        check_unchanged: Callable[[], None],
        on_step_end: Callable[[], None],
    ) -> None:
        """Start before the first step.

        Args:
            parts: those below.
            update: takes means and applies them.
            intake: knows the gradients.
            check_unchanged: raises `UsageError` if the model is not the one that was prepared.
            on_step_end: called as a step has ended for all optimizers by `zero_grad()`.
        """
        self._phases = parts.phases
        self._failure = parts.phases.failure
        self._exchange = parts.exchange
        self._update = update
        self._updates = parts.updates
        self._intake = intake
        self._stages = parts.stages
        self._exempt = parts.exempt
        self._check_unchanged = check_unchanged
        self._on_step_end = on_step_end
        self._trained = parts.exchange.layout.trained

    # ---- optimizer.step()

    @property
    def has_ended(self) -> bool:
        """Whether no optimizer of the model is still to step on gradients that others stepped on.

        They are to as long as `zero_grad()` has not reset these.
        """
        return not self._updates.has_open

    def end_step(self, closure: Callable[[], Any] | None = None, number: int = 0) -> Any:
        """Do what `optimizer.step()` means: now, or as gradients arrive.

        Args:
            closure: evaluated first, with gradients enabled.
            number: of the optimizer.

        Returns:
            The closure's result, or None.

        Raises:
            UsageError: there is no gradient, or the model or the optimizer was changed.
            GradlaneError: the session has failed.
        """
        phases = self._phases
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if inside_backward():
            raise UsageError(
                "optimizer.step() inside backward(): gradients of this step are still to come; "
                "call it after backward()"
            )
        with phases.lock:
            ends = True
            if phases.phase in (Phase.IDLE, Phase.PENDING) and not self._updates.is_single:
                if self._updates.is_open(number):
                    ends, deferred = False, self._step_open(number)
                elif self._has_nothing(number):
                    return result
            if ends:
                self._before_update(number)
                deferred = phases.phase is not Phase.ATTACHED
                if deferred:
                    self._update.submit_rest()
                    self._update.end(StepEnding.STEPPED, updates=True)
                    phases.refresh()
        if not deferred:
            self._update_now(number, ends=ends)
        elif self._stages.keeps_means and not self._updates.may_defer:
            self._update.wait_for_all()
        if ends:
            for stage in self._stages.on[StepStage.after_step]:
                stage.after_step(self._statuses, self._exchange.training_step_of)
        return result

    def _statuses(self) -> Statuses:
        with self._phases.lock:
            return self._exchange.wait_for_statuses()

    def _step_open(self, number: int) -> bool:
        """Step an optimizer in a step that another one has ended.

        Returns:
            Whether it is done, or happens as means arrive; otherwise all are in `.grad`.
        """
        self._failure.raise_failure()
        self._check_unchanged()
        for stage in self._stages.on[StepStage.before_update]:
            stage.before_update(number, self._exchange.training_step)
        indices, pending = self._updates.indices_of(number), self._phases.pending
        defers = self._updates.defers(number) and not pending.isdisjoint(indices)
        if not defers:
            self._update.wait_for_all()
        self._exempt.run(lambda: self._updates.record(number))
        self._recorded()
        if defers:
            here = [index for index in indices if index not in self._phases.pending]
            self._update.guarded(lambda: self._updates.apply_held(number, here))
        return defers

    def _has_nothing(self, number: int) -> bool:
        """Return whether an optimizer has no gradient to step on while others have some."""
        self._update.wait_for_all()
        own = (raw_grad(self._trained[one].tensor) for one in self._updates.indices_of(number))
        nothing = all(gradient is None for gradient in own)
        return nothing and self._updates.have_gradients(but=number)

    def _recorded(self) -> None:
        for stage in self._stages.on[StepStage.recorded]:
            stage.recorded(self._updates.stepped, self._exchange.training_step)

    def _before_update(self, number: int) -> None:
        """Bring a step to where it can be applied: all submitted, or the mean in `.grad`."""
        phases, exchange = self._phases, self._exchange
        self._failure.raise_failure()
        phases.running_backwards.clear()
        self._intake.require_gradients("optimizer.step()")
        for stage in self._stages.on[StepStage.before_update]:
            stage.before_update(number, exchange.training_step)
        if phases.phase is Phase.LOCAL:
            self._intake.check_local()
            self._updates.check_unscaled(number, exchange.training_step + 1)
            self._intake.begin()
        self._exempt.run(lambda: self._updates.record_first(number))
        if (
            phases.phase is Phase.BACKWARD
            and not self._stages.keeps_means
            and (not self._updates.defers(number) or exchange.is_watched())
        ):
            self._update.attach()
        self._recorded()
        missed = self._intake.learn()
        if missed:
            log.info("step %d: %s", exchange.training_step, missed)

    def _update_now(self, number: int, *, ends: bool) -> None:
        def update() -> None:
            with undisturbed():
                self._updates.step_whole(number)

        self._phases.steps_whole = True
        try:
            self._update.guarded(update)
        finally:
            self._phases.steps_whole = False
        with self._phases.lock:
            if ends:
                self._update.end(StepEnding.STEPPED)
            self._phases.refresh()
        notice = self._updates.take_notice(number)
        if notice:
            # Not before: where warnings are errors, the step has ended all the same.
            warnings.warn(notice, UserWarning, stacklevel=4)

    # ---- zero_grad()

    def discard(self, set_to_none: bool = True, number: int | None = None) -> None:
        """Do what `zero_grad()` means: forget the gradients of a step that was not taken.

        Args:
            set_to_none: as the user gave it.
            number: the optimizer whose `zero_grad` it is; None: the model's.

        Raises:
            UsageError: updates run on the servers and have begun.
        """
        phases = self._phases
        with phases.lock:
            if self._failure.error is not None:
                return
            if inside_backward():
                self._check_nothing_submitted()
                return
            for stage in self._stages.on[StepStage.reset]:
                stage.reset()
            phases.running_backwards.clear()
            had_open = self._updates.has_open
            if phases.phase in (Phase.PENDING, Phase.IDLE):
                self._updates.reset(number, set_to_none)
            elif number is not None and self._keeps_others(number):
                self._intake.forget(number)
            elif phases.phase is Phase.LOCAL:
                phases.phase = Phase.IDLE
            elif phases.phase is Phase.ATTACHED:
                self._update.end(StepEnding.DISCARDED)
            elif phases.phase is Phase.BACKWARD:
                self._discard_backward(set_to_none)
            phases.refresh()
        if had_open and not self._updates.has_open:
            self._on_step_end()

    def _keeps_others(self, number: int) -> bool:
        """Return whether gradients of other optimizers stay while those of one are reset."""
        if self._updates.is_single:
            return False
        # Some means are dropped, and others are not.
        self._update.attach()
        return self._updates.have_gradients(but=number)

    def _check_nothing_submitted(self) -> None:
        given = self._exchange.present() if self._phases.phase is Phase.BACKWARD else []
        if given:
            raise UsageError(
                f"zero_grad() inside backward() in step {self._exchange.training_step}: the "
                f"gradient of {self._trained[given[0]].name!r} is under way to the other ranks "
                "already; call it before or after backward()"
            )

    def _discard_backward(self, set_to_none: bool) -> None:
        for stage in self._stages.on[StepStage.touched]:
            stage.touched(Touch.RESET, "", self._exchange.training_step)
        if not set_to_none:
            for index in self._update.given:
                parameter = self._trained[index].tensor
                set_raw_grad(parameter, self._exchange.layout.zeros(index))
        self._update.end_with_nothing()
