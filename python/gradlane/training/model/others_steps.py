"""Steps that this rank takes no part in: in `session.join()`, or since it is late and left out."""

from __future__ import annotations

from gradlane.errors import UsageError
from gradlane.training.model.consistency_check import ConsistencyCheck
from gradlane.training.model.contributors import Contributors
from gradlane.training.model.kernel.intake import Intake
from gradlane.training.model.kernel.parts import KernelParts
from gradlane.training.model.kernel.phases import Phase
from gradlane.training.model.kernel.update import StepUpdate
from gradlane.training.model.rank_status import Statuses, StepEnding
from gradlane.training.model.stages.stage import StepStage
from gradlane.training.model.stages.step_start import StepStart
from gradlane.training.modules.gradient_intake import set_raw_grad


class OthersSteps:
    """Goes along in the others' steps without data, or takes over what they have come to."""

    def __init__(
        self,
        parts: KernelParts,
        update: StepUpdate,
        intake: Intake,
        consistency: ConsistencyCheck,
        contributors: Contributors,
    ) -> None:
        """Start with no such step.

        Args:
            parts: those below.
            update: ends steps and applies means.
            intake: begins steps.
            consistency: tells the others how this rank trains.
            contributors: of the steps.
        """
        self._phases = parts.phases
        self._exchange = parts.exchange
        self._update = update
        self._updates = parts.updates
        self._intake = intake
        self._stages = parts.stages
        self._consistency = consistency
        self._contributors = contributors
        self._exempt = parts.exempt
        self._stale_flags = parts.stale_flags

    # ---- inside session.join()

    def begin_shadow(self) -> None:
        """Go along in the next step of the others with nothing to contribute.

        Raises:
            UsageError: this rank's own step has not ended.
        """
        phases = self._phases
        self._update.wait_for_all()
        if phases.phase in (Phase.BACKWARD, Phase.ATTACHED):
            raise UsageError(
                f"the end of session.join() inside step {self._exchange.training_step}: call "
                "optimizer.step() or zero_grad() after the last backward()"
            )
        phase = phases.phase
        self._intake.begin(shadow=True)
        self._update.submit_nothing_more(shadow=True)
        self._exchange.end()
        self._consistency.ended(StepEnding.SHADOWED)
        phases.phase = phase
        phases.refresh()

    def has_statuses(self) -> bool:
        """Whether all ranks have begun the step that this one goes along in."""
        return self._exchange.has_statuses()

    def end_shadow(self) -> Statuses:
        """Wait for the end of the step that was gone along in; returns all ranks' statuses."""
        self._update.take_nothing()
        return self._exchange.statuses()

    # ---- where late ranks are left out

    def pass_step(self) -> bool:
        """Take the result of the next step without a part in it, if the others are there already.

        Returns:
            Whether it was done: only a rank that was left out of the last step ever does it.

        Raises:
            UsageError: this rank's own step has not ended.
        """
        phases, exchange = self._phases, self._exchange
        phases.failure.raise_failure()
        step = exchange.training_step
        if phases.phase not in (Phase.IDLE, Phase.PENDING):
            raise UsageError(
                f"the next batch of session.keep_pace() inside step {step}: call optimizer.step() "
                "or zero_grad() first"
            )
        if not self._updates.is_single:
            # The others' program alone knows which of them step.
            return False
        last, contributors = exchange.step, self._contributors
        if not (last and contributors.lack_this_rank(last) and contributors.are_past(last)):
            # The rest of the last step comes during the next forward, as ever.
            return False
        if self._consistency.compares_after(step):
            # The others wait for this rank there, and begin the step together with it.
            return False
        self._update.wait_for_all()
        with phases.lock:
            for stage in self._stages.on[StepStage.before_step]:
                stage.before_step(step + 1)
            status = self._consistency.status_for(None)
            start = StepStart(step, exchange.wait_for_statuses, status=status)
            exchange.begin(start, contributors.begin_without)
            exchange.submit_rest(discards=True)
            exchange.submit_buffers(shadow=True)
            self._exempt.run(lambda: self._updates.record_first(0))
            self._updates.reset(None, set_to_none=True)
            if self._updates.defers():
                self._update.end(self._consistency.ending, updates=True)
            else:
                exchange.end()
                self._step_whole()
            phases.refresh()
        return True

    def _step_whole(self) -> None:
        trained = self._exchange.layout.trained
        for index, gradient in self._exchange.take_arrived(None).gradients:
            set_raw_grad(trained[index].tensor, gradient)
        self._update.guarded(lambda: self._updates.step_whole(0))
        for entry in trained:
            set_raw_grad(entry.tensor, None)
        self._stale_flags.mark()
