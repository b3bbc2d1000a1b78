"""One small tensor beside the gradients that tells all ranks how each one ended its last step.

Gradients are matched by the number of a step alone. If one rank calls `optimizer.step()` where
another calls `zero_grad()`, or where its learning rate is another one, the gradients of the next
step still match, and the ranks would train different models without a word. So every rank's first
contribution to a step is a lane of this tensor: how it ended the step before, with which
hyper-parameters, what it has changed of buffers since, and whether it has data for this one. It
travels while backward runs and is read before the first update of the step, which therefore never
mixes unlike ranks.

Every so many steps a second lane tells a digest of a sample of its parameters: what steps past
gradlane, or a hand-written change on one rank, ends there instead of in a slow drift.

A lane is an integer below 2^48 that one rank contributes and all others leave at 0, so the mean
times the number of ranks gives it back exactly.
"""

from __future__ import annotations

import contextlib
import enum
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradlane.errors import RendezvousError, SessionFailedError
from gradlane.training.model.buffers import UNCHANGED, UNKNOWN, BufferPack
from gradlane.training.rendezvous.rendezvous import RendezvousScope


class StepEnding(enum.IntEnum):
    """How a rank ended a step."""

    NONE = 0
    STEPPED = 1
    DISCARDED = 2
    CARRIED_ON = 3
    SHADOWED = 4


_WORDS = {
    StepEnding.NONE: "had no step",
    StepEnding.STEPPED: "called optimizer.step()",
    StepEnding.DISCARDED: "forgot the gradients (zero_grad() or the end of the session)",
    StepEnding.CARRIED_ON: "ran another backward() on top of the averaged gradients",
}
_SHADOW = 8
_DIGEST_UNIT = 16
_DIGEST_BITS = 24
_CHANGES_UNIT = _DIGEST_UNIT << _DIGEST_BITS


@dataclass(frozen=True)
class RankStatus:
    """One rank's lane.

    Attributes:
        ending: how the rank ended the step before.
        shadow: whether it has no data for this step and goes along inside `session.join()`.
        digest: of its hyper-parameters at its last `optimizer.step()`; 0 if there was none.
        changes: of its buffers since that step, as `BufferPack.changes` counts them.
        changed: name of the first buffer that was changed, or empty.
        sample: digest of a sample of its parameters after that step; 0 if it took none.
    """

    ending: StepEnding
    shadow: bool
    digest: int
    changes: int = UNKNOWN
    changed: str = ""
    sample: int = 0


class ConsistencyCheck:
    """This rank's end of the tensor."""

    def __init__(self, rank: int, world_size: int, buffers: BufferPack | None = None) -> None:
        """Make the tensor; its memory is lent to the core for a whole step at a time.

        Args:
            rank: this rank.
            world_size: number of ranks.
            buffers: those that are kept alike, or None.
        """
        self._rank = rank
        self._buffers = buffers
        self._world_size = world_size
        with torch.inference_mode(False):
            self.tensor = torch.zeros(2 * world_size, dtype=torch.float64, device="cpu")
            # The same memory: torch 2.4 reads no tensor inside torch.func.
            self._lanes = self.tensor.numpy()

    def cast(self, vote: RankStatus) -> Tensor:
        """Write this rank's lanes; returns the tensor to hand over."""
        lane = vote.ending + (_SHADOW if vote.shadow else 0) + _DIGEST_UNIT * vote.digest
        if self._buffers is not None and not vote.shadow:
            lane += _CHANGES_UNIT * self._buffers.changes()
        with torch.no_grad():
            self.tensor.zero_()
            self.tensor[self._rank] = float(lane)
            self.tensor[self._world_size + self._rank] = float(vote.sample)
        return self.tensor

    def count(self) -> list[RankStatus]:
        """Read all ranks' lanes from the mean that has arrived."""
        lanes = [round(mean * self._world_size) for mean in self._lanes.tolist()]
        votes, samples = lanes[: self._world_size], lanes[self._world_size :]
        return [self._vote(lane, sample) for lane, sample in zip(votes, samples, strict=True)]

    def _vote(self, lane: int, sample: int) -> RankStatus:
        digest, changes = lane % _CHANGES_UNIT // _DIGEST_UNIT, lane // _CHANGES_UNIT
        changed = ""
        if self._buffers is not None and changes > UNCHANGED:
            changed = self._buffers.first_changed(changes)
        ending = StepEnding(lane % _SHADOW)
        return RankStatus(ending, bool(lane & _SHADOW), digest, changes, changed, sample)


def check_votes(votes: Sequence[RankStatus], step: int) -> None:
    """Check that all ranks that took part in a step ended it in the same way.

    Args:
        votes: by rank, cast at the beginning of the step after it.
        step: the number of the step that they speak of.

    Raises:
        SessionFailedError: they did not; the message names the ranks.
    """
    _check_changes(votes, step)
    endings: dict[StepEnding, list[int]] = {}
    digests: dict[int, list[int]] = {}
    for rank, vote in enumerate(votes):
        if vote.ending is not StepEnding.SHADOWED:
            endings.setdefault(vote.ending, []).append(rank)
        if vote.ending is StepEnding.STEPPED:
            digests.setdefault(vote.digest, []).append(rank)
    if len(endings) > 1:
        told = "; ".join(f"{_ranks(ranks)} {_WORDS[ending]}" for ending, ranks in endings.items())
        raise SessionFailedError(
            f"the ranks ended step {step} differently: {told}. From there on they train different "
            "models: make the decision alike on all ranks, for example from the averaged "
            "gradients, and restart from the last checkpoint",
            step - 1,
        )
    if len(digests) > 1:
        told = " and ".join(_ranks(ranks) for ranks in digests.values())
        raise SessionFailedError(
            f"the optimizer's hyper-parameters in step {step} differ between {told}: set them "
            "alike on all ranks (a scheduler that looks at a loss needs the same loss "
            "everywhere; one that counts batches needs the same count; the memory formats of "
            "parameters count, too), and restart from the "
            "last checkpoint",
            step - 1,
        )


def differing_samples(votes: Sequence[RankStatus]) -> str:
    """Return which ranks' samples of the parameters differ; empty where they agree."""
    ranks: dict[int, list[int]] = {}
    for rank, vote in enumerate(votes):
        if vote.sample:
            ranks.setdefault(vote.sample, []).append(rank)
    return " and ".join(map(_ranks, ranks.values())) if len(ranks) > 1 else ""


def _check_changes(votes: Sequence[RankStatus], step: int) -> None:
    known: dict[int, list[int]] = {}
    for rank, vote in enumerate(votes):
        if not vote.shadow and vote.changes != UNKNOWN:
            known.setdefault(vote.changes, []).append(rank)
    if len(known) > 1:
        told = "; ".join(
            f"{_ranks(ranks)} changed {votes[ranks[0]].changed!r}"
            if changes != UNCHANGED
            else f"{_ranks(ranks)} changed none"
            for changes, ranks in known.items()
        )
        raise SessionFailedError(
            f"buffers were changed between step {step} and the next forward, and not alike on all "
            f"ranks: {told}. All ranks get rank 0's buffers when a step ends, and none in between: "
            'change them alike on all ranks, or give prepare(..., buffers="local"), and restart '
            "from the last checkpoint",
            step,
        )


class Hyperparameters:
    """A short digest of an optimizer's numbers and its parameters' strides, when they change."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Watch an optimizer."""
        self._optimizer = optimizer
        self._last: list[tuple[object, ...]] = []
        self._digest = 0

    def digest(self) -> int:
        """Return a number of 24 bits, never 0; tensors among the hyper-parameters are left out."""
        names = self._optimizer.defaults
        now = [
            tuple(group[name] for name in names if _is_numeric(group.get(name)))
            for group in self._optimizer.param_groups
        ]
        # Norms and factored moments add up in the order of the memory, so that it must be alike.
        for group in self._optimizer.param_groups:
            now.append(tuple(one.stride() for one in list.__iter__(group["params"])))
        if self._digest == 0 or now != self._last:
            self._last = now
            self._digest = zlib.crc32(repr(now).encode()) % ((1 << _DIGEST_BITS) - 1) + 1
        return self._digest


def _is_numeric(value: object) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(one, (int, float)) for one in value)
    return isinstance(value, (int, float))


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def tell_ending(meeting: RendezvousScope, step: int, ending: int, digest: int) -> None:
    """Leave word of how the last step ended here: no step follows whose votes would tell.

    Args:
        meeting: where the ranks have met.
        step: number of the last step.
        ending: how it ended, a number of `StepEnding`.
        digest: of the hyper-parameters, as in a vote.
    """
    with contextlib.suppress(RendezvousError):
        meeting.put(f"ending/{meeting.rank_info.rank}", json.dumps([step, ending, digest]))


def compare_endings(meeting: RendezvousScope) -> None:
    """Compare all ranks' last steps, on rank 0, once all have said goodbye.

    Raises:
        SessionFailedError: they ended it differently.
    """
    place = meeting.rank_info
    if place.rank != 0:
        return
    try:
        told = [meeting.peek(f"ending/{rank}") for rank in range(place.world_size)]
    except RendezvousError:
        return
    lanes = [json.loads(one) for one in told if one is not None]
    if len(lanes) < place.world_size or any(lane[0] != lanes[0][0] for lane in lanes):
        return
    votes = [RankStatus(StepEnding(ending), False, digest) for _, ending, digest in lanes]
    check_votes(votes, lanes[0][0])
