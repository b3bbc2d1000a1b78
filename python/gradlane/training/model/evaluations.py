"""Steps of optimizers that call their closure themselves, as often as they like, as `LBFGS` does.

Each evaluation is a step of the channel: gradients are averaged, and so is the loss that the
closure returns. Every rank's optimizer sees the same numbers, and so decides alike how often it
evaluates and how far it goes. All of them together are one step of training.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradlane.errors import UsageError
from gradlane.training.log import log
from gradlane.training.model.kernel.intake import Intake
from gradlane.training.model.kernel.parts import KernelParts
from gradlane.training.model.kernel.phases import Phase
from gradlane.training.model.kernel.update import StepUpdate
from gradlane.training.model.number_exchange import NumberExchange
from gradlane.training.model.rank_status import Statuses, StepEnding
from gradlane.training.model.stages.stage import StepStage
from gradlane.training.modules.forward_order import inside_backward

_LOSS = struct.Struct("<d")


class Evaluations:
    """Steps such an optimizer of one model, and averages what its closure gives."""

    def __init__(
        self,
        parts: KernelParts,
        update: StepUpdate,
        intake: Intake,
        check_unchanged: Callable[[], None],
        numbers: NumberExchange,
    ) -> None:
        """Evaluate nothing yet.

        Args:
            parts: those below.
            update: waits for means.
            intake: knows the gradients.
            check_unchanged: raises `UsageError` if the model is not the one that was prepared.
            numbers: exchanges losses.
        """
        self._numbers = numbers
        self._phases = parts.phases
        self._failure = parts.phases.failure
        self._exchange = parts.exchange
        self._update = update
        self._updates = parts.updates
        self._intake = intake
        self._stages = parts.stages
        self._exempt = parts.exempt
        self._stale_flags = parts.stale_flags
        self._check_unchanged = check_unchanged

    def step(self, closure: Callable[[], Any] | None = None, number: int = 0) -> Any:
        """Do what `optimizer.step(closure)` means.

        Args:
            closure: computes the loss and its gradients on this rank's batch.
            number: of the optimizer.

        Returns:
            What the optimizer returns: losses in it are means over the ranks.

        Raises:
            UsageError: there is no closure, or it gives no gradients or no loss; or the model or
                the optimizer was changed.
            GradlaneError: the session has failed.
        """
        phases, step = self._phases, self._exchange.training_step
        if closure is None:
            raise UsageError(
                f"optimizer.step() without a closure after step {step}: this optimizer calls it as "
                "often as it likes; give it a function that resets the gradients, computes the "
                "loss, runs backward() and returns the loss"
            )
        if inside_backward():
            raise UsageError(
                f"optimizer.step() inside backward() in step {step}: gradients of this step are "
                "still to come; call it after backward()"
            )
        self._failure.raise_failure()
        self._update.wait_for_all()
        self._check_unchanged()
        broken: list[BaseException] = []
        may_have_updated = phases.phase is not Phase.IDLE
        # Of a backward before the call, which the optimizer may look at first.
        phases.evaluates_again = False
        if phases.phase is not Phase.IDLE:
            self._average()
        self._exempt.run(lambda: self._updates.record_first(number))

        def evaluate() -> Any:
            nonlocal may_have_updated
            phases.steps_whole = False
            try:
                found = self._exempt.run_outside(lambda: self._evaluate(closure))
                may_have_updated = True
                return found
            finally:
                phases.steps_whole = True

        def update() -> Any:
            try:
                return self._updates.step_evaluating(number, evaluate)
            except BaseException as error:
                if may_have_updated and self._failure.error is None:
                    raise
                broken.append(error)

        result: list[Any] = []
        phases.steps_whole = True
        try:
            self._update.guarded(lambda: result.append(update()))
        finally:
            phases.steps_whole = phases.evaluates_again = False
            phases.refresh()
        if broken:
            # Nothing was updated, or the session has failed before.
            raise broken[0]
        with phases.lock:
            for stage in self._stages.on[StepStage.ended]:
                stage.ended(StepEnding.STEPPED)
            self._stale_flags.mark()
        for stage in self._stages.on[StepStage.after_step]:
            stage.after_step(self._exchange.statuses, self._exchange.training_step_of)
        return result[0]

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Evaluate the closure on all ranks; returns the mean of the losses.

        The means of the gradients are in `.grad`.
        """
        with torch.enable_grad():
            loss = closure()
        statuses = self._average()
        return self._mean_of(loss, statuses)

    def _average(self) -> Statuses:
        """Bring the means of what backward has given into `.grad`; returns all ranks' statuses."""
        phases, exchange = self._phases, self._exchange
        with phases.lock:
            self._failure.raise_failure()
            phases.running_backwards.clear()
            self._intake.require_gradients("the closure of optimizer.step()")
            if phases.phase is Phase.LOCAL:
                self._intake.check_local()
                self._intake.begin()
            for stage in self._stages.on[StepStage.before_update]:
                stage.before_update(0, exchange.training_step)
            self._update.attach()
            for stage in self._stages.on[StepStage.recorded]:
                stage.recorded(self._updates.stepped, exchange.training_step)
            missed = self._intake.learn()
            if missed:
                log.info("step %d: %s", exchange.training_step, missed)
            statuses = exchange.statuses()
            self._update.end(StepEnding.EVALUATED)
            phases.evaluates_again = True
            phases.refresh()
            return statuses

    def _mean_of(self, loss: Any, statuses: Statuses) -> Any:
        """Return the mean of all ranks' losses, weighted as their gradients are.

        Raises:
            UsageError: the closure has returned no loss.
        """
        try:
            own = float(loss.detach() if isinstance(loss, Tensor) else loss)
        except (TypeError, ValueError, RuntimeError):
            raise UsageError(
                f"the closure of optimizer.step() returned a {type(loss).__name__} in step "
                f"{self._exchange.training_step}: all ranks' optimizers decide by the mean of "
                "their losses; return the loss, a number or a tensor of one element"
            ) from None
        if not statuses:
            return loss
        told = self._numbers.exchange(0, _LOSS.size, _LOSS.pack(own))
        weights = {rank: one.weight for rank, one in statuses.items()}
        total, samples = 0.0, 0
        for rank, one in told.items():
            weight = weights[rank]
            weight = 1 if weight is None else weight
            if weight:
                total += weight * _LOSS.unpack(one.part[: _LOSS.size])[0]
                samples += weight
        mean = total / samples
        return torch.full_like(loss.detach(), mean) if isinstance(loss, Tensor) else mean
