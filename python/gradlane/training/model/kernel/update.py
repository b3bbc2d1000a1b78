"""Means of a step as they arrive: into `.grad`, or into the optimizer, by parts.

`attach` waits for all of them before `optimizer.step()`; after it `settle` and `settle_some` wait
for what something is about to touch, and step the parameters of all that has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from gradlane.errors import SessionFailedError
from gradlane.training.model.kernel.parts import KernelParts
from gradlane.training.model.kernel.phases import Phase
from gradlane.training.model.rank_status import StepEnding
from gradlane.training.model.stages.stage import StepStage
from gradlane.training.modules.gradient_intake import raw_grad, set_raw_grad, sum_of
from gradlane.training.modules.shared_storage import SharedMemoryGroups
from gradlane.training.torch_internals import DisableTorchFunctionSubclass


class StepUpdate:
    """Takes the means of one step after the other, and updates parameters with them."""

    def __init__(self, parts: KernelParts) -> None:
        """Start with nothing to come; `parts` are those below."""
        self._phases = parts.phases
        self._failure = parts.phases.failure
        self._exchange = parts.exchange
        self._updates = parts.updates
        self._stages = parts.stages
        self._lazy = parts.lazy
        self._exempt = parts.exempt
        self._stale_flags = parts.stale_flags
        self._trained = parts.exchange.layout.trained
        self._buffers_index = parts.exchange.layout.buffers_index
        self._shared_memory = SharedMemoryGroups([entry.tensor for entry in self._trained])
        parts.phases.failure.subscribe(parts.stale_flags.mark)
        self._discards = False
        self._given: list[int] = []
        """Parameters that had a gradient on this rank when all was submitted before the end."""

    # ---- before optimizer.step()

    def begin(self, *, waits: bool) -> None:
        """Begin a step on the channel; `waits`: touches of its gradients wait."""
        self._phases.phase = Phase.BACKWARD
        if waits and self._stages.keeps_means:
            self._lazy.expect_updates()
        elif waits:
            self._lazy.expect_gradients()

    def submit_rest(self) -> None:
        """Submit what is left of this step."""
        # A list of parameters made in inference mode must not leave such tensors in `.grad`.
        with torch.inference_mode(False), torch.no_grad():
            self._exchange.submit_rest()
            self._exchange.submit_buffers(shadow=False)
        for stage in self._stages.on[StepStage.submitted]:
            stage.submitted(self._exchange.wait_for_statuses, self._drop)

    def may_change_arriving(self) -> bool:
        """Return whether means may be changed by their norm as they arrive."""
        under_way = self._phases.phase is Phase.BACKWARD
        return under_way and self._exchange.norm.is_measured and self._updates.defers()

    def submit_ahead(self) -> None:
        """Submit the rest of a step whose means are changed as they arrive, if they were not."""
        if not self._stages.changes_means:
            self._given = [
                index
                for index, entry in enumerate(self._trained)
                if self._exchange.has_taken(index) or raw_grad(entry.tensor) is not None
            ]
            self.submit_rest()

    @property
    def given(self) -> list[int]:
        """Parameters that have had a gradient on this rank in this step."""
        return self._given if self._stages.changes_means else self._exchange.present()

    def attach(self) -> None:
        """Wait for all averaged gradients of a step and put them into `.grad`."""
        with self._phases.lock:
            if self._phases.phase is not Phase.BACKWARD:
                return
            self.submit_rest()
            arrived = self._exchange.take_arrived(None)
            for stage in self._stages.on[StepStage.arrived]:
                stage.arrived(arrived)
            for stage in self._stages.on[StepStage.attached]:
                stage.attached()
            for index, gradient in arrived.gradients:
                parameter = self._trained[index].tensor
                fresh = raw_grad(parameter)
                if fresh is not None:
                    # Of a backward after clipping: it adds up on the mean.
                    with torch.no_grad(), torch.inference_mode(False):
                        gradient = sum_of(gradient, fresh)
                set_raw_grad(parameter, self._exchange.give_back(index, gradient))
            self._phases.phase = Phase.ATTACHED
            self._lazy.make_ready()
            self._phases.refresh()

    # ---- the end of a step

    def end(self, ending: StepEnding, *, updates: bool = False) -> None:
        """End the step on the channel: whatever is still to come is pending from now on.

        Args:
            ending: how this rank ends it.
            updates: the parameters are updated as their gradients arrive.
        """
        phases = self._phases
        self._exchange.end()
        attached = phases.phase is Phase.ATTACHED
        for stage in self._stages.on[StepStage.ended]:
            stage.ended(ending)
        phases.phase = Phase.IDLE if attached else Phase.PENDING
        self._stale_flags.mark()
        if attached:
            return
        if self._buffers_index >= 0:
            phases.pending.add(self._buffers_index)
        if updates:
            phases.pending.update(range(len(self._trained)))
            self._lazy.expect_updates()
        else:
            self._lazy.make_ready()

    def end_with_nothing(self) -> None:
        """Submit nothing more in this step, and end it."""
        self.submit_nothing_more(shadow=False)
        self.end(StepEnding.DISCARDED)
        self._phases.refresh()

    def submit_nothing_more(self, *, shadow: bool) -> None:
        """Submit the absence of all that was not submitted in this step."""
        self._discards = True
        self._exchange.submit_rest(discards=True)
        self._exchange.submit_buffers(shadow=shadow)

    def take_nothing(self) -> None:
        """Wait for the end of a step whose means are not wanted."""
        self._exchange.take_arrived(None, discards=True)
        self._discards = False

    def _drop(self) -> None:
        self._discards = True
        self.end(StepEnding.DISCARDED)

    def finish(self) -> None:
        """Bring the current step to an end, so that the channel can be closed in order."""
        if self._failure.error is not None:
            return
        if self._phases.phase is Phase.BACKWARD:
            self.end_with_nothing()
        elif self._phases.phase is Phase.ATTACHED:
            self.end(StepEnding.DISCARDED)
        self.wait_for_all()

    def spend_step(self, run: Callable[[int], None]) -> None:
        """Give a step of the channel to something else than training; a collective call.

        Args:
            run: called with the step's number; it begins the step and waits for its end.

        Raises:
            GradlaneError: the session has failed.
        """
        self._failure.raise_failure()
        self.wait_for_all()
        with self._phases.lock:
            self._exchange.spend(run)

    # ---- after it

    def wait_for_all(self) -> None:
        """Wait until every parameter has its update."""
        phases = self._phases
        if phases.phase is not Phase.PENDING:
            return
        with phases.update_lock:
            if phases.phase is Phase.PENDING:
                self._failure.raise_failure()
                self._take_and_apply(None)
                phases.pending.clear()
                self._settle_classes({*range(len(self._trained))})
                phases.phase = Phase.IDLE
                self._discards = False
                phases.refresh()

    def wait_for(self, indices: Iterable[int]) -> None:
        """Wait until some parameters, or buffers, have their update."""
        phases = self._phases
        with phases.update_lock:
            needed = [index for index in indices if index in phases.pending]
            if not needed:
                return
            self._take_and_apply(self._shared_memory.whole(needed))
            if not phases.pending and not self._discards:
                phases.phase = Phase.IDLE
            phases.refresh()

    def _take_and_apply(self, needed: list[int] | None) -> None:
        phases, shared = self._phases, self._shared_memory
        arrived = self._exchange.take_arrived(
            needed,
            discards=self._discards or self._stages.keeps_means,
            lends=self._updates.drops_means,
        )
        for stage in self._stages.on[StepStage.arrived]:
            stage.arrived(arrived)
        due = phases.pending.difference(arrived.indices, shared.held)
        ready = shared.hold_back(arrived.gradients, due)
        done = phases.pending - due - shared.held
        # Other threads wait until it is done. Those of a program's own optimizer step parameters.
        holds = self._updates.is_known
        if not holds:
            self._settle_classes(done)
        if ready:
            self.guarded(lambda: self._apply(ready))
        if holds:
            self._settle_classes(done)
        if done == phases.pending:
            self._updates.end_parts()
        # Not before: another thread that finds nothing pending goes on without the lock.
        phases.pending -= done

    def _apply(self, ready: list[tuple[int, Tensor]]) -> None:
        if self._updates.is_known and self._lazy.are_plain:
            with DisableTorchFunctionSubclass():  # Its own operations on parameters ask nothing.
                self._updates.apply(ready)
        else:
            self._updates.apply(ready)

    def _settle_classes(self, done: set[int]) -> None:
        count = len(self._trained)
        indices = None if done.issuperset(range(count)) else [one for one in done if one < count]
        if self._stages.hides_gradients:
            # A look at a mean before zero_grad() is refused.
            self._lazy.expect_gradients(indices)
        else:
            self._lazy.make_ready(indices)

    def guarded(self, update: Callable[[], None]) -> None:
        """Run an update; if it breaks off, the parameters are a mixture and stay unreadable."""
        self._phases.update_lock.begin_update(self._exchange.training_step)
        try:
            self._exempt.run(update)
        except BaseException as error:
            step = self._exchange.training_step
            failure = SessionFailedError(
                f"the optimizer broke off in step {step} with {type(error).__name__}: {error}; "
                "some parameters may be updated and others not: restart from the last checkpoint",
                step - 1,
            )
            self._failure.fail(failure)
            if isinstance(error, Exception):
                raise failure from error
            raise
        finally:
            self._phases.update_lock.end_update()
