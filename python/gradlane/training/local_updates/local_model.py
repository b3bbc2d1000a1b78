"""One model whose ranks step it by themselves, and exchange what they have learned every so often.

No hook is on the model: gradients, parameters and the optimizer are plain torch's, and the
optimizer's step is followed by a count. When a fragment's turn comes, the differences of its
parameters to the values that all ranks last had in common travel as outer gradients; some steps
later their mean moves these values, on every rank alike.

What all ranks have in common is the same bits everywhere after each exchange. A parameter has these
bits where it was given all of its common value and no step since; `synchronize` and `close` make
all parameters so.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradlane.errors import GradlaneError, SessionClosedError, SessionFailedError, UsageError
from gradlane.training.connection import SessionContext, shutdown_channel
from gradlane.training.core import check_connected, translate_error
from gradlane.training.local_updates.outer_exchange import Occasion, OuterExchange, RankReport
from gradlane.training.local_updates.outer_optimizer import OuterOptimizer
from gradlane.training.local_updates.replica import Replica
from gradlane.training.local_updates.rounds import FragmentProgress, Rounds
from gradlane.training.local_updates.state import LocalState, UnderWay
from gradlane.training.local_updates.step_hook import StepHook
from gradlane.training.log import log
from gradlane.training.model.barrier import Barrier
from gradlane.training.model.channel_setup import schemes_of
from gradlane.training.model.consistency_check import compare_endings, tell_ending
from gradlane.training.model.failure_latch import FailureLatch
from gradlane.training.model.member_numbers import MemberNumbers
from gradlane.training.model.rank_status import RankNumbers
from gradlane.training.model.residual_state import ResidualState
from gradlane.training.model.several_optimizers import members_of
from gradlane.training.options.local_updates import Local
from gradlane.training.rendezvous.parameter_check import ParameterCheck
from gradlane.training.rendezvous.tensor_table import names_of

_STEPS_KEPT = 64
"""Exchanges whose training step is remembered, for readings of the channel's counters."""
_WORDS = {
    Occasion.TURN: "exchanges a fragment whose turn it is",
    Occasion.SYNCHRONIZE: "calls session.synchronize()",
    Occasion.CLOSE: "closes the session",
    Occasion.GATHER: "calls session.gather_integers()",
}


class LocalModel:
    """A connected model that each rank trains by itself between exchanges."""

    def __init__(
        self,
        ctx: SessionContext,
        replica: Replica,
        model: nn.Module,
        optimizer: Optimizer,
        local: Local,
    ) -> None:
        """Follow the optimizer.

        Args:
            ctx: the session's.
            replica: of the model, connected.
            model: the user's.
            optimizer: the user's.
            local: how often and how the ranks exchange.
        """
        self.model = model
        self.optimizer = optimizer
        self._ctx = ctx
        self._local = local
        self._replica = replica
        connected = self._connected = replica.connected
        self.channel, self.codecs = connected.channel, connected.codecs
        scope = self._scope = connected.scope
        self._trained = connected.spec.trained
        self._failure = FailureLatch()
        self._fragments = replica.fragments
        self._form = replica.form()
        self._rounds = Rounds(local)
        self._outer = OuterOptimizer(local, self._trained)
        self._exchange = OuterExchange(
            connected, functools.partial(ctx.deadlocks.waiting, replica.name)
        )
        self._under_way: UnderWay | None = None
        self._known: Sequence[int] = ()
        self._samples: int | None = None
        self.step = 0
        """Steps of this rank's optimizer."""
        self._steps_of_exchanges: dict[int, int] = {}
        common = [
            replace(entry, tensor=value)
            for entry, value in zip(self._trained, self._outer.common, strict=True)
        ]
        self._agreement = ParameterCheck(
            scope,
            common,
            replica.frozen,
            ctx.options.check_every,
            0,
        )
        self._watch = ctx.observer.watch(
            model,
            self.channel,
            self,
            name=replica.name,
            tensors=[entry.name for entry in (*connected.spec.entries, *connected.extras)],
            codecs=self.codecs,
        )
        connected.staging.subscribe(self._staging_failed)
        self._state = LocalState(
            scope=scope,
            local=local,
            trained=self._trained,
            shards=replica.shards,
            barrier=Barrier(self.channel, scope, ctx.options.network.progress_timeout_s),
            residuals=ResidualState(
                channel=self.channel,
                scope=scope,
                layout=connected.layout,
                choices=self.codecs,
                updates_on_servers=False,
                settle=lambda: None,
                spend_step=self._exchange.spend,
                translating=self._translating,
                ranks_per_residual=connected.ranks_each,
                membership=ctx.membership,
                ranks=replica.ranks,
            ),
            outer=self._outer,
            rounds=self._rounds,
        )
        ctx.membership.training_step_of = self.training_step_of
        self.numbers = MemberNumbers(
            ctx.membership,
            self._failure,
            self._gather,
            connected.layout.number_bytes,
            self.training_step_of,
            lambda: self.step,
        )
        """Gathers numbers of all members between two steps."""
        self.has_parted = False
        """Whether every rank has said goodbye."""
        self._counts = [0] * len(members_of(optimizer))
        self._handles = [
            StepHook(member, functools.partial(self._stepped, number))
            for number, member in enumerate(members_of(optimizer))
        ]
        scope.mark_connected(ctx.options.network.progress_timeout_s, self._look)

    @property
    def schemes(self) -> dict[str, str]:
        """How each trained tensor's differences are aggregated, by name."""
        return schemes_of(self._ctx, self._connected.spec)

    def explain(self) -> list[dict[str, Any]]:
        """Return the one stage that its steps pass: no gradient is sent."""
        reason = "update=gradlane.Local(...): each rank steps by itself, and parameters are sent"
        return [{"stage": "local updates", "reason": reason, "acts": []}]

    @property
    def in_step(self) -> bool:
        """Whether gradients are under way: never, since none is sent."""
        return False

    def training_step_of(self, step: int) -> int:
        """Return the training step after which a step of the channel began, if an exchange did, or
        the exchange before it; an early one's is the first that is remembered."""
        # Another thread asks, too, of exchanges that this rank may not have begun.
        known = self._steps_of_exchanges.copy()
        before = [known[one] for one in known if one <= step]
        return max(before, default=min(known.values(), default=0))

    def weigh(self, samples: int) -> None:
        """Have this rank's next step count so many samples.

        Args:
            samples: behind its gradients.
        """
        self._failure.raise_failure()
        self._samples = samples

    def synchronize(self) -> None:
        """End the round: exchange all that differs, and give every rank the common values.

        Raises:
            GradlaneError: a rank does something else, or the session has failed.
        """
        self._failure.raise_failure()
        self._end_round(Occasion.SYNCHRONIZE)

    def close(self, timeout_s: float) -> None:
        """End the round, let the optimizer go and close the channel.

        Args:
            timeout_s: how long to wait for the other ranks' goodbyes; it is no error if they do
                not come.

        Raises:
            GradlaneError: the round could not be ended.
        """
        try:
            self._failure.raise_failure()
            if self.step > 0:
                self._end_round(Occasion.CLOSE)
            self._ctx.membership.leave_register(self._scope.name)
        except BaseException as error:
            # Also another's, such as torch's without memory: the others would wait for a goodbye.
            words = str(error) if isinstance(error, GradlaneError) else repr(error)
            self.abort(f"closed after an error: {words}")
            raise
        self._let_go()
        self._failure.fail(SessionClosedError("the session was closed"))
        # What ends the session from now on is the reason, not that it was closed.
        self._scope.on_poll = functools.partial(check_connected, self._ctx.core, self.channel)
        self._connected.carrier.close()
        # Where ranks were lost, the store may be lost, too.
        compares = self._ctx.rank_info.world_size > 1 and not self._ctx.membership.lacks_ranks
        if compares:
            tell_ending(self._scope, self._exchange.step, None, self._agreement)
        if shutdown_channel(self._ctx, self.channel, self._watch, self._scope, timeout_s):
            if compares:
                compare_endings(self._scope, self._agreement, self._replica.shards)
            if self._replica.shards > 1:
                # Goodbyes were heard of the ranks with the same shard alone.
                self._scope.delete_keys_if_last()
            else:
                self._scope.delete_keys()
            self.has_parted = True

    def abort(self, reason: str) -> None:
        """Give up, and tell all ranks why."""
        self._let_go()
        self._failure.fail(SessionClosedError(f"the session was given up: {reason}"))
        self._connected.abort(reason)

    def forget_in_child(self) -> None:
        """Drop the connections in a forked child, where the model is a plain one."""
        self.channel.forget_in_child()
        self._let_go()
        reason = "this session belongs to the parent of this forked child"
        self._failure.fail(SessionClosedError(reason))

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state between two steps; a collective call.

        An exchange that is under way is waited for, and its result is used when it is due.

        Raises:
            GradlaneError: the session has failed.
        """
        self._failure.raise_failure()
        self._land()
        with self._translating("reading the state"):
            return self._state.state_dict(self.step, self._under_way)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a result of `state_dict`; a collective call between steps.

        Raises:
            ValueError: it is no such state, or another model's or other options'.
            UsageError: it was taken in mid-round, and is not each rank's own.
        """
        self._failure.raise_failure()
        self._ctx.membership.refuse_lost("load_state_dict()")
        self._land()
        self._scope.on_poll = self._look_for_all
        try:
            with self._translating("loading a state"):
                self.step, self._under_way = self._state.load_state_dict(state)
        finally:
            self._scope.on_poll = self._look
        self._counts = [self.step] * len(self._counts)

    # ---- inside

    def _stepped(self, number: int) -> None:
        """Count a step of one of the model's optimizers; that of the last one ends a step."""
        self._counts[number] += 1
        if min(self._counts) <= self.step:
            return
        self._failure.raise_failure()
        self._look()
        self.step += 1
        samples, self._samples = self._samples, None
        due = self._rounds.advance(samples)
        if self._under_way is not None and self._under_way.due_step <= self.step:
            self._use(self._local.mix)
        if due is not None:
            self._begin([due], Occasion.TURN)
            if self._local.overlap_steps == 0:
                self._use(self._local.mix)
        self._change_members()
        self._watch.step_begins(self.step + 1)

    def _end_round(self, occasion: Occasion) -> None:
        """Exchange what no exchange holds yet, and begin a round at the common values."""
        if self._under_way is not None:
            self._use(self._local.mix)
        moved = self._rounds.moved()
        self._begin(moved, occasion)
        self._use(1.0)
        written = []
        for number, indices in enumerate(self._fragments):
            if number in moved:
                continue
            # No step: what the program has written since is no difference that ranks agree on.
            was_common = not self._rounds.progress[number].differs
            for index in indices:
                if was_common and self._outer.differs(index):
                    written.append(self._trained[index])
                self._outer.mix(index, 1.0)
        if written:
            log.warning(
                "rank %d: %s was written after its exchange, with no step since, and has its "
                "common value again after step %d: write before a step, or load a checkpoint's "
                "session state beside the model's",
                self._ctx.rank_info.rank,
                names_of(written),
                self.step,
            )
        self._rounds.begin()
        self._change_members(tells=occasion is not Occasion.CLOSE)

    def _begin(self, fragments: Sequence[int], occasion: Occasion) -> None:
        """Send this rank's differences of some fragments."""
        self._replica.settle()
        self._check_unchanged()
        samples = _samples_of([self._rounds.progress[number] for number in fragments])
        differences = {
            index: self._outer.difference(index)
            for number in fragments
            for index in self._fragments[number]
        }
        if samples is not None:
            for difference in differences.values():
                difference.mul_(samples)
        sample = self._agreement.sample(self._exchange.step)
        report = RankReport(occasion, self.step, samples, sample)
        for number in fragments:
            self._rounds.sent(number)
        with self._translating(f"exchanging after step {self.step}"):
            self._exchange.submit(differences, report, self._ctx.membership.known_generation)
        self._steps_of_exchanges[self._exchange.step] = self.step
        self._steps_of_exchanges.pop(self._exchange.step - _STEPS_KEPT, None)
        self._under_way = UnderWay(fragments, self.step + self._local.overlap_steps)

    def _land(self) -> None:
        """Wait for the exchange that is under way, if there is one."""
        under_way = self._under_way
        if under_way is None or under_way.means is not None:
            return
        with self._translating(f"waiting for the exchange after step {self.step}"):
            means, reports, under_way.known = self._exchange.wait()
        told = {self._replica.ranks[number]: report for number, report in reports.items()}
        self._judge(told)
        weights = [report.samples for report in told.values() if report.samples is not None]
        if weights and means:
            if sum(weights) == 0:
                self._fail("session.weight(0) on all ranks, in all steps since the last exchange")
            for mean in means.values():
                mean.mul_(len(weights) / sum(weights))
        under_way.means = means

    def _gather(self, generation: int, size: int, part: bytes) -> dict[int, RankNumbers]:
        """Exchange some bytes of all ranks' numbers, after the exchange that is under way."""
        self._land()
        with self._translating("gathering numbers"):
            return self._exchange.gather(generation, size, part)

    def _use(self, share: float) -> None:
        """Move the common values by the result that is under way, and mix them in."""
        self._land()
        under_way, self._under_way = self._under_way, None
        assert under_way is not None and under_way.means is not None
        self._replica.settle()
        for index, mean in under_way.means.items():
            self._outer.step(index, mean)
            self._outer.mix(index, share)
        for number in under_way.fragments:
            self._rounds.mixed(number, share)
        self._known = under_way.known

    def _change_members(self, *, tells: bool = True) -> None:
        """Put new members into force, if all ranks of the last exchange in use knew them."""
        if self._ctx.membership.is_pending and self._known:
            self._ctx.membership.put_into_force(self._known, self.training_step_of, tells=tells)

    def _judge(self, told: Mapping[int, RankReport]) -> None:
        """Check that all ranks were doing the same, before anything is used.

        Raises:
            SessionFailedError: they were not; on all ranks alike.
        """
        first, own = next(iter(told.items()))
        for rank, report in told.items():
            # In a turn steps are alike, as each rank counts its own; where all meet, not always.
            if (report.occasion, report.step) != (own.occasion, own.step):
                self._fail(
                    f"rank {first} {_words(own)}, and rank {rank} {_words(report)}: every rank "
                    "takes the same number of steps, and calls synchronize() and close() after the "
                    "same ones; a GradScaler that skips a step on one rank takes one fewer there"
                )
            if (report.samples is None) is not (own.samples is None):
                silent, says = (rank, first) if report.samples is None else (first, rank)
                self._fail(
                    f"rank {says} called session.weight() before its steps, and rank {silent} did "
                    "not: call it on all ranks, or on none"
                )
            if report.sample != own.sample:
                named = self._agreement.describe_difference(self._exchange.step - 1, list(told))
                self._fail(
                    f"the common values of ranks {first} and {rank} differ{named} after exchange "
                    f"{self._exchange.step - 1}: processors that round differently, or a state "
                    "that was loaded on some ranks"
                )

    def _fail(self, reason: str) -> None:
        self._failure.fail_and_raise(SessionFailedError(reason, self.step))

    def _check_unchanged(self) -> None:
        """Check that the model has the parameters that it was prepared with.

        Raises:
            UsageError: they were changed.
        """
        now = self._replica.form()
        if now != self._form:
            name = next((name for name, _ in set(now.items()) ^ set(self._form.items())), "")
            raise UsageError(
                f"the model was changed after prepare(): parameter {name!r} was added, removed, "
                "replaced, converted, frozen or unfrozen; change it before prepare(), or close "
                "the session, and prepare the model in a new one"
            )

    def _let_go(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _look(self) -> None:
        """Raise if the session has failed."""
        try:
            check_connected(self._ctx.core, self.channel)
        except SessionFailedError as error:
            self._failure.fail_and_raise(error)

    def _look_for_all(self) -> None:
        """Raise if the session has failed, or a rank was lost: not all can do the same then."""
        self._look()
        try:
            self._ctx.membership.check_complete()
        except SessionFailedError as error:
            self._failure.fail_and_raise(error)

    def _staging_failed(self, error: Exception) -> None:
        core = self._ctx.core
        if isinstance(error, core.ChannelError):
            self._failure.fail(translate_error(core, error, "handing a difference over"))
        else:
            self.abort(f"staging failed: {error}")

    def _translating(self, doing: str) -> contextlib.AbstractContextManager[None]:
        """Turn errors of the channel into the package's own, and keep them."""
        return self._failure.translating(self._ctx.core, doing)


def _words(report: RankReport) -> str:
    """Return what a rank was doing."""
    after = "" if report.occasion is Occasion.GATHER else f" after its step {report.step}"
    return f"{_WORDS[report.occasion]}{after}"


def _samples_of(held: Sequence[FragmentProgress]) -> int | None:
    """Return the samples behind the steps that an exchange holds; None: the program has said none.

    Raises:
        UsageError: it has said those of some steps only.
    """
    if not any(one.weighed for one in held):
        return None
    for one in held:
        if one.weighed < one.steps:
            raise UsageError(
                f"session.weight() was called in {one.weighed} of {one.steps} steps since the last "
                "exchange: call it before each step, or before none"
            )
    return max(one.samples for one in held)
