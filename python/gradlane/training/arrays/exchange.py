"""The steps of one session's registered arrays on one channel.

A step begins with the first push after the one before was whole, and has ended here when every
registered array was pushed. The core uses the memory of an array from `push` until its mean is
there; this keeps it alive. After a failure everything raises it again.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gradlane.errors import GradlaneError, SessionClosedError, SessionFailedError, UsageError
from gradlane.training.arrays.memory import Loan, Slot, borrow, landing, scratch
from gradlane.training.connection import (
    SessionContext,
    node_layout,
    open_channel,
    shutdown_channel,
)
from gradlane.training.core import translate_error
from gradlane.training.options.codec_choice import CodecChoice, choose_codecs, rows_with_codecs
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from gradlane.training.rendezvous.wait_notifier import WAIT_NOTIFIER


class ArrayExchange:
    """Pushes arrays and takes their means, one step after the other."""

    def __init__(
        self,
        ctx: SessionContext,
        scope: RendezvousScope,
        slots: Sequence[Slot],
        initial: Mapping[str, Any] | None,
    ) -> None:
        """Agree with all ranks, connect, and broadcast rank 0's values if there are some.

        Args:
            ctx: the session's.
            scope: where the ranks agree.
            slots: the registered arrays, the first needed first.
            initial: an array of each slot that gets rank 0's values, or None to spread nothing.

        Raises:
            ArrayRefusedError: an array of `initial` is not as registered.
            GradlaneError: the ranks differ, or cannot reach each other.
        """
        self.slots = tuple(slots)
        self._ctx = ctx
        self._scope = scope
        self._number = {slot.name: number for number, slot in enumerate(self.slots)}
        self._lock = threading.RLock()
        self._failure: GradlaneError | None = None
        self._pushed = [0] * len(self.slots)
        self._loans: dict[int, Loan] = {}
        self._results: list[Any] = [None] * len(self.slots)
        self._arrived = [0] * len(self.slots)
        self.step = 0
        loans = self._agree(initial)
        coded = [slot.coded() for slot in self.slots]
        self.codecs: list[CodecChoice] = choose_codecs(ctx.options.codec, coded)
        rows = rows_with_codecs([slot.plan_row() for slot in self.slots], coded, self.codecs)
        self.channel = open_channel(ctx, scope, rows, node_layout(ctx, scope), update="worker")
        if ctx.recorder is not None:
            names = [slot.name for slot in self.slots]
            self.channel = ctx.recorder.record(self.channel, names).channel
        try:
            self._broadcast_initial(loans)
        except BaseException as error:
            self.channel.abort(f"{type(error).__name__} while spreading arrays: {error}")
            if isinstance(error, ctx.core.ChannelError):
                raise translate_error(ctx.core, error, "spreading rank 0's values") from error
            raise
        self._watch = ctx.observer.watch(
            self,
            self.channel,
            self,
            name=scope.name,
            tensors=[slot.name for slot in self.slots],
            codecs=self.codecs,
        )
        self.has_parted = False
        """Whether every rank has said goodbye."""
        ctx.deadlocks.watch(scope.name, self, self._on_deadlock)

    def training_step_of(self, step: int) -> int:
        """Return the training step that a step of the channel was: the same."""
        return step

    @property
    def in_step(self) -> bool:
        """Whether some arrays of the current step were pushed and others not."""
        return self._failure is None and bool(self.unsubmitted_tensors()) and self.step > 0

    def unsubmitted_tensors(self) -> list[int]:
        """Numbers of the arrays that were not pushed in the current step."""
        return [number for number, step in enumerate(self._pushed) if step < self.step]

    def push(self, name: str, array: Any, step: int | None) -> int:
        """Submit an array for the current step, or for the next if the current one is whole.

        Args:
            name: of a registered array.
            array: as registered; None: this rank has none in this step, which counts as zeros.
            step: the step that this has to be, or None.

        Returns:
            The number of the step.

        Raises:
            ArrayRefusedError: the array is not as registered; nothing was sent.
            UsageError: it was pushed before in this step, or the step is another one.
            GradlaneError: the session has failed.
        """
        with self._lock:
            self._raise_failure()
            number = self._number_of(name)
            slot = self.slots[number]
            missing = self.unsubmitted_tensors()
            due = self.step if missing and self.step > 0 else self.step + 1
            if step is not None and step != due:
                raise UsageError(
                    f"push({name!r}, step={step}): the step is {due} here; every step begins when "
                    "all registered arrays were pushed in the one before"
                )
            if due == self.step and self._pushed[number] == due:
                raise UsageError(
                    f"array {name!r} was pushed twice in step {due}, before {self._named(missing)} "
                    "was pushed: every rank pushes each registered array once a step, or "
                    "push(name, None) where it has none"
                )
            loan = landing(slot) if array is None else borrow(slot, array)
            with self._translating(f"pushing {name!r} in step {due}"):
                if due > self.step:
                    self._begin(due)
                submit = self.channel.gradient_ready if array is not None else None
                self._submit(submit or self.channel.tensor_absent, number, due, loan)
                if not self.unsubmitted_tensors():
                    self.channel.step_end(due)
            return due

    def wait(self, name: str, step: int | None) -> Any:
        """Wait for the mean of an array over all ranks, of the step that it was last pushed in.

        Args:
            name: of a registered array.
            step: the step that this has to be, or None.

        Returns:
            What was pushed, with the mean in it; an array of NumPy's where that may not be written
            or nothing was pushed; None if no rank had anything.

        Raises:
            UsageError: it was not pushed, or in another step.
            GradlaneError: the session has failed.
        """
        with self._lock:
            self._raise_failure()
            number = self._number_of(name)
            pushed = self._pushed[number]
            if pushed == 0 or (step is not None and step != pushed):
                last = f"last in step {pushed}" if pushed else "never"
                wanted = "" if step is None else f", step={step}"
                raise UsageError(
                    f"wait({name!r}{wanted}): this rank pushed it {last}; a mean comes of what all "
                    "ranks pushed in a step, also push(name, None)"
                )
        if self._arrived[number] < pushed:
            with (
                self._translating(f"waiting for {name!r} in step {pushed}"),
                WAIT_NOTIFIER,
                self._waiting(pushed, [number]),
            ):
                self.channel.wait([number], pushed)
                self._collect()
        return self._results[number]

    def close(self, timeout_s: float) -> None:
        """Bring the last step to an end and close the channel.

        Args:
            timeout_s: how long to wait for the other ranks' goodbyes; it is no error if they do
                not come.

        Raises:
            GradlaneError: the last step could not be brought to an end.
        """
        try:
            with self._translating("closing the session"):
                self._raise_failure()
                for number in self.unsubmitted_tensors():
                    unseen = scratch(self.slots[number])
                    self._submit(self.channel.tensor_absent, number, self.step, unseen)
                    if not self.unsubmitted_tensors():
                        self.channel.step_end(self.step)
                self._end()
        except GradlaneError as error:
            self.abort(f"closed after an error: {error}")
            raise
        self._ctx.deadlocks.unwatch(self._scope.name)
        self._fail(SessionClosedError("the session was closed"))
        if shutdown_channel(self._ctx, self.channel, self._watch, self._scope, timeout_s):
            self._scope.delete_keys()
            self.has_parted = True

    def abort(self, reason: str) -> None:
        """Give up and tell all ranks why."""
        self._fail(SessionClosedError(f"the session was given up: {reason}"))
        with contextlib.suppress(self._ctx.core.ChannelError):
            self.channel.abort(reason)
        self._loans.clear()

    def forget_in_child(self) -> None:
        """Drop the connections in a forked child."""
        self.channel.forget_in_child()
        self._fail(SessionClosedError("this session belongs to the parent of this forked child"))

    # ---- inside

    def _agree(self, initial: Mapping[str, Any] | None) -> dict[int, Loan]:
        """Agree on the registered arrays with all ranks; returns the memory of the first values."""
        try:
            loans = self._first_loans(initial)
        except GradlaneError as error:
            self._scope.refuse(str(error))
            raise
        options = {
            **self._ctx.options.agreed(),
            "world_size": self._ctx.rank_info.world_size,
            "spreads": initial is not None,
        }
        self._scope.agree({"options": options, "tensors": [slot.row() for slot in self.slots]})
        return loans

    def _first_loans(self, initial: Mapping[str, Any] | None) -> dict[int, Loan]:
        if initial is None:
            return {}
        unknown = [repr(name) for name in initial if name not in self._number]
        absent = [repr(slot.name) for slot in self.slots if slot.name not in initial]
        if unknown or absent:
            what = f"no array {absent[0]}" if absent else f"{unknown[0]}, which is not registered"
            raise UsageError(f"spread() was given {what}: give it every registered array")
        return {number: borrow(slot, initial[slot.name]) for number, slot in enumerate(self.slots)}

    def _broadcast_initial(self, loans: dict[int, Loan]) -> None:
        """Run step 0: with values, rank 0's land everywhere; without, nothing is sent."""
        self.channel.step_begin(0)
        for number, slot in enumerate(self.slots):
            if number in loans:
                self._submit(self.channel.gradient_ready, number, 0, loans[number])
            else:
                self._submit(self.channel.tensor_absent, number, 0, scratch(slot))
        self.channel.step_end(0)
        with WAIT_NOTIFIER:
            self.channel.wait_step(0)
        self._collect()

    def spread_values(self) -> dict[str, Any]:
        """Return the arrays that rank 0's values have landed in, by name; before step 1."""
        return {slot.name: self._results[number] for number, slot in enumerate(self.slots)}

    def _begin(self, step: int) -> None:
        self._end()
        self._watch.step_begins(step)
        self.channel.step_begin(step)
        self.step = step

    def _end(self) -> None:
        """Wait for the end of the current step and take what nobody has waited for."""
        with WAIT_NOTIFIER, self._waiting(self.step, None):
            self.channel.wait_step(self.step)
        self._collect()

    def _submit(
        self, call: Callable[[int, int, int, int], None], number: int, step: int, loan: Loan
    ) -> None:
        self._loans[number] = loan
        call(number, step, loan.pointer, loan.nbytes)
        self._pushed[number] = step

    def _collect(self) -> None:
        """Take the results that are there; their memory is the user's again."""
        with self._lock:
            for number, absent in self.channel.take_ready(self.step):
                loan = self._loans.pop(number)
                self._results[number] = None if absent else loan.result
                self._arrived[number] = self._pushed[number]

    def _number_of(self, name: str) -> int:
        number = self._number.get(name)
        if number is None:
            known = self._named(range(len(self.slots)))
            raise UsageError(f"no array {name!r} is registered; there are {known}")
        return number

    def _named(self, numbers: Sequence[int]) -> str:
        names = ", ".join(repr(self.slots[number].name) for number in numbers[:3])
        return f"{names} and {len(numbers) - 3} more" if len(numbers) > 3 else names

    @functools.cached_property
    def _waiting(
        self,
    ) -> Callable[[int, list[int] | None], contextlib.AbstractContextManager[None]]:
        return functools.partial(self._ctx.deadlocks.waiting, self._scope.name)

    def _on_deadlock(self, reason: str) -> None:
        """Fail here and tell all ranks; called while this rank waits."""
        self._fail(SessionFailedError(reason, self.step - 1))
        with contextlib.suppress(self._ctx.core.ChannelError):
            self.channel.abort(reason)

    def _fail(self, failure: GradlaneError) -> None:
        if self._failure is None:
            self._failure = failure

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    @contextlib.contextmanager
    def _translating(self, doing: str) -> Iterator[None]:
        """Turn errors of the channel into the package's own, and keep the first."""
        core = self._ctx.core
        try:
            yield
        except core.ChannelError as error:
            self._fail(translate_error(core, error, doing))
            assert self._failure is not None
            raise self._failure from error
