"""The call `session.clip_grad_norm_()` of one model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradlane.errors import UsageError
from gradlane.training.model.exact_norm import norm_dtype
from gradlane.training.model.kernel.intake import Intake
from gradlane.training.model.kernel.parts import KernelParts
from gradlane.training.model.kernel.phases import Phase
from gradlane.training.model.kernel.update import StepUpdate
from gradlane.training.model.stages.build import ModelStages
from gradlane.training.model.stages.step_clipping import StepClipping
from gradlane.training.modules.forward_order import inside_backward
from gradlane.training.modules.gradient_intake import raw_grad, values_of


class ClippingCalls:
    """Clips averaged gradients by the norm of all of them: now, or as they arrive."""

    def __init__(
        self,
        parts: KernelParts,
        update: StepUpdate,
        intake: Intake,
        stages: ModelStages,
        check_unchanged: Callable[[], None],
    ) -> None:
        """Clip nothing yet.

        Args:
            parts: those below.
            update: waits for means.
            intake: knows the gradients.
            stages: what is done to means as they arrive.
            check_unchanged: raises `UsageError` if the model is not the one that was prepared.
        """
        self._phases = parts.phases
        self._exchange = parts.exchange
        self._update = update
        self._updates = parts.updates
        self._intake = intake
        self._weighting = stages.weighting
        self._unscaling = stages.unscaling
        self._clipping = stages.clipping
        self._check_unchanged = check_unchanged
        self._trained = parts.exchange.layout.trained

    def clip(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the averaged gradients of this step by the norm of all of them, as torch does.

        Where the last step was clipped as well, nothing waits: the norm is there once every slice
        is reduced, and means are clipped as they arrive. Otherwise all means are waited for.

        Args:
            max_norm: the largest norm that gradients keep.
            norm_type: p of the p-norm; others than 2 wait for all means.
            error_if_nonfinite: wait for the norm, and refuse one that is infinite or NaN.

        Returns:
            The norm before clipping, of no dimensions; it waits when it is read.

        Raises:
            RuntimeError: `error_if_nonfinite`, and the norm is not finite.
            UsageError: the means cannot be had here or now.
            GradlaneError: the session has failed.
        """
        phases, step = self._phases, self._exchange.training_step
        with phases.lock:
            phases.failure.raise_failure()
            self._clipping.refuse_added_up(max_norm, step)
            if self._updates.has_open and phases.phase in (Phase.IDLE, Phase.PENDING):
                raise UsageError(
                    f"clip_grad_norm_() after one optimizer of the model has stepped in step "
                    f"{step} and before another: clip before the first one steps"
                )
            if inside_backward() or phases.accumulates:
                where = "inside backward()" if inside_backward() else "inside session.no_sync()"
                raise UsageError(
                    f"clip_grad_norm_() {where} after step {step}: gradients are still to come; "
                    "clip before optimizer.step(), outside of both"
                )
            if not self._intake.take_by_hand():
                # The norm of no gradients is 0, unless a changed model has them elsewhere.
                self._check_unchanged()
            if phases.phase is Phase.LOCAL:
                self._intake.average_local()
            phases.running_backwards.clear()
            self._clipping.note_clipped(max_norm, norm_type)
            wait = None
            if norm_type == 2.0 and self._update.may_change_arriving():
                wait = self._arriving_norm()
            if wait is None:
                clipping = self._clip_now(max_norm, norm_type)
            else:
                self._update.submit_ahead()
                dtype = norm_dtype(entry.dtype for entry in self._trained)
                clipping = StepClipping(max_norm, dtype, wait, self._clipping.count)
                self._clipping.clip_arriving(clipping)
                phases.refresh()
            if error_if_nonfinite:
                clipping.check_finite()
            return clipping.norm

    def _arriving_norm(self) -> Callable[[], float] | None:
        """Return what waits for the norm of the means as they will be, or None: not known."""
        inverse_scale, weighting = self._unscaling.inverse_scale(), self._weighting.factor
        if self._clipping.changes_means or inverse_scale is None:
            return None

        def wait() -> float:
            factor = 1.0 if weighting is None else weighting()
            return inverse_scale * factor * self._exchange.norm.wait()

        return wait

    def _clip_now(self, max_norm: float, norm_type: float) -> StepClipping:
        """Clip the gradients in `.grad`, after all means are there."""
        self._update.attach()
        self._update.wait_for_all()
        found = [raw_grad(entry.tensor) for entry in self._trained]
        gradients = [gradient for gradient in found if gradient is not None]
        if norm_type == 2.0:
            norm = self._exchange.norm.of(gradients)
        else:
            plain = [one.to_dense() if one.is_sparse else one.detach() for one in gradients]
            norms = [torch.linalg.vector_norm(one, norm_type).cpu() for one in plain]
            norm = float(torch.linalg.vector_norm(torch.stack(norms), norm_type)) if norms else 0.0
        dtype = norm_dtype(gradient.dtype for gradient in gradients)
        clipping = StepClipping(max_norm, dtype, lambda: norm, self._clipping.count)
        clipping.factor()
        clipping.scale([values_of(gradient) for gradient in gradients])
        return clipping
