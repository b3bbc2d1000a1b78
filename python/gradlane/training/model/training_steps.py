"""The training steps of one prepared model: the parts of the kernel, put together.

In every step each parameter's gradient is the mean over all ranks of their `.grad`, none counting
as zeros. A gradient comes in by `intake`; `step_end` is what `optimizer.step()` and `zero_grad()`
call; a touch of a parameter, gradient or buffer waits at the `gate`. After a failure all of them
raise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from gradlane.errors import UsageError
from gradlane.training.model.clipping_calls import ClippingCalls
from gradlane.training.model.contributors import Contributors
from gradlane.training.model.evaluations import Evaluations
from gradlane.training.model.factor_intake import FactorIntake
from gradlane.training.model.gradient_hooks import GradientHooks
from gradlane.training.model.kernel.gate import Gate
from gradlane.training.model.kernel.intake import Intake
from gradlane.training.model.kernel.parts import KernelParts
from gradlane.training.model.kernel.phases import Phase
from gradlane.training.model.kernel.step_end import StepEnd
from gradlane.training.model.kernel.update import StepUpdate
from gradlane.training.model.member_numbers import MemberNumbers
from gradlane.training.model.model_structure import ModelStructure
from gradlane.training.model.number_exchange import NumberExchange
from gradlane.training.model.others_steps import OthersSteps
from gradlane.training.model.rank_status import RankNumbers
from gradlane.training.model.scaler_calls import ScalerCalls
from gradlane.training.model.stages.build import ModelStages
from gradlane.training.model.step_listeners import StepListeners
from gradlane.training.rendezvous.membership import Membership


class TrainingSteps:
    """Holds the parts that drive one model through its training steps."""

    def __init__(
        self,
        parts: KernelParts,
        stages: ModelStages,
        structure: ModelStructure,
        listeners: StepListeners,
        check_unchanged: Callable[[], None],
        membership: Membership,
        contributors: Contributors,
        numbers: NumberExchange,
    ) -> None:
        """Start after step 0.

        Args:
            parts: the lower half of the kernel.
            stages: those that calls go to.
            structure: the modules and parameters that were prepared.
            listeners: called at the end of each training step.
            check_unchanged: raises `UsageError` if the model is not the one that was prepared.
            membership: the ranks that train.
            contributors: of the steps.
            numbers: exchanges bytes between two steps.
        """
        self.phases = parts.phases
        """Where the step is."""
        self.exchange = parts.exchange
        """Submits gradients and takes back their means."""
        self.lazy = parts.lazy
        """The classes of the trained parameters."""
        self.stages = stages
        """Those that calls of the session go to."""
        self.update = StepUpdate(parts)
        """Takes means and applies them."""
        self.hooks = GradientHooks([one.tensor for one in self.exchange.layout.trained])
        """Those that take gradients."""
        self.intake = Intake(parts, self.update, self.hooks, structure, check_unchanged)
        """Takes gradients and begins steps."""
        self.factors = FactorIntake(parts, self.intake)
        """Takes factors in place of gradients."""
        self.step_end = StepEnd(
            parts, self.update, self.intake, check_unchanged, listeners.step_ended
        )
        """Ends steps: `optimizer.step()` and `zero_grad()`."""
        self.evaluations = Evaluations(parts, self.update, self.intake, check_unchanged, numbers)
        """Steps optimizers that call their closure themselves."""
        self.gate = Gate(parts, self.update)
        """Waits before something is touched."""
        self.clipping = ClippingCalls(parts, self.update, self.intake, stages, check_unchanged)
        """Clips means by their norm."""
        self.scaler = ScalerCalls(parts, self.update, self.intake, stages.unscaling)
        """Gives `GradScaler` what it looks at."""
        self.others = OthersSteps(parts, self.update, self.intake, stages.consistency, contributors)
        """Goes along in steps that this rank takes no part in."""
        self.numbers = MemberNumbers(
            membership,
            self.phases.failure,
            functools.partial(self._exchange_numbers, numbers),
            self.exchange.layout.number_bytes,
            self.exchange.training_step_of,
            self._check_between_steps,
        )
        """Gathers numbers of all members between two steps."""

    @property
    def step(self) -> int:
        """Number of the current training step; 0 before the first gradient."""
        return self.exchange.training_step

    @property
    def in_join(self) -> bool:
        """Whether the program is inside `session.join()`."""
        return self.stages.consistency.join is not None

    def _check_between_steps(self) -> int:
        """Return the number of the last step.

        Raises:
            UsageError: the model is in the middle of one.
        """
        if self.phases.phase in (Phase.BACKWARD, Phase.ATTACHED):
            raise UsageError(
                f"session.gather_integers() inside step {self.step}: call it after "
                "optimizer.step() or zero_grad()"
            )
        return self.step

    def _exchange_numbers(
        self, numbers: NumberExchange, generation: int, size: int, part: bytes
    ) -> dict[int, RankNumbers]:
        """Exchange bytes with all ranks, once the last step's update is done."""
        self.update.wait_for_all()
        with self.phases.lock:
            return numbers.exchange(generation, size, part)
