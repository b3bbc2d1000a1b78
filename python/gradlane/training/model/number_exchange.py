"""Bytes of all ranks, exchanged in steps of the channel that are none of training."""

from __future__ import annotations

from collections.abc import Callable

from gradlane.training.carrier import Carrier
from gradlane.training.core import Channel
from gradlane.training.model.rank_status import Gathered, RankNumbers
from gradlane.training.model.step_layout import StepLayout


class NumberExchange:
    """Exchanges bytes in the statuses of steps in which nothing else is submitted."""

    def __init__(
        self,
        channel: Channel,
        carrier: Carrier,
        layout: StepLayout,
        spend: Callable[[Callable[[int], None], str], None],
    ) -> None:
        """Exchange nothing yet.

        Args:
            channel: the channel, with step 0 complete.
            carrier: submits the absence of everything else.
            layout: the tensors that take part.
            spend: gives a step to a call, which begins it and waits for its end; and what that
                does, for errors.
        """
        self._channel = channel
        self._carrier = carrier
        self._layout = layout
        self._spend = spend

    def exchange(self, generation: int, size: int, part: bytes) -> dict[int, RankNumbers]:
        """Exchange some bytes with all ranks.

        Args:
            generation: number of the newest membership that this rank knows.
            size: how many bytes this rank has in all.
            part: of them.

        Returns:
            What came of each rank that is in the step.
        """
        layout, channel, status = self._layout, self._channel, self._layout.status
        found: dict[int, RankNumbers] = {}
        if status is None:
            return found
        lent = []

        def run(step: int) -> None:
            lanes = status.write_numbers(Gathered.INTEGERS, generation, size, part)
            channel.step_begin(step)
            channel.gradient_ready(layout.status_index, step, lanes.data_ptr(), lanes.nbytes)
            for index in layout.gradient_numbers:
                lent.append(self._carrier.submit_absent(index, step))
            if layout.buffers is not None:
                lent.append(self._carrier.submit_absent(layout.buffers_index, step))
            channel.step_end(step)
            channel.wait_step(step)
            channel.take_ready(step)
            found.update(status.read_numbers())

        self._spend(run, "gathering numbers")
        return found
