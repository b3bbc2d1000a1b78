"""One small tensor beside the gradients that tells all ranks how each one ended its last step.

Gradients are matched by the number of a step alone. If one rank calls `optimizer.step()` where
another calls `zero_grad()`, or has another learning rate, the gradients of the next step still
match, and the ranks would train different models without a word. So every rank's first
contribution to a step is a lane of this tensor: how it ended the step before, with which
hyper-parameters, which buffers it has changed since, and whether it has data for this step. The
second lane says how its parameters lie in memory: norms and some optimizers add up in that order.
The tensor travels while backward runs and is read before the first update of the step, which
therefore never mixes unlike ranks.

Every `SAMPLE_EVERY` steps that lane also holds a digest of a sample of the rank's parameters: an
update past gradlane, or a hand-written change on one rank, is found there instead of drifting. A
third one holds the number of samples whose mean the rank's gradients of the step are, if the
program has given it (`session.weight()`). The fourth holds the number of the membership that the
rank knows, plus one. Where training goes on, the fifth holds the number of a request to join that
the first member has found.

A lane is an integer below 2^48 that one rank contributes and all others leave at 0, so the mean
times the number of ranks in it gives it back exactly. Where ranks are lost and training goes on, a
mean is over the ranks of before or over those that are left: the fourth lane of a rank is not 0 if
the rank is in the mean.

Between two steps the same lanes carry whole numbers of the program from every rank to every other:
`StatusTensor.write_numbers`.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradlane.errors import RendezvousError, SessionFailedError
from gradlane.formats.rank_names import ranks_text
from gradlane.training.log import log
from gradlane.training.model.buffers import CHANGED_APART, UNCHANGED, UNKNOWN, BufferPack
from gradlane.training.model.failure_latch import FailureLatch
from gradlane.training.model.lazy_parameters import Exemption
from gradlane.training.model.participation import Participation
from gradlane.training.model.rank_status import (
    Gathered,
    RankNumbers,
    RankStatus,
    Statuses,
    StepEnding,
)
from gradlane.training.model.stages.clipping import Clipping
from gradlane.training.model.stages.stage import StepStage
from gradlane.training.model.stages.step_start import StepStart
from gradlane.training.options.going_on import STATUS_LANES_LEAST
from gradlane.training.rendezvous.membership import Membership
from gradlane.training.rendezvous.parameter_check import SAMPLE_BITS, SAMPLE_EVERY, ParameterCheck
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from gradlane.training.rendezvous.signatures import StoreValueRefusedError

_WORDS = {
    StepEnding.NONE: "had no step",
    StepEnding.STEPPED: "called optimizer.step()",
    StepEnding.DISCARDED: "forgot the gradients (zero_grad() or the end of the session)",
    StepEnding.CARRIED_ON: "ran another backward() on top of the averaged gradients",
    StepEnding.EVALUATED: "evaluated the closure once more",
}
_SHADOW = 8
_DIGEST_UNIT = 16
_DIGEST_BITS = 24
_CHANGES_UNIT = _DIGEST_UNIT << _DIGEST_BITS
_LANES = STATUS_LANES_LEAST
_WORD_BYTES = 5
"""A lane holds numbers below 2^48."""
_GATHER_FLAG = 1 << 40
"""Added to the number of a membership where a rank gathers numbers in place of a step."""
_LAYOUT_UNIT = 1 << SAMPLE_BITS


class StatusTensor:
    """Holds some lanes for each rank: status, sample and layout, weight, membership."""

    def __init__(
        self, rank: int, world_size: int, buffers: BufferPack | None = None, lanes: int = _LANES
    ) -> None:
        """Make the tensor, whose memory is lent to the core for a whole step at a time.

        Args:
            rank: this rank, by its number of the start.
            world_size: number of ranks at the start.
            buffers: those that are kept alike, or None.
            lanes: numbers of each rank.
        """
        self._rank = rank
        self._buffers = buffers
        self._world_size = world_size
        self._has_requests = lanes > _LANES
        with torch.inference_mode(False):
            self.tensor = torch.zeros(lanes * world_size, dtype=torch.float64, device="cpu")
            # The same memory: torch 2.4 reads no tensor inside torch.func.
            self._lanes = self.tensor.numpy()
        self._read_means: list[float] = []
        self._statuses: dict[int, RankStatus] = {}

    def write(self, status: RankStatus) -> Tensor:
        """Write this rank's lanes; returns the tensor to submit."""
        lane = status.ending + (_SHADOW if status.shadow else 0) + _DIGEST_UNIT * status.digest
        if self._buffers is not None and not status.shadow:
            lane += _CHANGES_UNIT * self._buffers.changes()
        weight = 0 if status.weight is None else status.weight + 1
        generation = 0 if status.generation is None else status.generation
        state = status.sample + _LAYOUT_UNIT * status.layout
        lanes = [lane, state, weight, generation + 1]
        return self._write([*lanes, status.request] if self._has_requests else lanes)

    def write_numbers(self, kind: Gathered, generation: int, size: int, part: bytes) -> Tensor:
        """Write some bytes of this rank's numbers into its lanes; returns the tensor to submit.

        Args:
            kind: what they are for.
            generation: number of the newest membership that this rank knows.
            size: how many bytes its numbers have.
            part: at most `part_bytes` of them.
        """
        words = [
            int.from_bytes(part[at : at + _WORD_BYTES], "little")
            for at in range(0, len(part), _WORD_BYTES)
        ]
        return self._write([size, kind, 0, _GATHER_FLAG + generation + 1, *words])

    @property
    def part_bytes(self) -> int:
        """How many bytes of a rank's numbers travel at once."""
        return (len(self._lanes) // self._world_size - _LANES) * _WORD_BYTES

    def _write(self, lanes: Sequence[int]) -> Tensor:
        self._lanes[:] = 0
        self._lanes[self._rank :: self._world_size][: len(lanes)] = lanes
        return self.tensor

    def read(self) -> dict[int, RankStatus]:
        """Read all ranks' lanes from the mean that has arrived: the last ones if they repeat."""
        means = self._lanes.tolist()
        if means != self._read_means:
            count = _LANES + self._has_requests
            self._statuses = {
                rank: self._status(*lanes[:count]) for rank, lanes in self._lanes_by_rank()
            }
            self._read_means = means
        return self._statuses

    def read_numbers(self) -> dict[int, RankNumbers]:
        """Read some bytes of all ranks' numbers from the mean that has arrived."""
        found = {}
        for rank, (size, kind, _, known, *words) in self._lanes_by_rank():
            part = b"".join(word.to_bytes(_WORD_BYTES, "little") for word in words)
            if known > _GATHER_FLAG:
                found[rank] = RankNumbers(Gathered(kind), known - _GATHER_FLAG - 1, size, part)
            else:
                found[rank] = RankNumbers(Gathered.NONE, 0, size, part)
        return found

    def _lanes_by_rank(self) -> list[tuple[int, list[int]]]:
        """Return the lanes of the ranks that are in the mean."""
        count = self._world_size
        means = self._lanes.tolist()
        present = [rank for rank in range(count) if means[3 * count + rank]]
        return [
            (rank, [round(mean * len(present)) for mean in means[rank::count]]) for rank in present
        ]

    def _status(
        self, lane: int, state: int, weight: int, known: int, request: int = 0
    ) -> RankStatus:
        if known > _GATHER_FLAG:
            return RankStatus(StepEnding.NONE, False, 0, generation=None)
        layout, sample = divmod(state, _LAYOUT_UNIT)
        digest, changes = lane % _CHANGES_UNIT // _DIGEST_UNIT, lane // _CHANGES_UNIT
        changed = ""
        if self._buffers is not None and changes > UNCHANGED:
            changed = self._buffers.first_changed(changes)
        ending = StepEnding(lane % _SHADOW)
        said = weight - 1 if weight else None
        shadow = bool(lane & _SHADOW)
        return RankStatus(
            ending, shadow, digest, changes, changed, sample, said, layout, known - 1, request
        )


class ConsistencyCheck(StepStage):
    """Fails a model's training where the ranks do not train alike."""

    def __init__(
        self,
        agreement: ParameterCheck,
        hyperparameters: Hyperparameters,
        failure: FailureLatch,
        exempt: Exemption,
        membership: Membership,
        clipping: Clipping,
        reason: str,
    ) -> None:
        """Start before the first step.

        Args:
            agreement: compares parameters across ranks.
            hyperparameters: those of the optimizer.
            failure: the model's.
            exempt: a thread in it reads parameters without waiting.
            membership: the ranks that train.
            clipping: knows the norms that gradients were clipped to.
            reason: why statuses travel, or why none do.
        """
        super().__init__("rank statuses", reason)
        self._membership = membership
        self._agreement = agreement
        self._hyperparameters = hyperparameters
        self._failure = failure
        self._exempt = exempt
        self._clipping = clipping
        self._found_alike: Statuses | None = None
        """Statuses that need no second look where they are those of the next step, too."""
        self.ending = StepEnding.NONE
        """How the last step ended on this rank."""
        self.digest = 0
        """Digest of the hyper-parameters at its last `optimizer.step()`."""
        self.join: Participation | None = None
        """The `session.join()` that the program is inside of, or None."""

    def enter_join(self, watch: Participation) -> None:
        """Begin `session.join()`: ranks may run out of data."""
        self.join = watch

    def leave_join(self) -> None:
        """End `session.join()`."""
        self.join = None

    def status_for(
        self, step: int | None, *, shadow: bool = False, weight: int | None = None
    ) -> RankStatus:
        """Return this rank's status for the next step.

        Args:
            step: number of the last one, of which a sample may be due; None: take no sample.
            shadow: this rank has no data for the next step.
            weight: samples behind its gradients of the next step; None: the program has not said.
        """
        sample = 0 if step is None else self._agreement.sample(step)
        layout = 0 if shadow else self._hyperparameters.layout_digest()
        return RankStatus(
            self.ending,
            shadow,
            self.digest,
            sample=sample,
            weight=weight,
            layout=layout,
            generation=self._membership.known_generation,
            request=self._membership.request,
        )

    def begin(self, start: StepStart) -> None:
        """Tell all ranks how this one trains."""
        last = None if start.shadow else start.last_step
        start.status = self.status_for(last, shadow=start.shadow, weight=start.weight)

    def recorded(self, stepped: Sequence[int], step: int) -> None:
        """Take the digest of the hyper-parameters for this step."""
        self.digest = self._hyperparameters.digest((*self._clipping.norms, *stepped))

    def ended(self, ending: StepEnding) -> None:
        """Keep how the step ended here, for the others."""
        self.ending = ending

    def submitted(
        self, wait_for_statuses: Callable[[], Statuses], discard: Callable[[], None]
    ) -> None:
        """Break off inside `session.join()`, if a rank has run out of data and all are to."""
        join = self.join
        if join is None or not join.throws:
            return
        if any(status.shadow for status in wait_for_statuses().values()):
            discard()
            join.stop()

    def compares_after(self, step: int) -> bool:
        """Return whether all ranks meet after a step to compare their parameters."""
        return self._agreement.is_due(step)

    def judge(self, statuses: Statuses, step: int) -> None:
        """Look at all ranks' statuses of a step, once, before its first update.

        Raises:
            SessionFailedError: the ranks do not train alike; the message names them.
        """
        if statuses is self._found_alike and self.join is None:
            return
        gather = [rank for rank, status in statuses.items() if status.generation is None]
        if gather:
            self._failure.fail_and_raise(
                SessionFailedError(
                    f"{ranks_text(gather)} called session.gather_integers() where this rank trains "
                    f"step {step}: call it on all ranks, between the same two steps",
                    step - 1,
                )
            )
        requests = [status.request for status in statuses.values() if status.request]
        for request in requests:
            self._membership.note_request(request, step)
        shadows = [rank for rank, status in statuses.items() if status.shadow]
        if self.join is not None:
            self.join.use_statuses(statuses)
        elif shadows:
            self._failure.fail_and_raise(
                SessionFailedError(
                    f"rank {shadows[0]} has come to the end of session.join() before step {step}, "
                    "and this rank trains outside of one: put the loops of all ranks into it",
                    step - 1,
                )
            )
        try:
            check_endings(statuses, step - 1)
            check_weights(statuses, step)
            check_layouts(statuses, step)
        except SessionFailedError as error:
            self._failure.fail_and_raise(error)
        differing = differing_samples(statuses)
        if differing:
            named = self._exempt.run(
                lambda: self._agreement.describe_difference(step - 1, list(statuses))
            )
            self._failure.fail_and_raise(
                SessionFailedError(
                    f"the parameters of {differing} differ after step {step - 1}{named}: a rank "
                    "has changed them by itself (as an embedding with max_norm does in forward), "
                    "or its optimizer or hardware does not give the same bits; restart from the "
                    "last checkpoint (check_every=K compares all of them every K steps, this was "
                    f"a sample every {SAMPLE_EVERY}; check_every=0 none)",
                    step - 1,
                )
            )
        self._found_alike = None if shadows or requests else statuses


def check_endings(statuses: Statuses, step: int) -> None:
    """Check that all ranks that took part in a step ended it in the same way.

    Args:
        statuses: by rank, written at the beginning of the step after it.
        step: the number of the step that they tell of.

    Raises:
        SessionFailedError: they did not; the message names the ranks.
    """
    _check_changes(statuses, step)
    endings: dict[StepEnding, list[int]] = {}
    digests: dict[int, list[int]] = {}
    for rank, status in statuses.items():
        if status.ending is not StepEnding.SHADOWED:
            endings.setdefault(status.ending, []).append(rank)
        if status.ending in (StepEnding.STEPPED, StepEnding.EVALUATED):
            digests.setdefault(status.digest, []).append(rank)
    if len(endings) > 1:
        told = "; ".join(
            f"{ranks_text(ranks)} {_WORDS[ending]}" for ending, ranks in endings.items()
        )
        raise SessionFailedError(
            f"the ranks ended step {step} differently: {told}. From there on they train different "
            "models: make the decision alike on all ranks, for example from the averaged "
            "gradients, and restart from the last checkpoint",
            step - 1,
        )
    if len(digests) > 1:
        told = " and ".join(ranks_text(ranks) for ranks in digests.values())
        raise SessionFailedError(
            f"the optimizer's hyper-parameters in step {step} differ between {told}: set them "
            "alike on all ranks (a scheduler that looks at a loss needs the same loss "
            "everywhere; one that counts batches needs the same count; the memory formats of "
            "parameters count, too, the norm that gradients are clipped to, and for a model with "
            "several which of its optimizers step), and restart from the last checkpoint",
            step - 1,
        )


def check_weights(statuses: Statuses, step: int) -> None:
    """Check that all ranks with data weigh their gradients in a step, or none.

    Raises:
        SessionFailedError: some do, or there are no samples; the message names the ranks.
    """
    there = [(rank, status.weight) for rank, status in statuses.items() if not status.shadow]
    silent = [rank for rank, weight in there if weight is None]
    if silent and len(silent) < len(there):
        told = [rank for rank, weight in there if weight is not None]
        raise SessionFailedError(
            f"{ranks_text(told)} called session.weight() for step {step} and "
            f"{ranks_text(silent)} did not: "
            "call it on all ranks in a step, or on none",
            step - 1,
        )
    if there and not silent and not any(weight for _, weight in there):
        raise SessionFailedError(
            f"session.weight(0) on all ranks in step {step}: there is no mean over no samples; "
            "skip the step on all ranks",
            step - 1,
        )


def check_layouts(statuses: Statuses, step: int) -> None:
    """Check that parameters lie in memory alike on all ranks as a step begins.

    Raises:
        SessionFailedError: they do not; the message names the ranks.
    """
    ranks: dict[int, list[int]] = {}
    for rank, status in statuses.items():
        if status.layout:
            ranks.setdefault(status.layout, []).append(rank)
    if len(ranks) > 1:
        told = " and ".join(map(ranks_text, ranks.values()))
        raise SessionFailedError(
            f"the memory formats of parameters differ between {told} in step {step}: norms and "
            "some optimizers add up in the order of the memory, and would give other bits; call "
            "model.to(memory_format=...) on all ranks alike",
            step - 1,
        )


def differing_samples(statuses: Statuses) -> str:
    """Return which ranks' samples of the parameters differ; empty where they agree."""
    ranks: dict[int, list[int]] = {}
    for rank, status in statuses.items():
        if status.sample:
            ranks.setdefault(status.sample, []).append(rank)
    return " and ".join(map(ranks_text, ranks.values())) if len(ranks) > 1 else ""


def _check_changes(statuses: Statuses, step: int) -> None:
    known: dict[int, list[int]] = {}
    for rank, status in statuses.items():
        if not status.shadow and status.changes != UNKNOWN:
            known.setdefault(status.changes, []).append(rank)
    if len(known) > 1:
        told = "; ".join(
            f"{ranks_text(ranks)} changed {statuses[ranks[0]].changed!r}"
            if changes != UNCHANGED
            else f"{ranks_text(ranks)} changed none"
            for changes, ranks in known.items()
        )
        raise SessionFailedError(
            f"buffers were changed between step {step} and the next forward, and not alike on all "
            f"ranks: {told}. {CHANGED_APART}",
            step,
        )


class Hyperparameters:
    """A short digest of an optimizer's numbers and its parameters' strides, when they change."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Watch an optimizer."""
        self._optimizer = optimizer
        self._last: list[tuple[object, ...]] = []
        self._digest = 0
        self._last_strides: list[tuple[tuple[int, ...], ...]] = []
        self._layout = 0

    def digest(self, clipping: tuple[float, ...] = ()) -> int:
        """Return a number of 24 bits, never 0; tensors among the hyper-parameters are left out.

        Args:
            clipping: how the gradients of this step are clipped.
        """
        names = self._optimizer.defaults
        now = [
            tuple(group[name] for name in names if _is_numeric(group.get(name)))
            for group in self._optimizer.param_groups
        ]
        now += self._strides()
        now.append(clipping)
        if self._digest == 0 or now != self._last:
            self._last = now
            self._digest = _digest_of(now)
        return self._digest

    def layout_digest(self) -> int:
        """Return a number of 24 bits, never 0, of how the parameters lie in memory now."""
        now = self._strides()
        if self._layout == 0 or now != self._last_strides:
            self._last_strides = now
            self._layout = _digest_of(now)
        return self._layout

    def _strides(self) -> list[tuple[tuple[int, ...], ...]]:
        # Norms and factored moments add up in the order of the memory, so that it must be alike.
        groups = self._optimizer.param_groups
        return [tuple(map(Tensor.stride, list.__iter__(group["params"]))) for group in groups]


def _digest_of(value: object) -> int:
    return zlib.crc32(repr(value).encode()) % ((1 << _DIGEST_BITS) - 1) + 1


def _is_numeric(value: object) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(one, (int, float)) for one in value)
    return isinstance(value, (int, float))


def tell_ending(
    scope: RendezvousScope,
    step: int,
    consistency: ConsistencyCheck | None,
    agreement: ParameterCheck,
) -> None:
    """Tell rank 0 how the last step ended here: no step follows whose statuses would.

    Args:
        scope: where the ranks have met.
        step: number of the last step.
        consistency: knows how it ended; None: how steps end is not compared.
        agreement: takes a last sample of the parameters.
    """
    ending, digest = StepEnding.NONE, 0
    if consistency is not None:
        ending, digest = consistency.ending, consistency.digest
    with contextlib.suppress(RendezvousError):
        told = [step, ending, digest, agreement.closing_sample(step)]
        scope.put(f"ending/{scope.rank_info.rank}", json.dumps(told))


def compare_endings(scope: RendezvousScope, agreement: ParameterCheck, shards: int = 1) -> None:
    """Compare all ranks' last steps, on rank 0, once all have said goodbye.

    Parameters that differ are a warning: a program may have changed those of one rank since the
    last step, for an export for example.

    Args:
        scope: where the ranks have met.
        agreement: knows the tensors of their last samples.
        shards: consecutive ranks that hold a model together, each other parameters.

    Raises:
        SessionFailedError: the ranks ended the last step differently.
    """
    rank_info = scope.rank_info
    if rank_info.rank != 0:
        return
    try:
        told = [scope.peek(f"ending/{rank}", rank) for rank in range(rank_info.world_size)]
    except StoreValueRefusedError:
        raise
    except RendezvousError:
        return
    lanes = [json.loads(one) for one in told if one is not None]
    if len(lanes) < rank_info.world_size or any(lane[0] != lanes[0][0] for lane in lanes):
        return
    step = lanes[0][0]
    statuses = [RankStatus(StepEnding(ending), False, digest) for _, ending, digest, _ in lanes]
    check_endings(dict(enumerate(statuses)), step)
    for first in range(shards):
        column = range(first, rank_info.world_size, shards)
        difference = agreement.closing_difference({rank: lanes[rank][3] for rank in column})
        if not difference:
            continue
        log.warning(
            "as the session closes after step %d, %s: a rank has loaded or changed them by itself, "
            "and what the ranks trained since is not one model; load on all ranks, or before "
            "prepare(). Where one rank has only changed them for itself after the last step, call "
            "session.close() before that",
            step,
            difference,
        )
