"""The steps of one channel: what was handed over, what came back, and what the other ranks voted.

`StepLayout` numbers everything that takes part in a step. A step of the channel is complete
when every one of them has come back; whatever is not a gradient here is handed over as absent.
"""

from __future__ import annotations

import bisect
import contextlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from gradlane.errors import SessionFailedError
from gradlane.training.carrier import Carrier
from gradlane.training.core import Channel, CoreModule, translate_error
from gradlane.training.factors.block import BlockError, Dense, Part
from gradlane.training.factors.sending import FactorExchange
from gradlane.training.model.consistency_check import RankStatus
from gradlane.training.model.late_gradients import LateGradientBuffer
from gradlane.training.model.step_layout import StepLayout
from gradlane.training.modules.gradient_intake import GradientIntake, raw_grad
from gradlane.training.rendezvous.tensor_table import in_layout, is_dense
from gradlane.training.rendezvous.wait_notifier import WAIT_NOTIFIER


@dataclass
class Arrived:
    """What came back.

    Attributes:
        gradients: tensor numbers and averaged gradients.
        indices: all tensor numbers that are done with, also without a gradient.
        averaged: those of trained parameters that some rank had a gradient for.
    """

    gradients: list[tuple[int, Tensor]]
    indices: list[int]
    averaged: list[int]


class Reports(Protocol):
    """Whom an exchange tells what it finds."""

    def note_votes(self, votes: list[RankStatus]) -> None:
        """Look at the votes of a step, once; may raise."""

    def keep_and_raise(self, error: SessionFailedError, cause: Exception | None) -> NoReturn:
        """Keep an error, and the one that it came from, and raise it."""


Waiting = Callable[[int, list[int] | None], contextlib.AbstractContextManager[None]]


class Exchange:
    """Hands over and takes back, one step after the other."""

    def __init__(
        self,
        core: CoreModule,
        channel: Channel,
        carrier: Carrier,
        members: StepLayout,
        reports: Reports,
        waiting: Waiting,
        rank: int = 0,
        carrying: LateGradientBuffer | None = None,
    ) -> None:
        """Start after step 0.

        Args:
            core: where the channel's errors come from.
            channel: the channel, with step 0 complete.
            carrier: hands gradients to the channel.
            members: what takes part.
            reports: whom to tell of votes and errors.
            waiting: a context around every wait for a step's tensors, or for the step.
            rank: this rank.
            carrying: keeps gradients that come too late for their step, or None.
        """
        self._carrying = carrying
        self._core = core
        self._channel = channel
        self._carrier = carrier
        self._members = members
        self._trained = members.trained
        self._intake = GradientIntake(members.trained)
        # Eight bytes for each, and there may be some for every checkpoint.
        self._spent_steps = array("q")
        self._gradients: list[Tensor | None] = [None] * len(members.trained)
        self._lane = FactorExchange(core, channel, members.factored, rank, self.training_step_of)
        self._given = [False] * len(members.trained)
        self.pushes = [0] * len(members.trained)
        """How many gradients of each tensor were handed over so far."""
        self._packed: Tensor | None = None
        self._gave_buffers = True
        self._reports = reports
        self._waiting = waiting
        self._votes: list[RankStatus] | None = None
        self._counted = 0
        self.step = 0

    @property
    def members(self) -> StepLayout:
        """What takes part."""
        return self._members

    @property
    def training_step(self) -> int:
        """Number of the current step of training."""
        return self.step - len(self._spent_steps)

    def training_step_of(self, step: int) -> int:
        """Number of the training step that a step of the channel was, or came after."""
        return step - bisect.bisect_right(self._spent_steps, step)

    # ---- to the channel

    def begin(self, vote: RankStatus, rows: str | None = None, *, passes: bool = False) -> None:
        """Begin the next step, once the one before is complete everywhere.

        Args:
            vote: what this rank tells the others.
            rows: hyper-parameters for updates on the servers.
            passes: this rank takes no part in the step.
        """
        try:
            # Every tensor may be ready a moment before the channel counts the step as complete.
            with WAIT_NOTIFIER, self._waiting(self.step, None):
                self._channel.wait_step(self.step)
            self.votes()
            self.settle_carried()
            if passes:
                self._channel.step_pass(self.step + 1)
            else:
                self._channel.step_begin(self.step + 1)
            # Who looks on from another thread must not take the last step's marks for this one's.
            self._given = [False] * len(self._trained)
            self._gave_buffers = self._members.buffers is None
            self.step += 1
            if rows is not None:
                self._channel.set_optimizer(self.step, rows)
            ballot = self._members.ballot
            if ballot is not None:
                lane = ballot.cast(vote)
                self._channel.gradient_ready(
                    self._members.ballot_index, self.step, lane.data_ptr(), lane.nbytes
                )
        except self._core.ChannelError as error:
            self._raise_failed(error, "beginning a step")
        self._gradients = [None] * len(self._trained)
        self._lane.begin()

    def sends_factors(self, index: int) -> bool:
        """Whether a parameter's gradient travels as factors."""
        return index in self._lane

    def hold_factors(self, index: int, part: Part) -> None:
        """Take factors of a part of a parameter's gradient."""
        self._lane.hold(index, part)

    def hold_dense(self, index: int) -> None:
        """Take what a parameter that sends factors has in `.grad` as one more part."""
        self._lane.hold(index, Dense(self._intake.take(index, self._trained[index].tensor)))

    def check(self, index: int) -> None:
        """Check that what a parameter has in `.grad` can be averaged.

        Raises:
            UsageError: it cannot; the message names the parameter.
        """
        gradient = raw_grad(self._trained[index].tensor)
        if gradient is not None:
            self._intake.check(index, gradient)

    def give(self, index: int) -> None:
        """Hand over a parameter's gradient: its factors, or what it has in `.grad`."""
        if index not in self._lane:
            gradient = self._intake.take(index, self._trained[index].tensor)
            self._gradients[index] = gradient
        self._given[index] = True
        self.pushes[index] += 1
        try:
            if index in self._lane:
                self._lane.give(index, self.step)
                return
            if self._carrying is not None:
                self._carrying.before_give(index, gradient)
            self._carrier.give(index, self.step, gradient)
        except self._core.ChannelError as error:
            self._raise_failed(error, "handing over", index)

    def is_given(self, index: int) -> bool:
        """Whether a gradient was handed over, or said to be absent, in this step."""
        return self._given[index]

    def has_taken(self, index: int) -> bool:
        """Whether some of a parameter's gradient has left `.grad` in this step."""
        return self._given[index] or (index in self._lane and self._lane.holds(index))

    def unsubmitted_tensors(self) -> list[int]:
        """Return the tensors that were not handed over in this step, also to another thread."""
        held = [index for index, given in enumerate(self._given) if not given]
        return held if self._gave_buffers else [*held, self._members.buffers_index]

    def present(self) -> list[int]:
        """Return the parameters whose gradient has left `.grad` in this step, before `complete`."""
        return [index for index in range(len(self._trained)) if self.has_taken(index)]

    def complete(self, *, discards: bool = False) -> None:
        """Hand over everything else: gradients in `.grad`, factors, and word of no others.

        Args:
            discards: leave `.grad` alone and hand nothing more over.
        """
        absent = []
        for index, given in enumerate(self._given):
            if given:
                continue
            if not discards:
                has_dense = raw_grad(self._trained[index].tensor) is not None
                if index in self._lane and has_dense:
                    self.hold_dense(index)
                if has_dense or self.has_taken(index):
                    self.give(index)
                    continue
            absent.append(index)
        try:
            for index in absent:
                if index in self._lane:
                    self._lane.give_nothing(index, self.step)
                else:
                    self._gradients[index] = self._carrier.give_nothing(index, self.step)
                self._given[index] = True
        except self._core.ChannelError as error:
            self._raise_failed(error, "ending a step")

    def give_buffers(self, *, shadow: bool) -> None:
        """Hand over the buffers.

        Args:
            shadow: this rank has seen no data in this step and has nothing to say about them.
        """
        pack = self._members.buffers
        if pack is None:
            return
        packed = pack.pack(silent=shadow)
        index = self._members.buffers_index
        try:
            if packed is None:
                packed = self._carrier.give_nothing(index, self.step)
            else:
                self._carrier.give(index, self.step, packed)
            self._packed = packed
            self._gave_buffers = True
        except self._core.ChannelError as error:
            self._raise_failed(error, "handing the buffers over")

    def end(self) -> None:
        """Tell the channel that the step has ended here."""
        try:
            self._channel.step_end(self.step)
        except self._core.ChannelError as error:
            self._raise_failed(error, "ending a step")

    def spend(self, run: Callable[[int], None]) -> None:
        """Give a step to something else than training.

        Args:
            run: called with the step's number; it begins the step and waits for its end.
        """
        try:
            with WAIT_NOTIFIER:
                self._channel.wait_step(self.step)
            self.votes()
            self.settle_carried()
            self.step += 1
            self._spent_steps.append(self.step)
            run(self.step)
            # Nobody votes in such a step: the last votes stand.
            self._counted = self.step
        except self._core.ChannelError as error:
            self._raise_failed(error, "reading the optimizer's state")
        except BaseException as error:
            broken = f"{type(error).__name__} while reading the optimizer's state: {error}"
            with contextlib.suppress(SessionFailedError):
                self._reports.keep_and_raise(SessionFailedError(broken), None)
            raise

    # ---- from the channel

    def take(self, needed: list[int] | None, *, discards: bool = False) -> Arrived:
        """Wait for some tensors, or for the whole step, and take everything that is there.

        The votes of the step are in, and were found alike, before anything is returned.

        Args:
            needed: tensor numbers, or None for the step.
            discards: the gradients are not wanted.
        """
        members = self._members
        try:
            with WAIT_NOTIFIER, self._waiting(self.step, needed):
                if needed is None:
                    self._channel.wait_step(self.step)
                else:
                    self._channel.wait(needed, self.step)
                    self._wait_for_ballot()
            self.votes()
            ready = self._channel.take_ready(self.step)
        except self._core.ChannelError as error:
            self._raise_failed(error, "waiting for averaged gradients")
        arrived = Arrived([], [], [])
        rebuilt = []
        for index, absent in ready:
            if index < len(self._trained):
                gradient = self._gradients[index]
                self._gradients[index] = None
                arrived.indices.append(index)
                if not absent:
                    arrived.averaged.append(index)
                if index in self._lane:
                    mean = self._rebuilt(index, wanted=not (absent or discards))
                    rebuilt += [] if mean is None else [(index, mean)]
                elif gradient is not None and not absent and not discards:
                    arrived.gradients.append((index, gradient))
            elif index == members.buffers_index and members.buffers is not None:
                arrived.indices.append(index)
                packed, self._packed = self._packed, None
                if packed is not None and not absent:
                    self._carrier.collect([(index, packed)])
                members.buffers.land(None if absent else packed)
        if arrived.gradients:
            self._carrier.collect(arrived.gradients)
        arrived.gradients += rebuilt
        self._lay_out_anew(arrived)
        return arrived

    def _rebuilt(self, index: int, *, wanted: bool) -> Tensor | None:
        """Return the mean that all ranks' factors make, if it is wanted."""
        try:
            return self._lane.take(index, self.step, wanted=wanted)
        except self._core.ChannelError as error:
            self._raise_failed(error, "taking factors", index)
        except BlockError as error:
            name = self._trained[index].name
            reason = f"{error} (noticed while rebuilding {name!r} in step {self.training_step})"
            with contextlib.suppress(self._core.ChannelError):
                self._channel.abort(reason)
            failure = SessionFailedError(reason, self.training_step - 1)
            self._reports.keep_and_raise(failure, error)

    def _lay_out_anew(self, arrived: Arrived) -> None:
        """Give gradients the layout of parameters that were laid out anew after prepare().

        Fused optimizers take both for flat memory in the same order.
        """
        # Parameters whose update is due make a detour of each look at them.
        with torch._C.DisableTorchFunctionSubclass():
            for position, (index, gradient) in enumerate(arrived.gradients):
                parameter = self._trained[index].tensor
                if parameter.stride() != gradient.stride() and is_dense(parameter):
                    with torch.no_grad(), torch.inference_mode(False):
                        laid_out = in_layout(gradient, parameter.stride())
                    arrived.gradients[position] = (index, laid_out)

    def votes(self) -> list[RankStatus]:
        """Return the votes of the current step, which must have arrived; empty before step 1."""
        ballot = self._members.ballot
        if ballot is None or self.step == 0:
            return []
        if self._counted < self.step or self._votes is None:
            self._counted = self.step
            self._votes = ballot.count()
            self._reports.note_votes(self._votes)
        return self._votes

    def wait_for_votes(self) -> list[RankStatus]:
        """Wait for the votes of the current step alone; everything must be handed over."""
        try:
            with WAIT_NOTIFIER, self._waiting(self.step, [self._members.ballot_index]):
                self._wait_for_ballot()
        except self._core.ChannelError as error:
            self._raise_failed(error, "waiting for the other ranks' votes")
        return self.votes()

    def _wait_for_ballot(self) -> None:
        """Wait for the votes; they were the first to leave, so they mostly are here already."""
        index = self._members.ballot_index
        if index < 0 or self._counted == self.step:
            return
        if not self._channel.is_ready(index, self.step):
            self._channel.wait([index], self.step)

    def has_votes(self) -> bool:
        """Whether the votes of the current step are here."""
        try:
            self._channel.needed(self._members.ballot_index, self.step)
            return self._channel.is_ready(self._members.ballot_index, self.step)
        except self._core.ChannelError as error:
            self._raise_failed(error, "waiting for the other ranks' votes")

    # ---- where steps go on without those that are late

    def was_left_out(self) -> bool:
        """Whether the current step goes on without this rank; waits until that is known."""
        was_in, _, _ = self._channel.standing(self.step)
        if was_in is None:
            try:
                with WAIT_NOTIFIER:
                    self._channel.wait_decided(self.step)
            except self._core.ChannelError as error:
                self._raise_failed(error, "waiting for the contributors")
            was_in, _, _ = self._channel.standing(self.step)
        return was_in is False

    def settle_carried(self) -> LateGradientBuffer | None:
        """Return what is carried on of late gradients, those of the last step included.

        None where late gradients are lost. The last step must have ended here.
        """
        if self._carrying is not None and self.step > 0:
            self._carrying.settle(not self.was_left_out())
        return self._carrying

    def next_goes_on(self) -> bool:
        """Whether the others are in the next step already, or have finished it."""
        _, behind, decided = self._channel.standing(self.step)
        return behind or decided > self.step

    def _raise_failed(self, error: Exception, doing: str, index: int | None = None) -> NoReturn:
        where = f"{doing} in step {self.training_step}"
        if index is not None:
            where = f"{doing} {self._trained[index].name!r} in step {self.training_step}"
        self._reports.keep_and_raise(translate_error(self._core, error, where), error)
