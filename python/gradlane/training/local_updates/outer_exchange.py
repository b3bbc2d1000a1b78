"""Exchanges of outer gradients: one step of the channel each.

The tensors of the fragments that are exchanged are contributed as gradients are in exact training;
all others are reported as absent by every rank, and nothing is sent of them. Beside them travels
what each rank is doing, in the rank statuses, so that ranks that exchange different things find out
before anything is used.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from gradlane.training.model.channel_setup import Connected
from gradlane.training.model.rank_status import Gathered, RankNumbers
from gradlane.training.rendezvous.wait_notifier import WAIT_NOTIFIER

_NUMBERS = struct.Struct("<BQQI")


class Occasion(enum.IntEnum):
    """Why a rank exchanges."""

    TURN = 1
    SYNCHRONIZE = 2
    CLOSE = 3
    GATHER = 4


@dataclass(frozen=True)
class RankReport:
    """What a rank tells the others with an exchange.

    Attributes:
        occasion: why it exchanges.
        step: its step.
        samples: behind its steps since the last exchange; None: it has not said.
        sample: digest of a sample of the common values before; 0: none is due.
    """

    occasion: Occasion
    step: int
    samples: int | None
    sample: int

    def to_bytes(self) -> bytes:
        """Return it as it travels."""
        samples = 0 if self.samples is None else self.samples + 1
        return _NUMBERS.pack(self.occasion, self.step, samples, self.sample)

    @classmethod
    def of(cls, numbers: RankNumbers) -> RankReport:
        """Return what a rank has told."""
        if numbers.kind is not Gathered.OUTER_GRADIENTS:
            return cls(Occasion.GATHER, 0, None, 0)
        occasion, step, samples, sample = _NUMBERS.unpack(numbers.part[: _NUMBERS.size])
        return cls(Occasion(occasion), step, samples - 1 if samples else None, sample)


class OuterExchange:
    """Sends outer gradients to all ranks, and takes their means."""

    def __init__(
        self,
        connected: Connected,
        waiting: Callable[[int, list[int] | None], AbstractContextManager[None]],
    ) -> None:
        """Begin after step 0.

        Args:
            connected: the model's channel and tensors.
            waiting: a context that records a wait for a step of the channel.
        """
        self._channel = connected.channel
        self._carrier = connected.carrier
        self._layout = connected.layout
        self._waiting = waiting
        self.step = 0
        """Steps of the channel so far."""
        self._lent: dict[int, Tensor] = {}
        # Nothing lands there, unless ranks exchange different things, which fails: memory that is
        # never touched is none.
        self._unused = [entry.host_memory() for entry in self._layout.trained]

    def submit(
        self, differences: Mapping[int, Tensor], report: RankReport, generation: int
    ) -> None:
        """Begin an exchange, and return at once.

        Args:
            differences: this rank's, by tensor number; their memory is in use until `wait`.
            report: for the other ranks.
            generation: number of the newest membership that this rank knows.
        """
        told = report.to_bytes()
        self._submit(differences, (Gathered.OUTER_GRADIENTS, generation, len(told), told))

    def _submit(
        self, differences: Mapping[int, Tensor], told: tuple[Gathered, int, int, bytes]
    ) -> None:
        layout, channel = self._layout, self._channel
        assert layout.status is not None
        self.step += 1
        channel.step_begin(self.step)
        self._lent = dict(differences)
        status = layout.status.write_numbers(*told)
        channel.gradient_ready(layout.status_index, self.step, status.data_ptr(), status.nbytes)
        for index, entry in enumerate(layout.trained):
            if index in differences:
                self._carrier.submit(index, self.step, differences[index])
            else:
                unused = self._unused[index].data_ptr()
                channel.tensor_absent(index, self.step, unused, entry.nbytes)
        channel.step_end(self.step)

    def wait(self) -> tuple[dict[int, Tensor], dict[int, RankReport], list[int]]:
        """Wait for the end of the exchange.

        Returns:
            The means, by tensor number, in the memory of the differences; the report of every rank
            that is in them; and the numbers of the newest memberships that these ranks knew.
        """
        numbers = self._wait()
        told = {rank: RankReport.of(one) for rank, one in numbers.items()}
        means, self._lent = self._lent, {}
        return means, told, [one.generation for one in numbers.values()]

    def gather(self, generation: int, size: int, part: bytes) -> dict[int, RankNumbers]:
        """Give a step of the channel to some bytes of all ranks' numbers; nothing is under way.

        Args:
            generation: number of the newest membership that this rank knows.
            size: how many bytes this rank has in all.
            part: of them.

        Returns:
            What came of each rank that is in the step.
        """
        self._submit({}, (Gathered.INTEGERS, generation, size, part))
        return self._wait()

    def _wait(self) -> dict[int, RankNumbers]:
        with WAIT_NOTIFIER, self._waiting(self.step, None):
            self._channel.wait_step(self.step)
        self._channel.take_ready(self.step)
        status = self._layout.status
        assert status is not None
        self._carrier.collect(list(self._lent.items()))
        return status.read_numbers()

    def spend(self, run: Callable[[int], None]) -> None:
        """Give a step of the channel to something else; nothing is under way."""
        self.step += 1
        run(self.step)
