"""The training steps of one prepared model, as a state machine.

Idle: all parameters are up to date. Local: gradients add up in `.grad` and nothing was sent, as
inside `session.no_sync()`. Backward: a step has begun on the channel; a gradient leaves as soon as
its last part is there, what is left follows at the end. Attached: the averaged gradients are in
`.grad`, waiting for the user's `optimizer.step()`. Pending: the step has ended here; parameters are
updated as their gradients arrive.

In every step each parameter's gradient is the mean over all ranks of what they had in `.grad`, none
counting as zeros. Every touch of a parameter comes through `before_forward`, `before_read`,
`before_list` or `before_operation`, which wait for its update, and every touch of a gradient
through `before_grad`; after a failure they raise, so that nobody sees some parameters of one step
and some of another.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from gradlane.errors import SessionFailedError, UsageError
from gradlane.training.factors.block import Part
from gradlane.training.model.consistency_check import RankStatus, StepEnding
from gradlane.training.model.step_reads import StepReads
from gradlane.training.model.step_state import Phase
from gradlane.training.model.updates import undisturbed
from gradlane.training.modules.forward_order import inside_backward
from gradlane.training.modules.gradient_intake import raw_grad, set_raw_grad


class Steps(StepReads):
    """Drives one channel through the training steps of one model."""

    def take_gradient(self, index: int, parameter: Tensor) -> None:
        """Note a parameter's fresh gradient, and hand it over if it is whole: the hook.

        Raises:
            UsageError: the gradient comes at a moment, or in a form, that has no meaning.
            GradlaneError: the session has failed.
        """
        # No variable holds the gradient: it is lent as it is if nobody else has it.
        if raw_grad(parameter) is None and (
            self._exchange.sends_factors(index) or not parameter.requires_grad
        ):
            # Factors were taken, or it was frozen since the forward: torch runs the hook anyway.
            return
        if self._steps_whole:
            # No lock: the thread that steps has it, and may wait for this one.
            raise UsageError(
                f"backward() inside optimizer.step(): the gradient of "
                f"{self._trained[index].name!r} came while step {self.step} was being applied; "
                "give such an optimizer a closure, or call backward() before step()"
            )
        with self._lock:
            if self._note_backward() and self.come_last(index, parameter):
                return
            self._on_gradient(index)
            if self.accumulates:
                gradient = raw_grad(parameter)
                if gradient is not None:
                    self._untouched[index] = (id(gradient), gradient._version)
            elif self._exchange.sends_factors(index):
                self._exchange.hold_dense(index)
                self._touched.add(index)
            elif self._firings.is_last(index):
                self._exchange.give(index)
            else:
                self._exchange.check(index)

    def wants_factors(self, index: int) -> bool:
        """Whether factors may take the place of a gradient now: those that add up may not."""
        sends = self._exchange.sends_factors(index)
        return sends and not self.accumulates and self._failure is None

    def take_factors(self, index: int, part: Part) -> None:
        """Note factors of a part of a parameter's fresh gradient.

        Raises:
            UsageError: they come after the last ones that were to be expected.
            GradlaneError: the session has failed.
        """
        with self._lock:
            self._note_backward()
            self._on_gradient(index)
            self._exchange.hold_factors(index, part)
            self._touched.add(index)

    def end_parts(self, index: int) -> None:
        """Hand over what a backward gave for a parameter that sends factors, if it is whole.

        Called once in each backward, after all layers that use the parameter, as the hook of a
        gradient is: it counts the same whether factors or gradients came.
        """
        with self._lock:
            if index in self._touched:
                self._touched.discard(index)
                if self._firings.is_last(index):
                    self._exchange.give(index)

    def _on_gradient(self, index: int) -> None:
        """Begin a step with its first gradient, and refuse one that comes too late."""
        if self._phase is not Phase.BACKWARD:
            self._on_first_gradient()
            if not self.accumulates:
                self._begin_step()
        elif self._exchange.is_given(index):
            self._refuse_late_gradient(index)

    def _note_backward(self) -> bool:
        """Know of the backward that this thread is in, until it ends; returns whether it is new."""
        task = torch._C._current_graph_task_id()
        if task in self._backwards or task == -1:
            return False
        self._backwards.add(task)
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(functools.partial(self._backwards.discard, task))
        return True

    def _on_first_gradient(self) -> None:
        """Leave whatever phase there was: gradients add up locally from now on."""
        self.raise_failure()
        if self._phase is Phase.LOCAL:
            return
        self.settle()
        if self._phase is Phase.ATTACHED:
            # As with DDP: the new gradients add up on the averaged ones, and are averaged again.
            self._exchange.end()
            self._ending = StepEnding.CARRIED_ON
        self._on_top = self._server_rows is not None and not self._zeroed
        self._zeroed = True
        self._untouched.clear()
        self._phase = Phase.LOCAL
        self._refresh()

    def _begin_step(self, *, shadow: bool = False) -> None:
        if not any(vote.shadow for vote in self._exchange.votes()):
            # Ranks that went along without data get the others' parameters at the end of join().
            self._driver.before_step(self.step + 1)
        if self._server_rows is not None:
            self._rows = self._exempted(self._server_rows)
        sample = 0 if shadow else self._driver.agreement.sample(self.step)
        vote = RankStatus(self._ending, shadow, self._digest, sample=sample)
        self._exchange.begin(vote, self._rows if self._server_rows is not None else None)
        if self._order is not None and not self._order.is_empty:
            order, self._order = self._order, None
            self._driver.announce_order(order)
        self._firings.begin()
        self._touched.clear()
        self._phase = Phase.BACKWARD
        if not shadow and self._server_rows is None:
            self._lazy.expect_gradients()
        elif not shadow:
            self._lazy.expect_updates()
        self._refresh()

    def average_local(self) -> None:
        """Begin to average what was only accumulated here, if that may be done now.

        Raises:
            UsageError: it was changed since backward.
            GradlaneError: the session has failed.
        """
        with self._lock:
            if not (self.accumulates or self.is_exempt or inside_backward() or self.serves):
                self.raise_failure()
                self._check_untouched()
                self._begin_step()

    def end_step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do what `optimizer.step()` means: now, or as gradients arrive.

        Args:
            closure: evaluated first, with gradients enabled.

        Returns:
            What the closure returned, or None.

        Raises:
            UsageError: there is no gradient, or the model or the optimizer was changed.
            GradlaneError: the session has failed.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if inside_backward():
            raise UsageError(
                "optimizer.step() inside backward(): gradients of this step are still to come; "
                "call it after backward()"
            )
        with self._lock:
            self._before_update()
            if self._phase is not Phase.ATTACHED:
                self._complete()
                self._zeroed = False
                self._end(StepEnding.STEPPED, updates=True)
                self._refresh()
                return result
        self._update_now()
        return result

    def _before_update(self) -> None:
        """Bring a step to where it can be applied: all handed over, or the mean in `.grad`."""
        self.raise_failure()
        self._backwards.clear()
        if self._phase in (Phase.IDLE, Phase.PENDING):
            self.settle()
            if all(raw_grad(entry.tensor) is None for entry in self._trained):
                raise UsageError(
                    f"optimizer.step() without any gradient since step {self.step}: every rank "
                    "must run backward() on at least one trained parameter in each step, or put "
                    "gradients into .grad"
                )
            self._untouched.clear()
            self._on_top = False
            self._phase = Phase.LOCAL
        self._driver.check_unchanged()
        if self._on_top:
            warnings.warn(
                "zero_grad() was not called since the last optimizer.step(); with "
                'update="server" gradients stay on the servers, so they do not add up over steps',
                UserWarning,
                stacklevel=4,
            )
        if self._phase is Phase.LOCAL:
            self._check_untouched()
            self._begin_step()
        self._exempted(self._driver.update.record)
        if self._server_rows is not None:
            self._check_rows(self._exempted(self._server_rows))
        elif self._phase is Phase.BACKWARD and not self._driver.defers():
            self.attach()
        self._firings.learn()
        self._digest = self._driver.hyperparameters.digest()

    def discard(self, set_to_none: bool = True) -> None:
        """Do what `zero_grad()` means: forget the gradients of a step that was not taken.

        Args:
            set_to_none: as the user gave it.

        Raises:
            UsageError: updates run on the servers and have begun.
        """
        with self._lock:
            if self._failure is not None:
                return
            if inside_backward():
                self._discard_inside()
                return
            self._discard_outside(set_to_none)

    def _discard_inside(self) -> None:
        given = self._exchange.present() if self._phase is Phase.BACKWARD else []
        if given:
            raise UsageError(
                f"zero_grad() inside backward() in step {self.step}: the gradient of "
                f"{self._trained[given[0]].name!r} is under way to the other ranks already; call "
                "it before or after backward()"
            )

    def _discard_outside(self, set_to_none: bool) -> None:
        self._zeroed = True
        self._backwards.clear()
        if self._phase in (Phase.PENDING, Phase.IDLE):
            if set_to_none:
                self._driver.update.leave_none()
            else:
                self._driver.update.zero_in_place()
        elif self._phase is Phase.LOCAL:
            self._phase = Phase.IDLE
        elif self._phase is Phase.ATTACHED:
            self._end(StepEnding.DISCARDED)
        elif self._phase is Phase.BACKWARD:
            self._discard_backward(set_to_none)
        self._refresh()

    def _discard_backward(self, set_to_none: bool) -> None:
        if self._server_rows is not None:
            raise UsageError(
                f'zero_grad() after backward() in step {self.step}: with update="server" the '
                "update has already begun; call optimizer.step() first"
            )
        if not set_to_none:
            for index in self._exchange.present():
                parameter = self._trained[index].tensor
                set_raw_grad(parameter, torch.zeros_like(parameter))
        self._end_with_nothing()

    def _end_with_nothing(self) -> None:
        """Hand over nothing more in this step, and end it."""
        self._give_nothing_more(shadow=False)
        self._end(StepEnding.DISCARDED)
        self._refresh()

    def _give_nothing_more(self, *, shadow: bool) -> None:
        self._discards = True
        self._exchange.complete(discards=True)
        self._exchange.give_buffers(shadow=shadow)

    def begin_shadow(self) -> None:
        """Go along in the next step of the others with nothing to contribute.

        Raises:
            UsageError: this rank's own step has not ended.
        """
        self.settle()
        if self._phase in (Phase.BACKWARD, Phase.ATTACHED):
            raise UsageError(
                f"the end of session.join() inside step {self.step}: call optimizer.step() or "
                "zero_grad() after the last backward()"
            )
        keeps_local = self._phase
        self._begin_step(shadow=True)
        self._give_nothing_more(shadow=True)
        self._exchange.end()
        self._ending = StepEnding.SHADOWED
        self._phase = keeps_local
        self._refresh()

    def pass_step(self) -> bool:
        """Take the result of the next step without a part in it, if the others are there already.

        Returns:
            Whether it was done: only a rank that was left out of the last step ever does it.

        Raises:
            UsageError: this rank's own step has not ended.
        """
        self.raise_failure()
        if self._phase not in (Phase.IDLE, Phase.PENDING):
            raise UsageError(
                f"the next batch of session.keep_pace() inside step {self.step}: call "
                "optimizer.step() or zero_grad() first"
            )
        exchange = self._exchange
        if exchange.step == 0 or not exchange.was_left_out() or not exchange.next_goes_on():
            # What is still to come of the last step comes during the next forward, as ever.
            return False
        if self._driver.agreement.is_due(self.step):
            # The others wait for this rank there, and begin the step together with it.
            return False
        self.settle()
        with self._lock:
            self._driver.before_step(self.step + 1)
            self._exchange.begin(RankStatus(self._ending, False, self._digest), passes=True)
            self._exchange.complete(discards=True)
            self._exempted(self._driver.update.record)
            self._driver.update.leave_none()
            if self._driver.defers():
                self._end(self._ending, updates=True)
            else:
                self._exchange.end()
                for index, gradient in self._exchange.take(None).gradients:
                    set_raw_grad(self._trained[index].tensor, gradient)
                self._guarded(self._driver.update.step_whole)
                for entry in self._trained:
                    set_raw_grad(entry.tensor, None)
                self.when_stale()
            self._refresh()
        return True

    def has_votes(self) -> bool:
        """Whether all ranks have begun the step that this one goes along in."""
        return self._exchange.has_votes()

    def end_shadow(self) -> list[RankStatus]:
        """Wait for the end of the step that was gone along in; returns all ranks' votes."""
        self._exchange.take(None, discards=True)
        self._discards = False
        return self._exchange.votes()

    def finish(self) -> None:
        """Bring the current step to an end, so that the channel can be closed in order."""
        if self._failure is not None:
            return
        if self._phase is Phase.BACKWARD:
            self._end_with_nothing()
        elif self._phase is Phase.ATTACHED:
            self._end(StepEnding.DISCARDED)
        self.settle()

    def _update_now(self) -> None:
        def update() -> None:
            with undisturbed():
                self._driver.update.step_whole()

        self._steps_whole = True
        try:
            self._guarded(update)
        finally:
            self._steps_whole = False
        with self._lock:
            self._zeroed = False
            self._end(StepEnding.STEPPED)
            self._refresh()
        notice, self._driver.update.notice = self._driver.update.notice, ""
        if notice:
            # Not before: where warnings are errors, the step has ended all the same.
            warnings.warn(notice, UserWarning, stacklevel=4)

    def _check_untouched(self) -> None:
        """Refuse gradients that were changed before they were averaged: no rule covers them."""
        gradients = {
            index: gradient
            for index in self._untouched
            if (gradient := raw_grad(self._trained[index].tensor)) is not None
        }
        newest: dict[int, int] = {}
        for index, gradient in gradients.items():
            # Views of one memory, as cat() gives them, count their changes together.
            memory = gradient.untyped_storage().data_ptr()
            newest[memory] = max(newest.get(memory, 0), self._untouched[index][1])
        for index, gradient in gradients.items():
            memory = gradient.untyped_storage().data_ptr()
            known, _ = self._untouched[index]
            if id(gradient) != known or gradient._version != newest[memory]:
                how = "changed in place" if id(gradient) == known else "replaced"
                raise UsageError(
                    f"the gradient of {self._trained[index].name!r} was {how} before it was "
                    f"averaged in step {self.step + 1}: every backward() of the step was inside "
                    "session.no_sync(), so clipping and unscaling saw this rank's own gradients; "
                    "run the last backward() of a step outside of it"
                )

    def _check_rows(self, rows: str) -> None:
        if rows != self._rows:
            failure = SessionFailedError(
                f"hyper-parameters were changed between the first gradient and optimizer.step() of "
                f'step {self.step}: with update="server" the update has already begun; step '
                "schedulers after optimizer.step()",
                self.step - 1,
            )
            self.fail(failure)
            raise failure

    def _refuse_late_gradient(self, index: int) -> NoReturn:
        refusal = UsageError(
            f"parameter {self._trained[index].name!r} got another gradient in step {self.step} "
            "after its gradient had been sent: it got more of them than in any step before; run "
            "every backward() of a step but the last inside `with session.no_sync():`"
        )
        # What was sent cannot be taken back, so no rank can end this step.
        self.fail(refusal)
        self._driver.abort(str(refusal))
        raise refusal
