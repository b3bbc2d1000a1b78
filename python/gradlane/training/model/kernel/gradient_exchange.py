"""The steps of one channel: gradients and buffers out, means and all ranks' statuses back.

`StepLayout` numbers everything that takes part in a step. A step of the channel is complete
when every one of them has come back; a tensor without a gradient here is submitted as absent.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
from array import array
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from gradlane.errors import SessionFailedError, UsageError
from gradlane.training.carrier import Carrier
from gradlane.training.core import Channel, CoreModule, translate_error
from gradlane.training.factors.block import BlockError, Dense, Part, TouchedRows
from gradlane.training.factors.sending import FactorExchange
from gradlane.training.model.arrived_gradients import ArrivedGradients
from gradlane.training.model.consistency_check import ConsistencyCheck
from gradlane.training.model.failure_latch import FailureLatch
from gradlane.training.model.joined_gradients import JoinedGradients
from gradlane.training.model.kernel.buffer_exchange import BufferExchange
from gradlane.training.model.rank_status import Statuses
from gradlane.training.model.stages.stage import StepStage
from gradlane.training.model.stages.stage_list import StageList
from gradlane.training.model.stages.step_start import StepStart
from gradlane.training.model.step_layout import StepLayout
from gradlane.training.model.step_norm import StepNorm, WaitContext
from gradlane.training.modules.gradient_intake import GradientIntake, raw_grad
from gradlane.training.rendezvous.wait_notifier import WAIT_NOTIFIER


class GradientExchange:
    """Submits gradients and takes their means back, one step after the other."""

    def __init__(
        self,
        core: CoreModule,
        channel: Channel,
        carrier: Carrier,
        layout: StepLayout,
        consistency: ConsistencyCheck,
        failure: FailureLatch,
        waiting: WaitContext,
        stages: StageList,
        rank: int = 0,
        steps_before: int = 0,
    ) -> None:
        """Start after step 0.

        Args:
            core: where the channel's errors come from.
            channel: the channel, with step 0 complete.
            carrier: brings gradients to the channel and back.
            layout: the tensors that take part.
            consistency: judges all ranks' statuses.
            failure: the model's.
            waiting: a context around every wait for a step's tensors, or for the step.
            stages: change gradients before they leave.
            rank: this rank.
            steps_before: training steps before the ranks were connected.
        """
        self._core = core
        self._channel = channel
        self._carrier = carrier
        self._layout = layout
        self._consistency = consistency
        self._failure = failure
        self._waiting = waiting
        self._stages = stages
        self._before_send = stages.on[StepStage.before_send]
        self._before_send_all = stages.on[StepStage.before_send_all]
        self._held: dict[int, Tensor] = {}
        """Gradients that stages are to see together, before they leave."""
        self._trained = layout.trained
        self._factored = layout.factored
        self._captured = layout.captured
        self._steps_before = steps_before
        self._intake = GradientIntake(layout.trained)
        self._joined = JoinedGradients(
            layout.groups,
            layout.absences,
            layout.table_size,
            layout.trained,
            carrier,
            self._intake,
        )
        self.factors = FactorExchange(core, channel, layout.factored, rank, self.training_step_of)
        """Gradients that travel as factors or rows."""
        # Eight bytes for each, and there may be some for every checkpoint.
        self._spent_steps = array("q")
        self._gradients: list[Tensor | None] = [None] * len(layout.trained)
        self.is_submitted = [False] * len(layout.trained)
        """Whether each tensor's gradient was submitted, or its absence, in this step."""
        self.pushes = [0] * len(layout.trained)
        """How many gradients of each tensor were submitted alone so far."""
        pack, index = layout.buffers, layout.buffers_index
        self._buffers = None if pack is None else BufferExchange(carrier, pack, index)
        self._statuses: Statuses = {}
        self._judged_step = 0
        self.step = 0
        rebuild = functools.partial(self._rebuilt, wanted=True)
        self.norm = StepNorm(
            core, channel, layout.means, layout.factored, rebuild, failure, waiting
        )
        """The norm of all gradients, before their means are here."""
        self._weight: int | None = None
        """Factor of this rank's gradients in this step, or None."""

    @property
    def layout(self) -> StepLayout:
        """The tensors that take part."""
        return self._layout

    @property
    def training_step(self) -> int:
        """Number of the current step of training."""
        return self.training_step_of(self.step)

    def training_step_of(self, step: int) -> int:
        """Number of the training step that a step of the channel was, or came after."""
        return self._steps_before + step - bisect.bisect_right(self._spent_steps, step)

    def repeat_training_step(self) -> None:
        """Have the next step of the channel be one of the same step of training as this one."""
        self._spent_steps.append(self.step)

    # ---- to the channel

    def begin(self, start: StepStart, begin: Callable[[int], None] | None = None) -> None:
        """Begin the next step, once the one before is complete everywhere.

        Args:
            start: how it begins.
            begin: begins it on the channel in another way than by contributing to it.
        """
        try:
            # Every tensor may be ready a moment before the channel counts the step as complete.
            with WAIT_NOTIFIER, self._waiting(self.step, None):
                self._channel.wait_step(self.step)
            self.statuses()
            self.complete()
            (begin or self._channel.step_begin)(self.step + 1)
            # Another thread that looks on must not take the last step's marks for this one's.
            self.is_submitted = [False] * len(self._trained)
            if self._buffers is not None:
                self._buffers.begin(shadow=start.shadow)
            self.step += 1
            self._intake.begin_step()
            self._weight = start.weight
            self.norm.begin(self.step, self.training_step, wanted=start.measures)
            for call in start.on_channel:
                call(self.step)
            if self._layout.status is not None and start.status is not None:
                lanes = self._layout.status.write(start.status)
                self._channel.gradient_ready(
                    self._layout.status_index, self.step, lanes.data_ptr(), lanes.nbytes
                )
        except self._core.ChannelError as error:
            self._raise_failed(error, "beginning a step")
        self._gradients = [None] * len(self._trained)
        self._joined.begin()
        self.factors.begin()

    def hold_dense(self, index: int) -> None:
        """Take the `.grad` of a parameter that sends factors as one more part."""
        self.factors.hold(index, Dense(self._intake.take(index, self._trained[index].tensor)))

    def submit(self, index: int) -> None:
        """Submit a parameter's gradient: its factors, or its `.grad`."""
        if self._joined.group_of[index] >= 0:
            self.is_submitted[index] = True
            if self._joined.note_present(index):
                self._submit_group(index)
            return
        factored = index in self._factored
        if factored and index not in self._captured:
            self.factors.hold(index, self._take_rows(index))
        elif not factored:
            gradient = self._intake.take(index, self._trained[index].tensor)
            self._gradients[index] = gradient
        self.is_submitted[index] = True
        self.pushes[index] += 1
        if factored:
            try:
                self.factors.submit(index, self.step)
            except self._core.ChannelError as error:
                self._raise_failed(error, "handing over", index)
        elif not self._before_send_all:
            self._hand_over(index, gradient)
        else:
            self._held[index] = gradient
            if all(self.is_submitted):
                self._hand_over_held()

    def _submit_group(self, index: int) -> None:
        """Submit the group of a tensor, which is whole."""
        try:
            self._joined.submit(index, self.step, self._weight)
        except self._core.ChannelError as error:
            self._raise_failed(error, "handing over", index)

    def _hand_over_held(self) -> None:
        held, self._held = self._held, {}
        for stage in self._before_send_all:
            stage.before_send_all(list(held.values()))
        for index, gradient in held.items():
            self._hand_over(index, gradient)

    def _hand_over(self, index: int, gradient: Tensor) -> None:
        for stage in self._before_send:
            stage.before_send(index, gradient)
        if self._weight is not None:
            with torch.no_grad():
                gradient.mul_(self._weight)
        try:
            self._carrier.submit(index, self.step, gradient)
        except self._core.ChannelError as error:
            self._raise_failed(error, "handing over", index)

    def _take_rows(self, index: int) -> Part:
        """Take the `.grad` of a parameter that sends rows.

        Raises:
            UsageError: it is not sparse, and the optimizer takes no other.
        """
        rows = self._intake.take_rows(index, self._trained[index].tensor)
        if rows is None:
            self._layout.check_takes_dense(index)
            gradient = self._intake.take(index, self._trained[index].tensor)
            return Dense(gradient if self._weight is None else gradient * self._weight)
        numbers, values = rows
        return TouchedRows(numbers, values if self._weight is None else values * self._weight)

    def is_watched(self) -> bool:
        """Whether the program looks at the memory of any gradient of this step."""
        self._joined.look(self.is_submitted)
        return self._intake.is_watched()

    def look(self, index: int) -> None:
        """Look at the `.grad` of a parameter that is not submitted yet.

        Raises:
            UsageError: it cannot be averaged.
        """
        self._intake.look(index)

    def give_back(self, index: int, mean: Tensor) -> Tensor:
        """Return the tensor for `.grad`: the program's own with the mean, if it looks at that."""
        return self._intake.give_back(index, mean)

    def has_taken(self, index: int) -> bool:
        """Whether some of a parameter's gradient has left `.grad` in this step."""
        return self.is_submitted[index] or self.factors.holds(index)

    def unsubmitted_tensors(self) -> list[int]:
        """Return the channel's numbers of what was not submitted in this step, also to another
        thread."""
        joined = self._joined
        held = [
            index
            for index, submitted in enumerate(self.is_submitted)
            if not submitted and joined.group_of[index] < 0
        ]
        held += joined.unsubmitted()
        held += self._held
        buffers = self._buffers
        return held if buffers is None or buffers.is_submitted else [*held, buffers.index]

    def present(self) -> list[int]:
        """Return the parameters whose gradient has left `.grad`, before `submit_rest`."""
        return [index for index in range(len(self._trained)) if self.has_taken(index)]

    def submit_rest(self, *, discards: bool = False) -> None:
        """Submit everything else: gradients in `.grad`, factors, and the absence of all others.

        Args:
            discards: leave `.grad` alone and submit absence alone.
        """
        absent = []
        if discards:
            self._joined.forget()
        for index, submitted in enumerate(self.is_submitted):
            if submitted:
                continue
            if not discards:
                has_dense = raw_grad(self._trained[index].tensor) is not None
                if has_dense and index in self._captured:
                    self.hold_dense(index)
                if has_dense or self.has_taken(index):
                    self.submit(index)
                    continue
            absent.append(index)
        self._hand_over_held()
        try:
            for index in absent:
                if self._joined.group_of[index] >= 0:
                    if self._joined.note_absent(index):
                        self._submit_group(index)
                elif index in self._factored:
                    self.factors.submit_absent(index, self.step)
                else:
                    self._gradients[index] = self._carrier.submit_absent(index, self.step)
                self.is_submitted[index] = True
        except self._core.ChannelError as error:
            self._raise_failed(error, "ending a step")

    def submit_buffers(self, *, shadow: bool) -> None:
        """Submit the buffers, if they were not yet.

        Args:
            shadow: this rank has seen no data in this step and has nothing to say about them.
        """
        if self._buffers is not None:
            try:
                self._buffers.submit(self.step, silent=shadow)
            except self._core.ChannelError as error:
                self._raise_failed(error, "handing the buffers over")

    def end(self) -> None:
        """Tell the channel that the step has ended here."""
        try:
            self._channel.step_end(self.step)
        except self._core.ChannelError as error:
            self._raise_failed(error, "ending a step")

    def spend(
        self, run: Callable[[int], None], doing: str = "exchanging state between steps"
    ) -> None:
        """Give a step to something else than training.

        Args:
            run: called with the step's number; it begins the step and waits for its end.
            doing: what that is, for errors.
        """
        try:
            with WAIT_NOTIFIER:
                self._channel.wait_step(self.step)
            self.statuses()
            self.complete()
            self.step += 1
            self._spent_steps.append(self.step)
            run(self.step)
            # Such a step has no statuses: the last ones stand.
            self._judged_step = self.step
        except self._core.ChannelError as error:
            self._raise_failed(error, doing)
        except BaseException as error:
            broken = f"{type(error).__name__} while {doing}: {error}"
            with contextlib.suppress(SessionFailedError):
                self._failure.fail_and_raise(SessionFailedError(broken))
            raise

    def abort(self, reason: str) -> None:
        """Tell all ranks why this one gives up."""
        self._channel.abort(reason)

    # ---- from the channel

    def take_arrived(
        self, needed: list[int] | None, *, discards: bool = False, lends: bool = False
    ) -> ArrivedGradients:
        """Wait for some tensors, or for the whole step, and take everything that is there.

        All ranks' statuses of the step are in, and were found alike, before anything is returned.

        Args:
            needed: tensor numbers, or None for the step.
            discards: the gradients are not wanted.
            lends: they are done with before the next step begins.
        """
        joined = self._joined
        if needed is not None:
            needed = list(dict.fromkeys(map(joined.number_of, needed)))
        try:
            with WAIT_NOTIFIER, self._waiting(self.step, needed):
                if needed is None:
                    self._channel.wait_step(self.step)
                else:
                    self._channel.wait(needed, self.step)
                    self._wait_for_status_tensor()
            self.statuses()
            ready = self._channel.take_ready(self.step)
        except self._core.ChannelError as error:
            self._raise_failed(error, "waiting for averaged gradients")
        arrived = ArrivedGradients([], [], [])
        rebuilt, groups = [], []
        for index, absent in ready:
            if index < len(self._trained):
                gradient = self._gradients[index]
                self._gradients[index] = None
                arrived.indices.append(index)
                if not absent:
                    arrived.averaged.append(index)
                if index in self._factored:
                    if self.norm.is_measured:
                        mean = self.norm.take_mean(index)
                    else:
                        mean = self._rebuilt(index, wanted=not (absent or discards))
                    rebuilt += [] if mean is None or discards else [(index, mean)]
                elif gradient is not None and not absent and not discards:
                    arrived.gradients.append((index, gradient))
            elif index in joined.numbers and index != joined.absences_index:
                arrived.indices += joined.members(index)
                if not absent and not discards:
                    groups.append(index)
            elif self._buffers is not None and index == self._buffers.index:
                arrived.indices.append(index)
                self._land(self._buffers, absent=absent)
        if arrived.gradients:
            self._carrier.collect(arrived.gradients)
        if groups:
            arrived.gradients += joined.take_means(groups, self._wait_for, lends=lends)
        arrived.gradients += rebuilt
        arrived.match_layouts(self._trained, are_dense=not self._factored)
        return arrived

    def _wait_for(self, number: int) -> None:
        """Wait for one tensor of the channel."""
        try:
            with WAIT_NOTIFIER, self._waiting(self.step, [number]):
                self._channel.wait([number], self.step)
        except self._core.ChannelError as error:
            self._raise_failed(error, "waiting for averaged gradients")

    def _land(self, buffers: BufferExchange, *, absent: bool) -> None:
        """Write the values that all ranks share after a step into the buffers."""
        try:
            buffers.land(absent=absent)
        except (UsageError, SessionFailedError) as error:
            # What else has arrived with it is taken: the step cannot end here any more.
            with contextlib.suppress(self._core.ChannelError):
                self._channel.abort(str(error))
            self._failure.fail(error)
            raise

    def _rebuilt(self, index: int, *, wanted: bool) -> Tensor | None:
        """Return the mean that all ranks' blocks make, if it is wanted and some rank has one."""
        try:
            return self.factors.take(index, self.step, wanted=wanted)
        except self._core.ChannelError as error:
            self._raise_failed(error, "taking factors", index)
        except BlockError as error:
            name = self._trained[index].name
            reason = f"{error} (noticed while rebuilding {name!r} in step {self.training_step})"
            with contextlib.suppress(self._core.ChannelError):
                self._channel.abort(reason)
            self._failure.fail_and_raise(SessionFailedError(reason, self.training_step - 1), error)

    def complete(self) -> None:
        """Have stages see what the last step, which must have ended here, has come to."""
        if self.step > 0:
            for stage in self._stages.on[StepStage.completed]:
                stage.completed(self.step)

    # ---- statuses of all ranks

    def statuses(self) -> Statuses:
        """Return all ranks' statuses of this step, which must be here; empty before step 1."""
        tensor = self._layout.status
        if tensor is None or self.step == 0:
            return {}
        if self._judged_step < self.step:
            self._judged_step = self.step
            self._statuses = tensor.read()
            self._consistency.judge(self._statuses, self.training_step)
        return self._statuses

    def wait_for_statuses(self) -> Statuses:
        """Wait for the statuses of the current step alone; everything must be submitted."""
        try:
            with WAIT_NOTIFIER, self._waiting(self.step, [self._layout.status_index]):
                self._wait_for_status_tensor()
        except self._core.ChannelError as error:
            self._raise_failed(error, "waiting for the other ranks' statuses")
        return self.statuses()

    def _wait_for_status_tensor(self) -> None:
        """Wait for the statuses; they were the first to leave, so they mostly are here already."""
        index = self._layout.status_index
        if index < 0 or self._judged_step == self.step:
            return
        if not self._channel.is_ready(index, self.step):
            self._channel.wait([index], self.step)

    def has_statuses(self) -> bool:
        """Whether the statuses of the current step are here."""
        try:
            self._channel.needed(self._layout.status_index, self.step)
            return self._channel.is_ready(self._layout.status_index, self.step)
        except self._core.ChannelError as error:
            self._raise_failed(error, "waiting for the other ranks' statuses")

    def _raise_failed(self, error: Exception, doing: str, index: int | None = None) -> NoReturn:
        where = f"{doing} in step {self.training_step}"
        if index is not None:
            where = f"{doing} {self._trained[index].name!r} in step {self.training_step}"
        self._failure.fail_and_raise(translate_error(self._core, error, where), error)
