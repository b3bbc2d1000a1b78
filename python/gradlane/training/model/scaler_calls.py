"""What `GradScaler` finds in the groups of a prepared optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor

from gradlane.training.model.kernel.intake import Intake
from gradlane.training.model.kernel.parts import KernelParts
from gradlane.training.model.kernel.phases import Phase
from gradlane.training.model.kernel.update import StepUpdate
from gradlane.training.model.stages.step_unscaling import StepUnscaling
from gradlane.training.model.stages.unscaling import Unscaling


class ScalerCalls:
    """Gives a scaler means, or stand-ins for means that are still to arrive."""

    def __init__(
        self, parts: KernelParts, update: StepUpdate, intake: Intake, unscaling: Unscaling
    ) -> None:
        """Serve the scalers of a model.

        Args:
            parts: those below.
            update: waits for means.
            intake: knows the gradients.
            unscaling: unscales means as they arrive.
        """
        self._phases = parts.phases
        self._exchange = parts.exchange
        self._update = update
        self._updates = parts.updates
        self._intake = intake
        self._stages = parts.stages
        self._unscaling = unscaling
        self._exempt = parts.exempt
        trained = parts.exchange.layout.trained
        self._index_of = {id(entry.tensor): index for index, entry in enumerate(trained)}

    def unscale(self, group: list[Tensor]) -> list[Tensor]:
        """Return what `GradScaler` is to find in a group of the optimizer.

        Gradients that only accumulated here are averaged before: ranks that each looked at their
        own would skip different steps. Where the last step was unscaled as well, no mean is waited
        for: the scaler finds stand-ins once the norm says whether all means are finite, which it is
        exactly if all of them are, and each mean is unscaled as it arrives.

        Args:
            group: the optimizer's own list of parameters.

        Raises:
            UsageError: the gradients were changed since backward.
            GradlaneError: the session has failed.
        """
        phases, exempt, unscaling = self._phases, self._exempt, self._unscaling
        plain = list(list.__iter__(group))
        with phases.lock:
            if phases.phase in (Phase.IDLE, Phase.PENDING) and not exempt.depth:
                if not self._held_of(plain):
                    self._intake.require_gradients("GradScaler")
                elif not self.is_open(plain):
                    return plain
            if phases.phase is Phase.LOCAL:
                self._intake.average_local()
            if exempt.depth or phases.accumulates or phases.running_backwards:
                return plain
            unscaling.refuse_scales(self._exchange.training_step)
            is_first = unscaling.note_group(id(group))
            may_begin = (
                not self._stages.changes_means
                and self._update.may_change_arriving()
                and unscaling.covers_all()
            )
            if not is_first or not (unscaling.changes_means or may_begin):
                return plain
            if phases.phase is Phase.BACKWARD:
                self._update.submit_ahead()
            if not math.isfinite(self._exchange.norm.wait()):
                # The scaler finds out of which optimizer's it is.
                self._update.attach()
                return plain
            indices = {self._index_of[id(one)] for one in plain if id(one) in self._index_of}
            part = StepUnscaling((one.device for one in plain), indices)
            unscaling.add(part)
            phases.refresh()
            return part.stand_ins()

    def see(self, group: list[Tensor]) -> None:
        """Note that `GradScaler` looks at a group whose means are in `.grad`.

        On other ranks, whose program has not looked at them before, they may still arrive; all
        ranks have the norm of the next step measured, or none.
        """
        with self._phases.lock:
            self._unscaling.note_group(id(group))

    def is_open(self, group: Iterable[Tensor]) -> bool:
        """Return whether a group's optimizer is still to step on means that are on their way.

        Args:
            group: the parameters, read without waiting.
        """
        pending = self._phases.phase is Phase.PENDING and self._stages.changes_means
        if not (pending and self._updates.has_open):
            return False
        held = self._held_of(group)
        return bool(held) and self._phases.pending.issuperset(held)

    def _held_of(self, group: Iterable[Tensor]) -> list[int]:
        """Return the parameters of a group that an optimizer may still step in the ended step."""
        if not self._updates.has_open:
            return []
        indices = (self._index_of.get(id(one)) for one in group)
        return [index for index in indices if index is not None and self._updates.is_held(index)]
