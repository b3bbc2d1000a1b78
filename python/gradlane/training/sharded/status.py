"""What the ranks of a column compare in each exchange: their place in training, and absences.

It travels as means of small whole numbers in f64: the mean of equal ones is that number, so a rank
whose own differs from the mean knows that the ranks differ.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gradlane.training.rendezvous.parameter_check import part_of

_PLACE = (
    "the number of optimizer steps",
    "the number of backward calls",
    "the exchange within one",
    "its end",
)
_LEADING = (*_PLACE, "the sample")
_SAMPLE_BYTES = 256
"""Bytes of each shard that a sample reads."""


class StatusNumbers:
    """The numbers of one exchange."""

    def __init__(self, parameters: Sequence[str]) -> None:
        """Make zeros.

        Args:
            parameters: names of the trained parameters, in the order of their numbers.
        """
        self._parameters = parameters
        self.mean = torch.zeros(self.count, dtype=torch.float64, device="cpu")
        """Own numbers, and the mean in their place once it has arrived."""
        self._own = self.mean.clone()

    @property
    def count(self) -> int:
        """How many there are."""
        return len(_LEADING) + len(self._parameters)

    def fill(
        self,
        steps: int,
        backward: int,
        exchange: int,
        is_last: bool,
        sample: int,
        present: Iterable[int],
    ) -> None:
        """Set this rank's numbers.

        Args:
            steps: training steps that have ended.
            backward: number of the backward call.
            exchange: number of the exchange within it.
            is_last: whether no other follows within it.
            sample: checksum of the parameters; 0: none is compared.
            present: positions of the parameters with a gradient.
        """
        self.mean.zero_()
        self.mean[: len(_LEADING)] = torch.tensor(
            [steps, backward, exchange, int(is_last), sample], dtype=torch.float64, device="cpu"
        )
        for position in present:
            self.mean[len(_LEADING) + position] = 1.0
        self._own.copy_(self.mean)

    def difference(self) -> str:
        """Return how the ranks differ, once the mean is there; empty if they do not."""
        different = (self.mean != self._own).nonzero().flatten().tolist()
        if not different:
            return ""
        place = int(different[0])
        if place >= len(_LEADING):
            return (
                f"parameter {self._parameters[place - len(_LEADING)]!r} has a gradient on some "
                "nodes and none on others (torch's own HSDP would wait forever): give every "
                "parameter a gradient on all ranks, or call "
                "model.set_reduce_scatter_unused_params(True)"
            )
        if place == len(_LEADING) - 1:
            return (
                "the nodes have different parameters (their samples differ): something has "
                "changed them on one node alone, such as another learning rate, or a checkpoint "
                "that not all ranks have loaded"
            )
        return (
            f"the nodes are in different places of training ({_LEADING[place]} differs: this rank "
            f"has {self._own[place]:g}, all on average {self.mean[place]:g}): let all ranks make "
            "the same backward calls"
        )


def checksum(shards: Iterable[Tensor], part: int | None = None) -> int:
    """Return a checksum of shards, below 2^32.

    Args:
        shards: dense, on the host.
        part: which part of each shard counts; higher numbers go on, and begin again. None: all of
            it.
    """
    found = 0
    for shard in shards:
        flat = shard.reshape(-1)
        if part is not None:
            flat = part_of(flat, part, _SAMPLE_BYTES)
        found = zlib.crc32(bytes(flat.contiguous().view(torch.uint8).numpy()), found)
    return found
