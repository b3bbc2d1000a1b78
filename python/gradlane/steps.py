"""The training steps of one prepared model, as a state machine.

Idle: all parameters are up to date. Backward: gradients are on their way; `.grad` is None.
Attached: the averaged gradients are in `.grad`, waiting for the user's `optimizer.step()`. Pending:
`optimizer.step()` was called; parameters are updated as their gradients arrive. Every read of a
parameter comes through `before_read`, `before_list` or `before_forward`, which wait for its update;
after a failure they raise, so that nobody sees some parameters of one step and some of another.
"""

from __future__ import annotations

import enum
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradlane.carrier import Carrier
from gradlane.core import Channel, CoreModule, translate_error
from gradlane.errors import GradlaneError, SessionClosed, SessionFailed, UsageError
from gradlane.forward_order import ForwardOrder, inside_backward
from gradlane.gradients import GradientIntake
from gradlane.table import Entry
from gradlane.updates import DeferredUpdate, undisturbed


class Phase(enum.Enum):
    """Where a model is in its step."""

    IDLE = "idle"
    BACKWARD = "backward"
    ATTACHED = "attached"
    PENDING = "pending"


class Steps:
    """Drives one channel through the training steps of one model."""

    def __init__(
        self,
        *,
        core: CoreModule,
        channel: Channel,
        carrier: Carrier,
        trained: Sequence[Entry],
        update: DeferredUpdate,
        step_whole: Callable[[], Any],
        defers: Callable[[], bool],
        check_unchanged: Callable[[], None],
        server_rows: Callable[[], str] | None,
        order: ForwardOrder | None,
        announce_order: Callable[[ForwardOrder], None],
        before_step: Callable[[int], None],
    ) -> None:
        """Start after step 0.

        Args:
            core: where the channel's errors come from.
            channel: the channel, with step 0 complete.
            carrier: hands gradients to the channel.
            trained: table entries of the trained parameters, by tensor number.
            update: runs the optimizer later and in parts.
            step_whole: runs the optimizer on whatever is in `.grad`.
            defers: whether the next update may happen later and in parts.
            check_unchanged: raises `UsageError` if the model is not what was prepared.
            server_rows: hyper-parameters for updates on the server, or None for the worker's.
            order: notes the first training forward, or None.
            announce_order: called with it once, in step 1.
            before_step: called with the number of a step before it begins; all is settled then.
        """
        self._core = core
        self._channel = channel
        self._carrier = carrier
        self._trained = trained
        self._update = update
        self._step_whole = step_whole
        self._defers = defers
        self._check_unchanged = check_unchanged
        self._server_rows = server_rows
        self._order = order
        self._announce_order = announce_order
        self._before_step = before_step
        self._index_of = {id(entry.tensor): index for index, entry in enumerate(trained)}
        self._intake = GradientIntake(trained)
        self._gradients: list[Tensor | None] = [None] * len(trained)
        self._pending: set[int] = set()
        self._phase = Phase.IDLE
        self._step = 0
        self._rows = ""
        self._discards = False
        self._zeroed = True
        self._applying = False
        self._bypassed = False
        self._failure: GradlaneError | None = None
        self._lock = threading.RLock()
        self.reads_wait = False
        self.lists_wait = False
        self._refresh()

    @property
    def step(self) -> int:
        """Number of the current step; 0 before the first gradient."""
        return self._step

    @property
    def phase(self) -> Phase:
        """Where the current step is."""
        return self._phase

    @property
    def failure(self) -> GradlaneError | None:
        """Why there is nothing more to be had, or None."""
        return self._failure

    # ---- gradients

    def take_gradient(self, index: int, parameter: Tensor) -> None:
        """Take a parameter's fresh gradient away and hand it over: the post-accumulate hook.

        Raises:
            UsageError: the gradient comes at a moment, or in a form, that has no meaning.
            GradlaneError: the session has failed.
        """
        if self._phase is not Phase.BACKWARD:
            self._begin_step(index)
        elif self._gradients[index] is not None:
            raise UsageError(
                f"parameter {self._trained[index].name!r} got a second gradient in step "
                f"{self._step}: call optimizer.step() after each backward(); accumulating "
                "gradients over several backward() calls is not supported yet"
            )
        gradient = self._intake.take(index, parameter)
        self._gradients[index] = gradient
        try:
            self._carrier.give(index, self._step, gradient)
        except self._core.ChannelError as error:
            self._raise_failed(error, "handing over", index)

    def _begin_step(self, index: int) -> None:
        self.raise_failure()
        if self._phase is Phase.ATTACHED:
            raise UsageError(
                f"parameter {self._trained[index].name!r} got a gradient after the averaged "
                f"gradients of step {self._step} were handed out by parameters(): call "
                "optimizer.step() first; every backward() of a step comes before parameters()"
            )
        self.settle()
        if not self._zeroed:
            self._zeroed = True
            warnings.warn(
                "zero_grad() was not called since the last optimizer.step(); gradlane takes "
                "gradients away in backward(), so they do not add up over steps",
                UserWarning,
                stacklevel=2,
            )
        self._before_step(self._step + 1)
        try:
            # Every tensor may be ready a moment before the channel counts the step as complete.
            self._channel.wait_step(self._step)
            self._channel.step_begin(self._step + 1)
            self._step += 1
            if self._order is not None and not self._order.is_empty:
                order, self._order = self._order, None
                self._announce_order(order)
            if self._server_rows is not None:
                self._rows = self._server_rows()
                self._channel.set_optimizer(self._step, self._rows)
        except self._core.ChannelError as error:
            self._raise_failed(error, "beginning a step")
        self._phase = Phase.BACKWARD
        self._refresh()

    # ---- the user's calls

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
        self.raise_failure()
        if self._phase in (Phase.IDLE, Phase.PENDING):
            raise UsageError(
                f"optimizer.step() without any gradient since step {self._step}: every rank must "
                "run backward() on at least one trained parameter in each step"
            )
        self._check_unchanged()
        if self._server_rows is not None:
            self._check_rows(self._server_rows())
        elif self._phase is Phase.BACKWARD and not self._defers():
            self.attach()
        if self._phase is Phase.ATTACHED:
            self._update_now()
        else:
            self._update.record()
            self._close_gradients()
            self._pending = set(range(len(self._trained)))
            self._zeroed = False
            self._refresh()
        return result

    def discard(self) -> None:
        """Do what `zero_grad()` between backward and `step()` means: forget the gradients.

        Raises:
            UsageError: updates run on the servers and have begun.
        """
        self._zeroed = True
        if self._phase is not Phase.BACKWARD or inside_backward() or self._failure is not None:
            return
        if self._server_rows is not None:
            raise UsageError(
                f'zero_grad() after backward() in step {self._step}: with update="server" the '
                "update has already begun; call optimizer.step() first"
            )
        self._discards = True
        self._close_gradients()
        self._refresh()

    def attach(self) -> None:
        """Wait for all averaged gradients of a step and put them into `.grad`."""
        with self._lock:
            if self._phase is not Phase.BACKWARD:
                return
            self._declare_missing()
            for index, gradient in self._wait_and_take(None):
                self._trained[index].tensor.grad = gradient
            self._gradients = [None] * len(self._trained)
            self._phase = Phase.ATTACHED
            self._refresh()

    def settle(self) -> None:
        """Wait until every parameter has its update."""
        if self._phase is not Phase.PENDING:
            return
        with self._lock:
            if self._phase is Phase.PENDING:
                self.raise_failure()
                self._apply(self._wait_and_take(None))
                self._phase = Phase.IDLE
                self._discards = False
                self._refresh()

    def bypass(self, call: Callable[[], None]) -> None:
        """Run a call whose reads of parameters need no update, such as the model's `zero_grad`."""
        self._bypassed = True
        try:
            call()
        finally:
            self._bypassed = False

    # ---- reads of parameters

    def before_read(self, parameter: Tensor) -> None:
        """Wait until a parameter that is about to be read has its update."""
        if self._bypassed or self._applying:
            return
        index = self._index_of.get(id(parameter))
        if index is not None:
            self.before_forward((index,), training=None)
        else:
            self.raise_failure()

    def before_forward(self, indices: Sequence[int], training: bool | None) -> None:
        """Wait until parameters that a module is about to use have their updates.

        Args:
            indices: their numbers.
            training: whether the module is in training mode; None: the read is none of a module's.
        """
        self.raise_failure()
        if self._order is not None:
            self._order.note(indices, training=training is not False)
        if self._server_rows is not None and self._phase is Phase.BACKWARD:
            self._check_server_forward(training)
        if self._pending:
            self._settle_some(indices)

    def before_list(self, parameters: Iterable[Tensor | None]) -> None:
        """Make parameters that are about to be listed right, and their `.grad` right or absent."""
        if self._bypassed or self._applying:
            return
        self.raise_failure()
        if self._phase is Phase.BACKWARD:
            if inside_backward():
                return
            if self._server_rows is not None:
                raise UsageError(
                    f"parameters() between backward() and optimizer.step() in step {self._step}: "
                    'with update="server" the averaged gradients stay on the servers, so nothing '
                    'can be clipped or read; use update="worker" for that'
                )
            self.attach()
        elif self._pending:
            found = (self._index_of.get(id(parameter)) for parameter in parameters)
            self._settle_some([index for index in found if index is not None])

    def before_optimizer_state(self, optimizer: Optimizer) -> None:
        """Make the optimizer's state right before it is read or replaced.

        Raises:
            UsageError: the state is on the servers.
        """
        self.raise_failure()
        if self._server_rows is not None and any(
            group.get("momentum") for group in optimizer.param_groups
        ):
            raise UsageError(
                'with update="server" momentum is kept on the servers and cannot be read or '
                'replaced yet; use update="worker" for checkpoints of the optimizer'
            )
        self.settle()

    # ---- the end

    def raise_failure(self) -> None:
        """Raise again what the session has failed with, if it has."""
        if self._failure is not None:
            # The same object each time: without the old traceback, or they would pile up.
            raise self._failure.with_traceback(None)

    def fail(self, failure: GradlaneError) -> None:
        """Keep the first failure: from now on every read raises it."""
        if self._failure is None:
            self._failure = failure
            self._refresh()

    def finish(self) -> None:
        """Bring the current step to an end, so that the channel can be closed in order."""
        if self._failure is not None:
            return
        if self._phase is Phase.BACKWARD:
            self._discards = True
            self._close_gradients()
        elif self._phase is Phase.ATTACHED:
            self._end_channel_step()
            self._phase = Phase.IDLE
        self.settle()

    # ---- inside

    def _refresh(self) -> None:
        """Bring the two flags up to date that keep reads fast while nothing is under way."""
        failed = self._failure is not None
        backward = self._phase is Phase.BACKWARD
        waits = failed or bool(self._pending) or self._order is not None
        self.reads_wait = waits or (backward and self._server_rows is not None)
        self.lists_wait = waits or backward

    def _settle_some(self, indices: Iterable[int]) -> None:
        with self._lock:
            needed = [index for index in indices if index in self._pending]
            if not needed:
                return
            self._apply(self._wait_and_take(needed))
            if not self._pending:
                self._phase = Phase.IDLE
            self._refresh()

    def _wait_and_take(self, needed: list[int] | None) -> list[tuple[int, Tensor]]:
        """Wait for some tensors, or for the step, and take all results that are there."""
        try:
            if needed is None:
                self._channel.wait_step(self._step)
            else:
                self._channel.wait(needed, self._step)
            ready = self._channel.take_ready(self._step)
        except self._core.ChannelError as error:
            self._raise_failed(error, "waiting for averaged gradients")
        arrived: list[tuple[int, Tensor]] = []
        for index, absent in ready:
            gradient = self._gradients[index]
            if not absent and gradient is not None and self._server_rows is None:
                arrived.append((index, gradient))
            self._gradients[index] = None
            self._pending.discard(index)
        if self._discards:
            return []
        if arrived:
            self._carrier.collect(arrived)
        return arrived

    def _apply(self, arrived: list[tuple[int, Tensor]]) -> None:
        if arrived:
            self._guarded(lambda: self._update.apply(arrived))

    def _update_now(self) -> None:
        def update() -> None:
            with undisturbed():
                self._step_whole()

        self._guarded(update)
        self._end_channel_step()
        self._phase = Phase.IDLE
        self._refresh()

    def _guarded(self, update: Callable[[], None]) -> None:
        """Run an update; if it breaks off, the parameters are a mixture and stay unreadable."""
        self._applying = True
        try:
            update()
        except BaseException as error:
            failure = SessionFailed(
                f"the optimizer broke off in step {self._step} with {type(error).__name__}: "
                f"{error}; some parameters may be updated and others not: restart from the last "
                "checkpoint",
                self._step - 1,
            )
            self.fail(failure)
            if isinstance(error, Exception):
                raise failure from error
            raise
        finally:
            self._applying = False

    def _close_gradients(self) -> None:
        """Say what is missing in this step and that it has ended: it is pending from now on."""
        self._declare_missing()
        self._end_channel_step()
        self._phase = Phase.PENDING

    def _declare_missing(self) -> None:
        try:
            for index, gradient in enumerate(self._gradients):
                if gradient is None:
                    self._gradients[index] = self._carrier.give_nothing(index, self._step)
        except self._core.ChannelError as error:
            self._raise_failed(error, "ending a step")

    def _end_channel_step(self) -> None:
        try:
            self._channel.step_end(self._step)
        except self._core.ChannelError as error:
            self._raise_failed(error, "ending a step")

    def _check_rows(self, rows: str) -> None:
        if rows != self._rows:
            failure = SessionFailed(
                f"hyper-parameters were changed between the first gradient and optimizer.step() of "
                f'step {self._step}: with update="server" the update has already begun; step '
                "schedulers after optimizer.step()",
                self._step - 1,
            )
            self.fail(failure)
            raise failure

    def _check_server_forward(self, training: bool | None) -> None:
        if training and torch.is_grad_enabled() and not inside_backward():
            raise UsageError(
                f"a forward after backward() and before optimizer.step() in step {self._step}: "
                'with update="server" the update has already begun; call optimizer.step() first'
            )

    def _raise_failed(self, error: Exception, doing: str, index: int | None = None) -> NoReturn:
        where = f"{doing} in step {self._step}"
        if index is not None:
            where = f"{doing} {self._trained[index].name!r} in step {self._step}"
        if self._failure is None:
            self.fail(translate_error(self._core, error, where))
        assert self._failure is not None
        raise self._failure from error

    def close(self, reason: str) -> None:
        """Make every further use raise `SessionClosed` with this reason."""
        self.fail(SessionClosed(reason))
