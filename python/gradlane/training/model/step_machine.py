"""The training steps of one prepared model, as a state machine.

In every step each parameter's gradient is the mean over all ranks of their `.grad`, none counting
as zeros. `take_gradient` is the way in; a touch of a parameter comes through `before_forward`,
`before_read`, `before_list` or `before_operation` and waits for its update, a touch of a gradient
comes through `before_grad`. After a failure all of them raise.
"""

from __future__ import annotations

import enum
import functools
import json
import math
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from gradlane.errors import GradlaneError, SessionFailedError, UsageError
from gradlane.training.factors.block import Part
from gradlane.training.log import log
from gradlane.training.model.backward_passes import BackwardPassCounter
from gradlane.training.model.clipping import (
    StepClipping,
    StepUnscaling,
    StepWeighting,
    norm_dtype,
)
from gradlane.training.model.consistency_check import (
    ConsistencyCheck,
    RankNumbers,
    Statuses,
    StepEnding,
)
from gradlane.training.model.deferred_update import undisturbed
from gradlane.training.model.failure_latch import FailureLatch
from gradlane.training.model.full_wait_warning import FullWaitWarning
from gradlane.training.model.gradient_exchange import GradientExchange
from gradlane.training.model.lazy_parameters import Exemption, LazyParameters
from gradlane.training.model.local_gradients import LocalGradients
from gradlane.training.model.server_updates import ServerUpdates
from gradlane.training.model.update_set import UpdateSet
from gradlane.training.modules.forward_order import ForwardOrder, inside_backward
from gradlane.training.modules.gradient_intake import (
    raw_grad,
    set_raw_grad,
    sum_of,
    values_of,
)
from gradlane.training.modules.shared_storage import SharedMemoryGroups
from gradlane.training.rendezvous.membership import Membership
from gradlane.training.rendezvous.tensor_table import names_of
from gradlane.training.torch_internals import (
    DisableTorchFunctionSubclass,
    graph_task_id,
    queue_callback,
)

_MOVES = nn.Module._apply.__code__
"""Takes gradients along in `model.to(...)` and its like; no program sees them there."""
_ON_SERVERS = (
    'with update="server" the averaged gradients stay on the servers, so nothing can be clipped '
    'or read; use update="worker" for that'
)


UPDATE_NOTICE_S = 30.0
"""Seconds that a thread waits for another one's update before that is told of."""
_NO_BACKWARD = -2
"""No number of a backward, and not what torch tells outside of one."""
_UNSCALED_DTYPES = {torch.float32, torch.float64, torch.bfloat16}
"""`GradScaler` refuses f16 gradients, and knows no complex ones."""


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


class ModelHooks(Protocol):
    """The hooks on a model, as its steps see them."""

    def move_last(self, index: int, parameter: Tensor) -> bool:
        """Have other hooks on the parameters run first; called as a backward begins.

        Returns:
            Whether the hook of this parameter is called again later in this backward.
        """

    def check_still_frozen(self) -> None:
        """Check that no parameter is trained that was frozen; called as a backward begins.

        Raises:
            UsageError: one is.
        """

    def mark_stale(self) -> None:
        """Have compiled code wait before it uses any parameter again."""

    def step_ended(self) -> None:
        """Call those that listen to the end of training steps."""


class StepMachine:
    """Drives one model through its training steps.

    Everything that changes the state holds the lock: several threads may run forward and backward
    of one model, and one more may save it meanwhile.
    """

    def __init__(
        self,
        exchange: GradientExchange,
        update: UpdateSet,
        consistency: ConsistencyCheck,
        failure: FailureLatch,
        exempt: Exemption,
        hooks: ModelHooks,
        check_unchanged: Callable[[], None],
        on_step_begin: Callable[[int], None],
        *,
        server: ServerUpdates | None = None,
        order: ForwardOrder | None = None,
        adding_up: str = "",
        membership: Membership | None = None,
    ) -> None:
        """Start after step 0.

        Args:
            exchange: submits gradients and takes back their means.
            update: runs the optimizers: whole, or later and in parts.
            consistency: compares how the ranks train.
            failure: the model's.
            exempt: threads in it read parameters without waiting.
            hooks: those on the model.
            check_unchanged: raises `UsageError` if the model is not the one that was prepared.
            on_step_begin: called with the number of a step before it begins; all is settled then.
            server: updates of `update="server"`, or None where each rank updates.
            order: notes the first training forward, for priorities, or None.
            adding_up: the codec that adds gradients of several steps up with momentum, or empty.
            membership: the ranks that train, where training goes on without lost ones.
        """
        self._exchange = exchange
        self._update = update
        self._consistency = consistency
        self._failure = failure
        self.exempt = exempt
        self._hooks = hooks
        self._check_unchanged = check_unchanged
        self._on_step_begin = on_step_begin
        self._server = server
        self._order = order
        self._adding_up = adding_up
        self._membership = membership
        self._trained = exchange.layout.trained
        self._dtypes = {entry.dtype for entry in self._trained}
        self._captured = exchange.layout.captured
        self._buffers_index = exchange.layout.buffers_index
        self._index_of = {id(entry.tensor): index for index, entry in enumerate(self._trained)}
        parameters = [entry.tensor for entry in self._trained]
        self._shared_memory = SharedMemoryGroups(parameters)
        self._passes = BackwardPassCounter(len(parameters))
        self._local = LocalGradients(self._trained)
        self._lazy = LazyParameters(parameters, self)
        self._phase = Phase.IDLE
        self._pending: set[int] = set()
        self._lock = threading.RLock()
        self._running_backwards: weakref.WeakValueDictionary[int, Callable[[], None]] = (
            weakref.WeakValueDictionary()
        )
        """By number, what each calls as it ends; torch lets go of that of one that raised, too."""
        self._updating_thread = ""
        """The thread in which an update runs now, or empty."""
        self._counting_in = _NO_BACKWARD
        """The backward of which gradients of the step are taken as they come; nothing but their
        count is looked at."""
        self._factors_of_backward: set[int] = set()
        """Tensors of which the running backward gave factors."""
        self._server_settings = ""
        self._discards = False
        self._weight: int | None = None
        """Samples behind this rank's gradients of the next step; None: the program has not said."""
        self._weighting: StepWeighting | None = None
        """How the means of this step become means over all samples."""
        self._scalings: list[StepUnscaling | StepClipping] = []
        """How the means of this step are unscaled and clipped as they arrive."""
        self._scaled: list[int] = []
        """Parameters that had a gradient on this rank when that began."""
        self._unscaled: set[int] = set()
        """Lists of parameters that a scaler has seen in this step, by `id`."""
        self._clipped_to: tuple[float, ...] = ()
        """The norms that gradients of this step were clipped to, for all ranks to compare."""
        self._zeroed = True
        self._adds_up_on_means = False
        self._steps_whole = False
        self._full_wait_warning = FullWaitWarning()
        self.accumulates = False
        """Whether gradients only add up on this rank, as inside `session.no_sync()`."""
        self.reads_averages = False
        """Whether the program has read averaged gradients between backward and step."""
        self.reads_wait = False
        """Whether a read of a parameter may have to wait; while it is down, nothing is asked."""
        self.lists_wait = False
        """The same for parameters that are listed."""
        failure.subscribe(self._on_failure)
        self._refresh()

    # ---- state

    @property
    def step(self) -> int:
        """Number of the current training step; 0 before the first gradient."""
        return self._exchange.training_step

    def training_step_of(self, step: int) -> int:
        """Number of the training step that a step of the channel was, or came after."""
        return self._exchange.training_step_of(step)

    @property
    def exchange(self) -> GradientExchange:
        """Submits gradients and takes back their means."""
        return self._exchange

    @property
    def consistency(self) -> ConsistencyCheck:
        """Compares how the ranks train."""
        return self._consistency

    @property
    def phase(self) -> Phase:
        """Where the current step is."""
        return self._phase

    @property
    def failure(self) -> GradlaneError | None:
        """The first failure, which every call raises, or None."""
        return self._failure.error

    @property
    def serves(self) -> bool:
        """Whether updates run on the servers."""
        return self._server is not None

    @property
    def in_join(self) -> bool:
        """Whether the program is inside `session.join()`."""
        return self._consistency.join is not None

    @property
    def buffers_index(self) -> int:
        """Tensor number of the packed buffers, or -1."""
        return self._buffers_index

    # ---- gradients as backward gives them

    def take_gradient(self, index: int, parameter: Tensor) -> None:
        """Note a parameter's fresh gradient, and submit it if it is whole: the hook.

        Raises:
            UsageError: the gradient comes at a moment, or in a form, that has no meaning.
            GradlaneError: the session has failed.
        """
        if self._steps_whole:
            # No lock: the thread that steps has it, and may wait for this one.
            raise UsageError(
                f"backward() inside optimizer.step(): the gradient of "
                f"{self._trained[index].name!r} came while step {self.step} was being applied; "
                "give such an optimizer a closure, or call backward() before step()"
            )
        with self._lock:
            if (
                graph_task_id() != self._counting_in
                or self.accumulates
                or self._exchange.is_submitted[index]
                or index in self._captured
                or not parameter.requires_grad
            ):
                self._take_checked(index, parameter)
            elif self._passes.is_last(index):
                self._exchange.submit(index)
            else:
                self._exchange.look(index)

    def _take_checked(self, index: int, parameter: Tensor) -> None:
        """Take a gradient whose moment and form are to be looked at."""
        # No variable holds the gradient: it is lent as it is if there is no other reference.
        if raw_grad(parameter) is None and (index in self._captured or not parameter.requires_grad):
            # Factors were taken, or it was frozen since the forward: torch runs the hook anyway.
            return
        if graph_task_id() not in self._running_backwards and (
            self._note_backward() and self._hooks.move_last(index, parameter)
        ):
            return
        if (
            self._phase is not Phase.BACKWARD
            or self._scalings
            or self._exchange.is_submitted[index]
        ):
            self._check_in_time(index)
        if self.accumulates:
            gradient = raw_grad(parameter)
            if gradient is not None:
                self._local.note(index, gradient)
            return
        if index in self._captured:
            self._exchange.hold_dense(index)
            self._factors_of_backward.add(index)
        elif self._passes.is_last(index):
            self._exchange.submit(index)
        else:
            self._exchange.look(index)
        if not self._scalings:
            self._counting_in = graph_task_id()

    def wants_factors(self, index: int) -> bool:
        """Whether factors may take the place of a gradient now: those that add up may not."""
        return index in self._captured and not self.accumulates and self._failure.error is None

    def take_factors(self, index: int, part: Part) -> None:
        """Note factors of a part of a parameter's fresh gradient.

        Raises:
            UsageError: they come after the last ones that were to be expected.
            GradlaneError: the session has failed.
        """
        with self._lock:
            self._note_backward()
            self._check_in_time(index)
            self._exchange.hold_factors(index, part)
            self._factors_of_backward.add(index)

    def end_parts(self, index: int) -> None:
        """Submit the factors that a backward gave for a parameter, if they are whole.

        Called once in each backward, after all layers that use the parameter, as the hook of a
        gradient is: it counts the same whether factors or gradients came.
        """
        with self._lock:
            if index in self._factors_of_backward:
                self._factors_of_backward.discard(index)
                if self._passes.is_last(index):
                    self._exchange.submit(index)

    def _check_in_time(self, index: int) -> None:
        """Begin a step with its first gradient, and refuse one that comes too late."""
        if self._awaits_step:
            # A backward of a forward before clipping.
            self.attach()
        if self._phase is not Phase.BACKWARD:
            self._begin_local()
            if not self.accumulates:
                self._begin_step()
        elif self._exchange.is_submitted[index]:
            self._refuse_late_gradient(index)

    def _note_backward(self) -> bool:
        """Note the backward that this thread is in, until it ends; returns whether it is new."""
        task = graph_task_id()
        if task in self._running_backwards or task == -1:
            return False
        self._hooks.check_still_frozen()
        ended = functools.partial(self._end_backward, task)
        self._running_backwards[task] = ended
        queue_callback(ended)
        return True

    def _end_backward(self, task: int) -> None:
        """Give gradients that the program keeps their means before backward returns, as DDP does:
        no look at them can be noticed."""
        self._running_backwards.pop(task, None)
        self._counting_in = _NO_BACKWARD
        if (
            self._phase is Phase.BACKWARD
            and not (self._running_backwards or self._scalings or self.accumulates)
            and self._server is None
            and self._failure.error is None
            and self._exchange.is_watched()
        ):
            self._note_full_wait("keeps references to gradients, which get the means in it")
            self.attach()

    def _note_full_wait(self, why: str) -> None:
        self.reads_averages = True
        if self._update.defers():
            self._full_wait_warning.note(self.step, why, clips=self.clips)

    def _refuse_late_gradient(self, index: int) -> NoReturn:
        refusal = UsageError(
            f"parameter {self._trained[index].name!r} got another gradient in step {self.step} "
            "after its gradient had been sent: it got more of them than in any step before; run "
            "every backward() of a step but the last inside `with session.no_sync():`"
        )
        # Submitted memory cannot be taken back, so no rank can end this step.
        self._failure.fail(refusal)
        self._exchange.abort(str(refusal))
        raise refusal

    # ---- a step begins

    def _begin_local(self) -> None:
        """Leave whatever phase there was: gradients add up locally from now on."""
        self._failure.raise_failure()
        if self._phase is Phase.LOCAL:
            return
        self.settle()
        if self._phase is Phase.ATTACHED:
            # As with DDP: the new gradients add up on the averaged ones, and are averaged again.
            self._exchange.end()
            self._consistency.ending = StepEnding.CARRIED_ON
        self._adds_up_on_means = self._server is not None and not self._zeroed
        self._zeroed = True
        self._local.clear()
        self._update.begin()
        self._phase = Phase.LOCAL
        self._refresh()

    def _begin_step(self, *, shadow: bool = False) -> None:
        if not any(status.shadow for status in self._exchange.statuses().values()):
            # Ranks that went along without data get the others' parameters at the end of join().
            self._on_step_begin(self.step + 1)
        if self._server is not None:
            self._server_settings = self.exempt.run(self._server.checked_rows)
        weight = None
        if not shadow:
            weight, self._weight = self._weight, None
        status = self._consistency.status_for(
            None if shadow else self.step, shadow=shadow, weight=weight
        )
        for scaling in self._scalings:
            if isinstance(scaling, StepClipping):
                # Nothing needed it, but the program may still read it.
                scaling.norm.resolve()
        self._scalings = []
        self._weighting = None
        if weight is not None:
            self._weighting = StepWeighting(self._exchange.wait_for_weighting)
        # Whoever has clipped or unscaled the last step does so in this one: so do all ranks, at
        # the same step.
        scales = self._clipped_to or (self._unscaled and self._unscales_all())
        measures = self._exchange.may_measure and bool(scales)
        if not shadow:
            self._clipped_to = ()
            self._unscaled = set()
        self._update.begin()
        self._exchange.begin(
            status, self._server_settings if self.serves else None, measures=measures
        )
        if self._order is not None and not self._order.is_empty:
            order, self._order = self._order, None
            self._exchange.switch_priorities(order)
        self._passes.begin()
        self._factors_of_backward.clear()
        self._phase = Phase.BACKWARD
        if not shadow:
            if self._server is None:
                self._lazy.expect_gradients()
            else:
                self._lazy.expect_updates()
        self._refresh()

    def average_local(self) -> None:
        """Begin to average what was only accumulated here, if that may be done now.

        Raises:
            UsageError: it was changed since backward.
            GradlaneError: the session has failed.
        """
        with self._lock:
            if not (self.accumulates or self.exempt.depth or inside_backward() or self.serves):
                self._failure.raise_failure()
                self._local.check(self.step + 1)
                self._begin_step()

    # ---- weight()

    def weigh(self, samples: int) -> None:
        """Have the next step average over samples in place of over ranks.

        Args:
            samples: behind this rank's gradients.

        Raises:
            UsageError: gradients of a step are under way, or it does not go with how they travel.
            GradlaneError: the session has failed.
        """
        with self._lock:
            self._failure.raise_failure()
            if self._phase in (Phase.BACKWARD, Phase.ATTACHED):
                raise UsageError(
                    f"session.weight() after backward() in step {self.step}: gradients have begun "
                    "to leave unweighted; call it before the first backward() whose gradients "
                    "leave"
                )
            if torch.float16 in self._dtypes:
                name = next(one.name for one in self._trained if one.dtype is torch.float16)
                raise UsageError(
                    f"session.weight() with parameter {name!r} of float16: gradients times "
                    "samples would overflow; train in float32 or bfloat16"
                )
            if self._captured:
                index = next(iter(self._captured))
                raise UsageError(
                    f"session.weight() with {self._trained[index].name!r}, which travels as "
                    "factors: these are not weighted; use a scheme without factors"
                )
            self._weight = samples

    # ---- clip_grad_norm_()

    @property
    def clips(self) -> bool:
        """Whether the gradients of this step were clipped by `clip_grad_norm_`."""
        return bool(self._clipped_to)

    @property
    def _awaits_step(self) -> bool:
        """Whether the step's means will be scaled as they arrive, and it has not ended."""
        return bool(self._scalings) and self._phase is Phase.BACKWARD

    def _may_scale_arriving(self) -> bool:
        """Return whether means may be scaled by their norm as they arrive."""
        return self._phase is Phase.BACKWARD and self._exchange.measures and self._update.defers()

    def _submit_scaled(self) -> None:
        """Submit the rest of a step whose means are scaled as they arrive."""
        if not self._scalings:
            self._scaled = [
                index
                for index, entry in enumerate(self._trained)
                if self._exchange.has_taken(index) or raw_grad(entry.tensor) is not None
            ]
            self._submit_rest()

    def unscale(self, group: list[Tensor]) -> list[Tensor]:
        """Return what `GradScaler` is to find in a group of the optimizer.

        Gradients that only accumulated here are averaged before: ranks that each looked at their
        own would skip different steps. Where the last step was unscaled as well, no mean is waited
        for: the scaler finds stand-ins once the norm says whether all means are finite, and each
        mean is unscaled as it arrives.

        Args:
            group: the optimizer's own list of parameters.

        Raises:
            UsageError: the gradients were changed since backward.
            GradlaneError: the session has failed.
        """
        plain = list(list.__iter__(group))
        with self._lock:
            if self._phase in (Phase.IDLE, Phase.PENDING) and not self.exempt.depth:
                if self._held_of(plain) and not self.unscales_open(plain):
                    return plain
                if not self._held_of(plain):
                    self._require_gradients("GradScaler")
            if self._phase is Phase.LOCAL:
                self.average_local()
            if self.exempt.depth or self.accumulates or self._running_backwards:
                return plain
            self._refuse_scales()
            again = id(group) in self._unscaled
            self._unscaled.add(id(group))
            is_begun = any(isinstance(scaling, StepUnscaling) for scaling in self._scalings)
            may_begin = not self._scalings and self._may_scale_arriving() and self._unscales_all()
            if again or not (is_begun or may_begin):
                return plain
            if self._phase is Phase.BACKWARD:
                self._submit_scaled()
            if not math.isfinite(self._exchange.wait_norm()):
                # The scaler finds out of which optimizer's it is.
                self.attach()
                return plain
            indices = {self._index_of[id(one)] for one in plain if id(one) in self._index_of}
            unscaling = StepUnscaling((one.device for one in plain), indices)
            self._scalings.append(unscaling)
            self._refresh()
            return unscaling.stand_ins()

    def unscales_open(self, group: Iterable[Tensor]) -> bool:
        """Return whether a group's optimizer is still to step on means that are on their way.

        Args:
            group: the parameters, read without waiting.
        """
        if not (self._phase is Phase.PENDING and self._scalings and self._update.has_open):
            return False
        held = self._held_of(group)
        return bool(held) and self._pending.issuperset(held)

    def _held_of(self, group: Iterable[Tensor]) -> list[int]:
        """Return the parameters of a group that an optimizer may still step in the ended step."""
        if not self._update.has_open:
            return []
        indices = (self._index_of.get(id(one)) for one in group)
        return [index for index in indices if index is not None and self._update.is_held(index)]

    def _refuse_scales(self) -> None:
        """Refuse scaled gradients where a codec adds up those of several steps."""
        if self._adding_up:
            raise UsageError(
                f"GradScaler in step {self.step}: codec {self._adding_up!r} adds up gradients of "
                "several steps, whose scales differ; train without the scaler, in bfloat16 for "
                "example"
            )

    def _unscales_all(self) -> bool:
        """Return whether a scaler unscales all means, before `optimizer.step()`."""
        return self._update.is_guarded and self._dtypes <= _UNSCALED_DTYPES

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
        with self._lock:
            self._failure.raise_failure()
            if self._adding_up:
                raise UsageError(
                    f"clip_grad_norm_() in step {self.step}: codec {self._adding_up!r} has added "
                    "up gradients of several steps, and their means are no gradients of one; "
                    f"leave the call out and give the codec clip={max_norm:g}, which clips each "
                    "rank's gradient before"
                )
            if self._update.has_open and self._phase in (Phase.IDLE, Phase.PENDING):
                raise UsageError(
                    f"clip_grad_norm_() after one optimizer of the model has stepped in step "
                    f"{self.step} and before another: clip before the first one steps"
                )
            if inside_backward() or self.accumulates:
                where = "inside backward()" if inside_backward() else "inside session.no_sync()"
                raise UsageError(
                    f"clip_grad_norm_() {where} after step {self.step}: gradients are still to "
                    "come; clip before optimizer.step(), outside of both"
                )
            if not self._take_by_hand():
                # The norm of no gradients is 0, unless a changed model has them elsewhere.
                self._check_unchanged()
            if self._phase is Phase.LOCAL:
                self.average_local()
            self._running_backwards.clear()
            self._clipped_to += (max_norm, norm_type)
            inverse_scale, weighting = self._inverse_scale(), self._weighting
            if norm_type == 2.0 and self._may_scale_arriving() and inverse_scale is not None:

                def wait() -> float:
                    factor = 1.0 if weighting is None else weighting.factor()
                    return inverse_scale * factor * self._exchange.wait_norm()

                self._submit_scaled()
                dtype = norm_dtype(entry.dtype for entry in self._trained)
                clipping = StepClipping(max_norm, dtype, wait)
                self._scalings.append(clipping)
                self._refresh()
            else:
                clipping = self._clip_now(max_norm, norm_type)
            if error_if_nonfinite:
                clipping.check_finite()
            return clipping.norm

    def _inverse_scale(self) -> float | None:
        """Return the one number that arriving means are multiplied with so far; None: not known.

        It is a power of two, so the norm of what is multiplied has the same bits.
        """
        if not self._scalings:
            return 1.0
        factors, covered = set(), 0
        for scaling in self._scalings:
            if not isinstance(scaling, StepUnscaling):
                return None
            factors.add(scaling.factor)
            covered += scaling.count
        if len(factors) > 1 or covered != len(self._trained):
            return None
        factor = factors.pop()
        return factor if math.frexp(factor)[0] == 0.5 else None

    def _clip_now(self, max_norm: float, norm_type: float) -> StepClipping:
        """Clip the gradients in `.grad`, after all means are there."""
        self.attach()
        self.settle()
        found = [raw_grad(entry.tensor) for entry in self._trained]
        gradients = [gradient for gradient in found if gradient is not None]
        if norm_type == 2.0:
            norm = self._exchange.norm_of(gradients)
        else:
            plain = [one.to_dense() if one.is_sparse else one.detach() for one in gradients]
            norms = [torch.linalg.vector_norm(one, norm_type).cpu() for one in plain]
            norm = float(torch.linalg.vector_norm(torch.stack(norms), norm_type)) if norms else 0.0
        dtype = norm_dtype(gradient.dtype for gradient in gradients)
        clipping = StepClipping(max_norm, dtype, lambda: norm)
        clipping.scale([values_of(gradient) for gradient in gradients])
        return clipping

    # ---- optimizer.step()

    @property
    def has_ended(self) -> bool:
        """Whether no optimizer of the model is still to step on gradients that others stepped on.

        They are to as long as `zero_grad()` has not reset these.
        """
        return not self._update.has_open

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
            if self._phase in (Phase.IDLE, Phase.PENDING) and not self._update.is_single:
                if self._update.is_open(number):
                    ends, deferred = False, self._step_open(number)
                elif self._has_nothing(number):
                    return result
                else:
                    ends = True
            else:
                ends = True
            if ends:
                self._before_update(number)
                deferred = self._phase is not Phase.ATTACHED
                if deferred:
                    self._submit_rest()
                    self._zeroed = False
                    self._end(StepEnding.STEPPED, updates=True)
                    self._refresh()
        if not deferred:
            self._update_now(number, ends=ends)
        if ends:
            self._change_members()
        return result

    def _step_open(self, number: int) -> bool:
        """Step an optimizer in a step that another one has ended.

        Returns:
            Whether it is done, or happens as means arrive; otherwise all are in `.grad`.
        """
        self._failure.raise_failure()
        self._check_unchanged()
        if self._update.is_scaled(number):
            self._refuse_scales()
        indices = self._update.indices_of(number)
        defers = self._update.defers(number) and not self._pending.isdisjoint(indices)
        if not defers:
            self.settle()
        self.exempt.run(lambda: self._update.record(number))
        self._note_settings()
        if defers:
            here = [index for index in indices if index not in self._pending]
            self._guarded(lambda: self._update.apply_held(number, here))
        return defers

    def _has_nothing(self, number: int) -> bool:
        """Return whether an optimizer has no gradient to step on while others have some."""
        self.settle()
        own = (raw_grad(self._trained[one].tensor) for one in self._update.indices_of(number))
        nothing = all(gradient is None for gradient in own)
        return nothing and self._update.have_gradients(but=number)

    def _note_settings(self) -> None:
        self._consistency.note_hyperparameters((*self._clipped_to, *self._update.stepped))

    def _change_members(self) -> None:
        """Put new members into force, if all ranks of the step that has ended know them.

        A rank that does not know them yet does not wait; no other one does anything then.
        """
        membership = self._membership
        if membership is None or not membership.is_pending:
            return
        with self._lock:
            known = [one.generation or 0 for one in self._exchange.wait_for_statuses().values()]
        membership.put_into_force(known, self.training_step_of)

    def gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """Gather whole numbers of all members, between two steps; a collective call.

        Args:
            values: this rank's.

        Returns:
            Those of each member, by its rank; where members were lost meanwhile, new ones are in
            force when it returns.

        Raises:
            UsageError: the model is in the middle of a step, or training does not go on.
            GradlaneError: the session has failed, or a rank trains meanwhile.
        """
        membership, status = self._membership, self._exchange.layout.status
        if membership is None or status is None:
            raise UsageError("session.gather_integers() is for gradlane.init(going_on=True)")
        if self._phase in (Phase.BACKWARD, Phase.ATTACHED):
            raise UsageError(
                f"session.gather_integers() inside step {self.step}: call it after "
                "optimizer.step() or zero_grad()"
            )
        text = json.dumps(list(values)).encode()
        texts = dict.fromkeys(membership.members, b"")
        at = 0
        found = self._gather_part(text, at)
        while True:
            for rank, one in found.items():
                texts[rank] = (texts.get(rank, b"") + one.part)[: one.size]
            at += status.part_bytes
            if all(one.size <= at for one in found.values()):
                break
            found = self._gather_part(text, at)
        while any(rank not in found for rank in membership.members):
            # A member was lost; soon all others know who goes on.
            found = self._gather_part(b"", 0)
            known = [one.generation or 0 for one in found.values()]
            membership.put_into_force(known, self.training_step_of)
        return [list(map(int, json.loads(texts[rank]))) for rank in membership.members]

    def _gather_part(self, text: bytes, at: int) -> dict[int, RankNumbers]:
        """Exchange some bytes of all ranks' numbers.

        Raises:
            SessionFailedError: a rank trains meanwhile.
        """
        membership, status = self._membership, self._exchange.layout.status
        if membership is None or status is None:
            return {}
        self._failure.raise_failure()
        self.settle()
        with self._lock:
            part = text[at : at + status.part_bytes]
            found = self._exchange.exchange_numbers(membership.known_generation, len(text), part)
        others = [rank for rank, one in found.items() if one.generation is None]
        if others:
            self._failure.fail_and_raise(
                SessionFailedError(
                    f"rank {others[0]} trains a step where this rank is in "
                    "session.gather_integers(): call it on all ranks, between the same two steps",
                    self.step,
                )
            )
        return found

    def _before_update(self, number: int) -> None:
        """Bring a step to where it can be applied: all submitted, or the mean in `.grad`."""
        self._failure.raise_failure()
        self._running_backwards.clear()
        self._require_gradients("optimizer.step()")
        if self._update.is_scaled(number):
            self._refuse_scales()
        if self._adds_up_on_means:
            warnings.warn(
                "zero_grad() was not called since the last optimizer.step(); with "
                'update="server" gradients stay on the servers, so they do not add up over steps',
                UserWarning,
                stacklevel=4,
            )
        if self._phase is Phase.LOCAL:
            self._local.check(self.step + 1)
            self._update.check_unscaled(number, self.step + 1)
            self._begin_step()
        self.exempt.run(lambda: self._update.record_first(number))
        if self._server is not None:
            self._check_server_settings(self.exempt.run(self._server.checked_rows))
        elif self._phase is Phase.BACKWARD and (
            not self._update.defers(number) or self._exchange.is_watched()
        ):
            self.attach()
        missed = self._passes.learn()
        if missed:
            log.info("step %d: %s", self.step, missed)
        self._note_settings()

    def _require_gradients(self, call: str) -> None:
        """Take gradients in `.grad`, and refuse a call for which there are none.

        Raises:
            UsageError: there are none, or the model was changed, so that they may be elsewhere.
        """
        has_gradients = self._take_by_hand()
        self._check_unchanged()
        if has_gradients:
            return
        # Refuses an optimizer that holds other parameters now.
        self.exempt.run(self._update.record_all)
        frozen = [entry for entry in self._trained if not entry.tensor.requires_grad]
        if frozen:
            cause = (
                f"{names_of(frozen)} {'was' if len(frozen) == 1 else 'were'} trained when the "
                "model was prepared, and frozen since: after freezing or unfreezing call "
                "session.prepare(model, optimizer) again, on all ranks"
            )
        else:
            cause = (
                "every rank must run backward() on at least one trained parameter in each step, "
                "or put gradients into .grad"
            )
        raise UsageError(f"{call} without any gradient since step {self.step}: {cause}")

    def _take_by_hand(self) -> bool:
        """Take gradients in `.grad` for local ones where no backward made them.

        Returns:
            Whether there are gradients of any kind.
        """
        if self._phase not in (Phase.IDLE, Phase.PENDING):
            return True
        self.settle()
        if all(raw_grad(entry.tensor) is None for entry in self._trained):
            return False
        self._local.clear()
        self._adds_up_on_means = False
        self._phase = Phase.LOCAL
        return True

    def _check_server_settings(self, settings: str) -> None:
        if settings != self._server_settings:
            self._failure.fail_and_raise(
                SessionFailedError(
                    f"hyper-parameters were changed between the first gradient and "
                    f'optimizer.step() of step {self.step}: with update="server" the update has '
                    "already begun; step schedulers after optimizer.step()",
                    self.step - 1,
                )
            )

    def _update_now(self, number: int, *, ends: bool) -> None:
        def update() -> None:
            with undisturbed():
                self._update.step_whole(number)

        self._steps_whole = True
        try:
            self._guarded(update)
        finally:
            self._steps_whole = False
        with self._lock:
            self._zeroed = False
            if ends:
                self._end(StepEnding.STEPPED)
            self._refresh()
        notice = self._update.take_notice(number)
        if notice:
            # Not before: where warnings are errors, the step has ended all the same.
            warnings.warn(notice, UserWarning, stacklevel=4)

    def _submit_rest(self) -> None:
        """Submit what is left of this step."""
        # A list of parameters made in inference mode must not leave such tensors in `.grad`.
        with torch.inference_mode(False), torch.no_grad():
            self._exchange.submit_rest()
            self._exchange.submit_buffers(shadow=False)
        join = self._consistency.join
        if join is not None and join.throws:
            statuses = self._exchange.wait_for_statuses()
            if any(status.shadow for status in statuses.values()):
                self._discards = True
                self._end(StepEnding.DISCARDED)
                join.stop()

    def _end(self, ending: StepEnding, *, updates: bool = False) -> None:
        """End the step on the channel: whatever is still to come is pending from now on.

        Args:
            ending: how this rank ends it.
            updates: the parameters are updated as their gradients arrive.
        """
        self._exchange.end()
        attached = self._phase is Phase.ATTACHED
        self._consistency.ending = ending
        self._phase = Phase.IDLE if attached else Phase.PENDING
        self._hooks.mark_stale()
        if not attached:
            if self._buffers_index >= 0:
                self._pending.add(self._buffers_index)
            if updates:
                self._pending.update(range(len(self._trained)))
                self._lazy.expect_updates()
            else:
                self._lazy.settle()

    # ---- zero_grad()

    def discard(self, set_to_none: bool = True, number: int | None = None) -> None:
        """Do what `zero_grad()` means: forget the gradients of a step that was not taken.

        Args:
            set_to_none: as the user gave it.
            number: the optimizer whose `zero_grad` it is; None: the model's.

        Raises:
            UsageError: updates run on the servers and have begun.
        """
        with self._lock:
            if self._failure.error is not None:
                return
            if inside_backward():
                self._check_nothing_submitted()
                return
            self._zeroed = True
            self._running_backwards.clear()
            had_open = self._update.has_open
            if self._phase in (Phase.PENDING, Phase.IDLE):
                self._update.reset(number, set_to_none)
            elif number is not None and self._keeps_others(number):
                self._local.forget(self._update.indices_of(number))
            elif self._phase is Phase.LOCAL:
                self._phase = Phase.IDLE
            elif self._phase is Phase.ATTACHED:
                self._end(StepEnding.DISCARDED)
            elif self._phase is Phase.BACKWARD:
                self._discard_backward(set_to_none)
            self._refresh()
        if had_open and not self._update.has_open:
            self._hooks.step_ended()

    def _keeps_others(self, number: int) -> bool:
        """Return whether gradients of other optimizers stay while those of one are reset."""
        if self._update.is_single:
            return False
        # Some means are dropped, and others are not.
        self.attach()
        return self._update.have_gradients(but=number)

    def _check_nothing_submitted(self) -> None:
        given = self._exchange.present() if self._phase is Phase.BACKWARD else []
        if given:
            raise UsageError(
                f"zero_grad() inside backward() in step {self.step}: the gradient of "
                f"{self._trained[given[0]].name!r} is under way to the other ranks already; call "
                "it before or after backward()"
            )

    def _discard_backward(self, set_to_none: bool) -> None:
        if self._server is not None:
            self._refuse_begun_update("zero_grad() after backward()")
        if not set_to_none:
            for index in self._scaled if self._awaits_step else self._exchange.present():
                parameter = self._trained[index].tensor
                set_raw_grad(parameter, self._exchange.layout.zeros(index))
        self._end_with_nothing()

    def _end_with_nothing(self) -> None:
        """Submit nothing more in this step, and end it."""
        self._submit_nothing_more(shadow=False)
        self._end(StepEnding.DISCARDED)
        self._refresh()

    def _submit_nothing_more(self, *, shadow: bool) -> None:
        self._discards = True
        self._exchange.submit_rest(discards=True)
        self._exchange.submit_buffers(shadow=shadow)

    # ---- steps that this rank takes no part in, or that are none of training

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
        phase = self._phase
        self._begin_step(shadow=True)
        self._submit_nothing_more(shadow=True)
        self._exchange.end()
        self._consistency.ending = StepEnding.SHADOWED
        self._phase = phase
        self._refresh()

    def has_statuses(self) -> bool:
        """Whether all ranks have begun the step that this one goes along in."""
        return self._exchange.has_statuses()

    def end_shadow(self) -> Statuses:
        """Wait for the end of the step that was gone along in; returns all ranks' statuses."""
        self._exchange.take(None, discards=True)
        self._discards = False
        return self._exchange.statuses()

    def pass_step(self) -> bool:
        """Take the result of the next step without a part in it, if the others are there already.

        Returns:
            Whether it was done: only a rank that was left out of the last step ever does it.

        Raises:
            UsageError: this rank's own step has not ended.
        """
        self._failure.raise_failure()
        if self._phase not in (Phase.IDLE, Phase.PENDING):
            raise UsageError(
                f"the next batch of session.keep_pace() inside step {self.step}: call "
                "optimizer.step() or zero_grad() first"
            )
        exchange = self._exchange
        if not self._update.is_single:
            # The others' program alone knows which of them step.
            return False
        if exchange.step == 0 or not exchange.was_left_out() or not exchange.next_goes_on():
            # The rest of the last step comes during the next forward, as ever.
            return False
        if self._consistency.compares_after(self.step):
            # The others wait for this rank there, and begin the step together with it.
            return False
        self.settle()
        with self._lock:
            self._on_step_begin(self.step + 1)
            exchange.begin(self._consistency.status_for(None), passes=True)
            exchange.submit_rest(discards=True)
            exchange.submit_buffers(shadow=True)
            self.exempt.run(lambda: self._update.record_first(0))
            self._update.reset(None, set_to_none=True)
            if self._update.defers():
                self._end(self._consistency.ending, updates=True)
            else:
                exchange.end()
                for index, gradient in exchange.take(None).gradients:
                    set_raw_grad(self._trained[index].tensor, gradient)
                self._guarded(lambda: self._update.step_whole(0))
                for entry in self._trained:
                    set_raw_grad(entry.tensor, None)
                self._hooks.mark_stale()
            self._refresh()
        return True

    def spend_step(self, run: Callable[[int], None]) -> None:
        """Give a step of the channel to something else than training; a collective call.

        Args:
            run: called with the step's number; it begins the step and waits for its end.

        Raises:
            GradlaneError: the session has failed.
        """
        self._failure.raise_failure()
        self.settle()
        with self._lock:
            self._exchange.spend(run)

    def finish(self) -> None:
        """Bring the current step to an end, so that the channel can be closed in order."""
        if self._failure.error is not None:
            return
        if self._phase is Phase.BACKWARD:
            self._end_with_nothing()
        elif self._phase is Phase.ATTACHED:
            self._end(StepEnding.DISCARDED)
        self.settle()

    def release(self) -> None:
        """Give the parameters their own classes again."""
        self._lazy.restore()

    # ---- results as they arrive

    def attach(self) -> None:
        """Wait for all averaged gradients of a step and put them into `.grad`."""
        with self._lock:
            if self._phase is not Phase.BACKWARD:
                return
            self._submit_rest()
            arrived = self._exchange.take(None).gradients
            self._scale_arrived(arrived)
            self._scalings = []
            self._weighting = None
            for index, gradient in arrived:
                parameter = self._trained[index].tensor
                fresh = raw_grad(parameter)
                if fresh is not None:
                    # Of a backward after clipping: it adds up on the mean.
                    with torch.no_grad(), torch.inference_mode(False):
                        gradient = sum_of(gradient, fresh)
                set_raw_grad(parameter, self._exchange.give_back(index, gradient))
            self._phase = Phase.ATTACHED
            self._lazy.settle()
            self._refresh()

    def _scale_arrived(self, arrived: list[tuple[int, Tensor]]) -> None:
        if self._weighting is None and not self._scalings:
            return
        gradients = [values_of(gradient) for _, gradient in arrived]
        if self._weighting is not None:
            self._weighting.scale(gradients)
        for scaling in self._scalings:
            if isinstance(scaling, StepUnscaling):
                scaling.scale(values_of(one) for index, one in arrived if index in scaling.indices)
            else:
                scaling.scale(gradients)

    def settle(self) -> None:
        """Wait until every parameter has its update."""
        if self._phase is not Phase.PENDING:
            return
        with self._update_lock():
            if self._phase is Phase.PENDING:
                self._failure.raise_failure()
                self._take_and_apply(None)
                self._pending.clear()
                self._settle_classes({*range(len(self._trained))})
                self._phase = Phase.IDLE
                self._discards = False
                self._refresh()

    def _update_lock(self) -> threading.RLock:
        """Return the lock, for a wait for updates; tell of one that another thread is long in."""
        if self._lock.acquire(timeout=UPDATE_NOTICE_S):
            self._lock.release()
        elif self._updating_thread:
            log.warning(
                "step %d: thread %r has waited %g s for an update that thread %r is in; if the "
                "optimizer has threads of its own that touch the model, each waits for the other: "
                "pass defer=False to prepare()",
                self.step,
                threading.current_thread().name,
                UPDATE_NOTICE_S,
                self._updating_thread,
            )
        return self._lock

    def _settle_some(self, indices: Iterable[int]) -> None:
        with self._update_lock():
            needed = [index for index in indices if index in self._pending]
            if not needed:
                return
            self._take_and_apply(self._shared_memory.whole(needed))
            if not self._pending and not self._discards:
                self._phase = Phase.IDLE
            self._refresh()

    def _take_and_apply(self, needed: list[int] | None) -> None:
        arrived = self._exchange.take(
            needed, discards=self._discards or self.serves, lends=self._update.drops_means
        )
        self._scale_arrived(arrived.gradients)
        if self._server is not None:
            for index in arrived.averaged:
                self._server.note_update(index)
                self._update.stepped_elsewhere(index)
        due = self._pending.difference(arrived.indices, self._shared_memory.held)
        ready = self._shared_memory.hold_back(arrived.gradients, due)
        done = self._pending - due - self._shared_memory.held
        self._settle_classes(done)
        if ready:
            self._guarded(lambda: self._update.apply(ready))
        if done == self._pending:
            self._update.end_parts()
        # Not before: another thread that finds nothing pending goes on without the lock.
        self._pending -= done

    def _settle_classes(self, done: set[int]) -> None:
        count = len(self._trained)
        indices = None if done.issuperset(range(count)) else [one for one in done if one < count]
        if self._server is None or self._zeroed:
            self._lazy.settle(indices)
        else:
            # The mean is on the servers: a look at it before zero_grad() is refused.
            self._lazy.expect_gradients(indices)

    def _guarded(self, update: Callable[[], None]) -> None:
        """Run an update; if it breaks off, the parameters are a mixture and stay unreadable."""
        self._updating_thread = threading.current_thread().name
        try:
            self.exempt.run(update)
        except BaseException as error:
            failure = SessionFailedError(
                f"the optimizer broke off in step {self.step} with {type(error).__name__}: "
                f"{error}; some parameters may be updated and others not: restart from the last "
                "checkpoint",
                self.step - 1,
            )
            self._failure.fail(failure)
            if isinstance(error, Exception):
                raise failure from error
            raise
        finally:
            self._updating_thread = ""

    # ---- before something is read

    def bypass(self, call: Callable[[], None]) -> None:
        """Run a call whose reads of parameters need no update, such as the model's `zero_grad`."""
        # Neither pending updates nor its class matter; without this each read is a detour. Another
        # thread may be in the middle of an update, which needs gradients that must not go now.
        with self._lock, DisableTorchFunctionSubclass():
            self.exempt.run(call)

    def before_read(self, parameter: Tensor, evaluates: bool = False) -> None:
        """Wait until a parameter that is about to be read has its update.

        Args:
            parameter: the parameter.
            evaluates: whether its module is in evaluation mode.
        """
        if self.exempt.depth:
            return
        index = self._index_of.get(id(parameter))
        if index is not None:
            self.before_forward((index,), training=False if evaluates else None)
        else:
            self._failure.raise_failure()

    def before_forward(self, indices: Sequence[int], training: bool | None) -> None:
        """Wait until parameters that a module is about to use have their updates.

        Args:
            indices: their numbers.
            training: whether the module is in training mode; None: the read is none of a module's.
        """
        self._failure.raise_failure()
        if self._order is not None:
            self._order.note(indices, training=training is not False)
        if training and self._phase is Phase.BACKWARD:
            if self._servers_update and torch.is_grad_enabled() and not inside_backward():
                self._refuse_begun_update("a forward after backward() and before optimizer.step()")
            if self._awaits_step and torch.is_grad_enabled() and not inside_backward():
                # Another backward before optimizer.step(): its gradients add up on the clipped
                # means.
                self.attach()
        # Numbers leave the set after the update of their parameters.
        if not self._pending.isdisjoint(indices):
            self._settle_some(indices)

    def before_list(self, parameters: Iterable[Tensor | None]) -> None:
        """Make parameters that are about to be listed, copied or saved right.

        Between backward and `optimizer.step()` there is nothing to wait for, so that one rank may
        do it alone: `.grad` of each of them waits by itself.
        """
        if self.exempt.depth:
            return
        self._failure.raise_failure()
        if self._pending:
            found = (self._index_of.get(id(parameter)) for parameter in parameters)
            indices = [index for index in found if index is not None]
            self._settle_some([*indices, self._buffers_index])

    def before_operation(self, parameter: Tensor) -> None:
        """Wait until a parameter that is about to be used has its update.

        Raises:
            UsageError: the servers are in the middle of an update.
        """
        if self.exempt.depth:
            return
        self._failure.raise_failure()
        index = self._index_of.get(id(parameter))
        if index is None:
            return  # One of the program's, which has copied the class.
        if self._servers_update:
            if inside_backward():
                return
            name = self._trained[index].name
            self._refuse_begun_update(
                f"parameter {name!r} is used between backward() and optimizer.step()", "its"
            )
        if self._pending:
            self._settle_some((index,))

    def before_buffers(self) -> None:
        """Wait until buffers that are about to be read are those that all ranks agreed on."""
        if self.exempt.depth:
            return
        self._failure.raise_failure()
        if self._pending:
            self._settle_some((self._buffers_index,))

    def before_optimizer_state(self) -> None:
        """Make the optimizer's state right before it is read or replaced.

        Raises:
            UsageError: the servers are in the middle of an update.
        """
        if self.exempt.depth:
            return
        self._failure.raise_failure()
        if self._servers_update:
            self._refuse_begun_update(
                "the optimizer's state between backward() and optimizer.step()"
            )
        self.settle()

    @property
    def _servers_update(self) -> bool:
        """Whether the servers may be in the middle of an update."""
        return self._server is not None and self._phase is Phase.BACKWARD

    def _refuse_begun_update(self, what: str, whose: str = "the") -> NoReturn:
        raise UsageError(
            f'{what} in step {self.step}: with update="server" {whose} update has already begun; '
            "call optimizer.step() first"
        )

    def write_grad(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Set `.grad` of a parameter, once it may be written.

        Raises:
            UsageError: the mean cannot be had here or now.
        """
        # Not in the middle of an update that another thread makes.
        with self._lock:
            if not self.exempt.depth:
                self._failure.raise_failure()
                index = self._index_of.get(id(parameter))
                if index is None:
                    pass
                elif self._phase is Phase.BACKWARD:
                    self._attach_for(index)
                else:
                    if self._update.is_held(index):
                        self._settle_some((index,))
                    self._update.note_written(index)
            set_raw_grad(parameter, gradient)

    def before_grad(self, parameter: Tensor) -> None:
        """Make `.grad` of a parameter right before it is read.

        After backward it is the mean over all ranks, and stays so until it is reset.

        Raises:
            UsageError: the mean cannot be had here or now.
        """
        if self.exempt.depth:
            return
        self._failure.raise_failure()
        index = self._index_of.get(id(parameter))
        if index is None:
            return
        if self._phase is Phase.BACKWARD:
            self._attach_for(index)
        else:
            self._settle_some((index,))
            moves = sys._getframe(2).f_code is _MOVES
            if self._server is not None and not self._zeroed and not moves:
                self._refuse_grad(index, "after optimizer.step()", _ON_SERVERS)

    def _attach_for(self, index: int) -> None:
        """Put all averaged gradients into `.grad`, since one of them is about to be touched."""
        if inside_backward():
            if self._exchange.has_taken(index):
                self._refuse_grad(
                    index,
                    "inside backward()",
                    "this rank's own gradient is under way already; touch it in a hook that is "
                    "registered on the parameter itself, or after backward()",
                )
            return
        if self._server is not None:
            self._refuse_grad(index, "between backward() and optimizer.step()", _ON_SERVERS)
        if self.accumulates:
            self._refuse_grad(
                index,
                "inside session.no_sync()",
                "gradients of this step are being averaged already; leave the context first, or "
                "run every backward() of the step but the last inside it",
            )
        if self._running_backwards:
            self._refuse_grad(
                index,
                "while another thread runs backward()",
                "it has no mean before that ends; wait for the thread first",
            )
        self._note_full_wait("looks at .grad between backward() and optimizer.step()")
        self.attach()

    def _refuse_grad(self, index: int, when: str, why: str) -> NoReturn:
        raise UsageError(
            f".grad of {self._trained[index].name!r} is touched {when} in step {self.step}: {why}"
        )

    # ---- flags

    def _on_failure(self) -> None:
        self._hooks.mark_stale()
        self._refresh()

    def _refresh(self) -> None:
        """Bring the two flags up to date that keep reads fast while nothing is under way."""
        failed = self._failure.error is not None
        self._counting_in = _NO_BACKWARD
        self.lists_wait = failed or bool(self._pending) or self._order is not None
        self.reads_wait = self.lists_wait or self._servers_update or self._awaits_step
