"""What a prepared model's training steps stand on: where the step is, what is due, what has failed.

Everything that changes the parameters goes through here: waiting for averaged gradients, attaching
them to `.grad`, updating in parts. After a failure everything raises it again, so that nobody sees
some parameters of one step and some of another.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, cast

import torch

from gradlane.errors import GradlaneError, SessionClosedError, SessionFailedError
from gradlane.training.model.backward_passes import BackwardPassCounter
from gradlane.training.model.consistency_check import (
    Hyperparameters,
    RankStatus,
    StepEnding,
    check_votes,
    differing_samples,
)
from gradlane.training.model.exchange import Exchange, Reports
from gradlane.training.model.lazy_parameters import Exemption, LazyParameters, Reads
from gradlane.training.model.updates import DeferredUpdate
from gradlane.training.modules.forward_order import ForwardOrder
from gradlane.training.modules.gradient_intake import set_raw_grad
from gradlane.training.modules.shared_storage import SharedMemoryGroups
from gradlane.training.rendezvous.parameter_check import SAMPLE_EVERY, ParameterCheck


class Phase(enum.Enum):
    """Where a model is in its step."""

    IDLE = "idle"
    LOCAL = "local"
    BACKWARD = "backward"
    ATTACHED = "attached"
    PENDING = "pending"


@dataclass(frozen=True)
class StepCallbacks:
    """How the steps drive what is around them.

    Attributes:
        update: runs the optimizer: whole, or later and in parts.
        defers: whether the next update may happen later and in parts.
        check_unchanged: raises `UsageError` if the model is not what was prepared.
        server_rows: hyper-parameters for updates on the server, or None for the worker's.
        note_update: called with the number of each tensor that some rank had a gradient for.
        order: notes the first training forward, or None.
        announce_order: called with it once, in step 1.
        before_step: called with the number of a step before it begins; all is settled then.
        agreement: compares parameters across ranks.
        hyperparameters: digests those of the optimizer.
        abort: tells all ranks why this one gives up.
        is_asynchronous: whether other ranks' steps are none of this one's.
    """

    update: DeferredUpdate
    defers: Callable[[], bool]
    check_unchanged: Callable[[], None]
    server_rows: Callable[[], str] | None
    note_update: Callable[[int], None]
    order: ForwardOrder | None
    announce_order: Callable[[ForwardOrder], None]
    before_step: Callable[[int], None]
    agreement: ParameterCheck
    hyperparameters: Hyperparameters
    abort: Callable[[str], None]
    is_asynchronous: bool = False


class JoinWatch(Protocol):
    """What `session.join()` wants to know while it lasts."""

    throws: bool

    def note(self, steps: StepState, votes: list[RankStatus]) -> None:
        """See the votes of a step."""

    def stop(self, steps: StepState) -> NoReturn:
        """Bring all ranks out of their loops."""


class StepState:
    """Where one model is in its step.

    Everything that changes the state holds the lock: several threads may run forward and backward
    of one model, and one more may save it meanwhile.
    """

    def __init__(
        self,
        make_exchange: Callable[[Reports], Exchange],
        driver: StepCallbacks,
        make_lazy: Callable[[Reads], LazyParameters],
    ) -> None:
        """Start after step 0.

        Args:
            make_exchange: makes the exchange, given whom it reports to.
            driver: what is around.
            make_lazy: makes the trained parameters' stand-in classes, given what they ask.
        """
        self._exchange = make_exchange(self)
        self._driver = driver
        members = self._exchange.members
        self._trained = members.trained
        self._buffers_index = members.buffers_index
        self._index_of = {id(entry.tensor): index for index, entry in enumerate(self._trained)}
        self._clusters = SharedMemoryGroups([entry.tensor for entry in self._trained])
        self._firings = BackwardPassCounter(len(self._trained))
        self._touched: set[int] = set()
        self._server_rows = driver.server_rows
        self._order = driver.order
        self._pending: set[int] = set()
        self._phase = Phase.IDLE
        self._rows = ""
        self._ending = StepEnding.NONE
        self._digest = 0
        self._untouched: dict[int, tuple[int, int]] = {}
        self._discards = False
        self._zeroed = True
        self._on_top = False
        self.exempt = Exemption()
        self._steps_whole = False
        self._backwards: set[int] = set()
        self._failure: GradlaneError | None = None
        self._lock = threading.RLock()
        self.accumulates = False
        self.reads_averages = False
        """Whether the program has read averaged gradients between backward and step."""
        self.join: JoinWatch | None = None
        self._lazy = make_lazy(cast(Reads, self))
        self.come_last: Callable[[int, torch.Tensor], bool] = lambda *_: False
        """Called as a backward begins: other hooks on the parameters run first."""
        self.when_stale: Callable[[], None] = lambda: None
        self.reads_wait = False
        self.lists_wait = False
        self._refresh()

    @property
    def step(self) -> int:
        """Number of the current training step; 0 before the first gradient."""
        return self._exchange.training_step

    def training_step_of(self, step: int) -> int:
        """Number of the training step that a step of the channel was, or came after."""
        return self._exchange.training_step_of(step)

    @property
    def exchange(self) -> Exchange:
        """What hands over and takes back."""
        return self._exchange

    @property
    def phase(self) -> Phase:
        """Where the current step is."""
        return self._phase

    @property
    def failure(self) -> GradlaneError | None:
        """Why there is nothing more to be had, or None."""
        return self._failure

    @property
    def serves(self) -> bool:
        """Whether updates run on the servers."""
        return self._server_rows is not None

    @property
    def is_asynchronous(self) -> bool:
        """Whether other ranks' steps are none of this one's."""
        return self._driver.is_asynchronous

    @property
    def buffers_index(self) -> int:
        """Tensor number of the packed buffers, or -1."""
        return self._buffers_index

    def own_vote(self) -> tuple[int, int]:
        """Return how the last step ended here, and the digest of its hyper-parameters."""
        return int(self._ending), self._digest

    def raise_failure(self) -> None:
        """Raise again what the session has failed with, if it has."""
        if self._failure is not None:
            # The same object each time: without the old traceback, or they would pile up.
            raise self._failure.with_traceback(None)

    def fail(self, failure: GradlaneError) -> None:
        """Keep the first failure: from now on every read raises it."""
        if self._failure is None:
            self._failure = failure
            self.when_stale()
            self._refresh()

    def release(self) -> None:
        """Give the parameters their own classes again."""
        self._lazy.settle()

    def close(self, reason: str) -> None:
        """Make every further use raise `SessionClosedError` with this reason."""
        self.fail(SessionClosedError(reason))

    def note_votes(self, votes: list[RankStatus]) -> None:
        """Look at the votes of a step, once, before its first update.

        Raises:
            SessionFailedError: the ranks do not train alike; the message names them.
        """
        shadows = [rank for rank, vote in enumerate(votes) if vote.shadow]
        if self.join is not None:
            self.join.note(self, votes)
        elif shadows:
            failure = SessionFailedError(
                f"rank {shadows[0]} has come to the end of session.join() before step {self.step}, "
                "and this rank trains outside of one: put the loops of all ranks into it",
                self.step - 1,
            )
            self.keep_and_raise(failure, None)
        try:
            check_votes(votes, self.step - 1)
        except SessionFailedError as error:
            self.keep_and_raise(error, None)
        differing = differing_samples(votes)
        if differing:
            named = self._exempted(
                lambda: self._driver.agreement.describe_difference(self.step - 1)
            )
            failure = SessionFailedError(
                f"the parameters of {differing} differ after step {self.step - 1}{named}: a rank "
                "has changed them by itself, or its optimizer or hardware does not give the same "
                "bits; restart from the last checkpoint (check_every=K compares all of them "
                f"every K steps, this was a sample every {SAMPLE_EVERY}; check_every=0 none)",
                self.step - 1,
            )
            self.keep_and_raise(failure, None)

    def keep_and_raise(self, error: SessionFailedError, cause: Exception | None) -> NoReturn:
        """Keep an error for every later call, and raise it."""
        self.fail(error)
        assert self._failure is not None
        raise self._failure from cause

    def bypass(self, call: Callable[[], None]) -> None:
        """Run a call whose reads of parameters need no update, such as the model's `zero_grad`."""
        # Neither what is pending nor its class matters; without this each read is a detour.
        with torch._C.DisableTorchFunctionSubclass():
            self._exempted(call)

    def attach(self) -> None:
        """Wait for all averaged gradients of a step and put them into `.grad`."""
        with self._lock:
            if self._phase is not Phase.BACKWARD:
                return
            self._complete()
            for index, gradient in self._exchange.take(None).gradients:
                set_raw_grad(self._trained[index].tensor, gradient)
            self._phase = Phase.ATTACHED
            self._lazy.settle()
            self._refresh()

    def settle(self) -> None:
        """Wait until every parameter has its update."""
        if self._phase is not Phase.PENDING:
            return
        with self._lock:
            if self._phase is Phase.PENDING:
                self.raise_failure()
                self._take_and_apply(None)
                self._pending.clear()
                self._settle_classes(range(len(self._trained)))
                self._phase = Phase.IDLE
                self._discards = False
                self._refresh()

    def spend_step(self, run: Callable[[int], None]) -> None:
        """Give a step of the channel to something else than training; a collective call.

        Args:
            run: called with the step's number; it begins the step and waits for its end.

        Raises:
            GradlaneError: the session has failed.
        """
        self.raise_failure()
        self.settle()
        with self._lock:
            self._exchange.spend(run)

    def _settle_some(self, indices: Iterable[int]) -> None:
        with self._lock:
            needed = [index for index in indices if index in self._pending]
            if not needed:
                return
            self._take_and_apply(self._clusters.whole(needed))
            if not self._pending and not self._discards:
                self._phase = Phase.IDLE
            self._refresh()

    def _take_and_apply(self, needed: list[int] | None) -> None:
        discards = self._discards or self._server_rows is not None
        arrived = self._exchange.take(needed, discards=discards)
        for index in arrived.averaged:
            self._driver.note_update(index)
            if self._server_rows is not None:
                self._driver.update.stepped_elsewhere(index)
        due = self._pending.difference(arrived.indices, self._clusters.held)
        ready = self._clusters.hold_back(arrived.gradients, due)
        if ready:
            self._lazy.settle(index for index, _ in ready)
            self._guarded(lambda: self._driver.update.apply(ready))
        # Not before: another thread that finds nothing pending goes on without the lock.
        done = self._pending - due - self._clusters.held
        self._pending -= done
        self._settle_classes(done)

    def _settle_classes(self, indices: Iterable[int]) -> None:
        trained = [index for index in indices if index < len(self._trained)]
        if self._server_rows is None or self._zeroed:
            self._lazy.settle(trained)
        else:
            # The mean is on the servers: who looks for it before zero_grad() is told so.
            self._lazy.expect_gradients(trained)

    def _complete(self) -> None:
        # Whoever lists parameters in inference mode must not leave such tensors in `.grad`.
        with torch.inference_mode(False), torch.no_grad():
            self._exchange.complete()
            self._exchange.give_buffers(shadow=False)
        if self.join is not None and self.join.throws:
            self._stop_if_uneven()

    def _stop_if_uneven(self) -> None:
        votes = self._exchange.wait_for_votes()
        if any(vote.shadow for vote in votes):
            assert self.join is not None
            self._discards = True
            self._end(StepEnding.DISCARDED)
            self.join.stop(self)

    def _end(self, ending: StepEnding, *, updates: bool = False) -> None:
        """End the step on the channel: whatever is still to come is pending from now on.

        Args:
            ending: how this rank ends it.
            updates: the parameters are updated as their gradients arrive.
        """
        self._exchange.end()
        attached = self._phase is Phase.ATTACHED
        self._ending = ending
        self._phase = Phase.IDLE if attached else Phase.PENDING
        self.when_stale()
        if not attached:
            if self._buffers_index >= 0:
                self._pending.add(self._buffers_index)
            if updates:
                self._pending.update(range(len(self._trained)))
                self._lazy.expect_updates()
            else:
                self._lazy.settle()

    def _guarded(self, update: Callable[[], None]) -> None:
        """Run an update; if it breaks off, the parameters are a mixture and stay unreadable."""
        try:
            self._exempted(update)
        except BaseException as error:
            failure = SessionFailedError(
                f"the optimizer broke off in step {self.step} with {type(error).__name__}: "
                f"{error}; some parameters may be updated and others not: restart from the last "
                "checkpoint",
                self.step - 1,
            )
            self.fail(failure)
            if isinstance(error, Exception):
                raise failure from error
            raise

    def _exempted(self, call: Callable[[], Any]) -> Any:
        """Run a call whose reads of parameters, in this thread, wait for nothing."""
        self.exempt.depth += 1
        try:
            return call()
        finally:
            self.exempt.depth -= 1

    @property
    def is_exempt(self) -> bool:
        """Whether this thread is in a call whose reads of parameters wait for nothing."""
        return self.exempt.depth > 0

    def _refresh(self) -> None:
        """Bring the two flags up to date that keep reads fast while nothing is under way."""
        failed = self._failure is not None
        backward = self._phase is Phase.BACKWARD
        self.lists_wait = failed or bool(self._pending) or self._order is not None
        self.reads_wait = self.lists_wait or (backward and self._server_rows is not None)
