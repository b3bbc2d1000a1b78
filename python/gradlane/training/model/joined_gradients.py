"""Small gradients that travel together, as one tensor of the channel.

Each tensor of the channel costs a frame, a job and a wait, however few bytes it has. So small
gradients that are neighbours in the table form a *group*: it leaves once the last of them is there,
travels at the priority of the most urgent one, and is taken back as one. A group is small, so it
hardly holds up what is more urgent, and the sums are those of its members element by element.

A gradient that is missing here counts as zeros, which lie in the group. Another tensor, the
absences, tells whether it is missing on all ranks, and so has no mean. Ranks that have all
gradients submit the absence of that tensor; only ranks that lack one wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradlane.training.carrier import Carrier
from gradlane.training.modules.gradient_intake import GradientBatch, GradientIntake
from gradlane.training.rendezvous.tensor_table import TensorEntry, extra_entry
from gradlane.training.torch_internals import foreach_copy

MEMBER_BYTES_MAX = 32 << 10
"""Larger gradients travel alone: the copies would cost more than the frames."""
GROUP_BYTES_MAX = 128 << 10
"""Less than a slice of `p3`."""
SPAN_BYTES_MAX = 16 << 20
"""Most bytes of gradients from the first member of a group to its last, so that no member waits
long for another one."""
_DTYPES = {torch.float32, torch.float64, torch.float16, torch.bfloat16}


@dataclass(frozen=True)
class GradientGroup:
    """Gradients that travel as one.

    Attributes:
        members: their numbers, ascending.
        entry: the group's own tensor, one-dimensional.
        views: where each member lies in it.
        whole: takes the gradients of all members at once.
    """

    members: tuple[int, ...]
    entry: TensorEntry
    views: list[Tensor]
    whole: GradientBatch


def choose_groups(
    trained: Sequence[TensorEntry], without: Collection[int] = ()
) -> list[GradientGroup]:
    """Group the small gradients of a model; the same on all ranks.

    Args:
        trained: table entries by tensor number.
        without: numbers of tensors that travel alone.
    """
    groups: list[GradientGroup] = []
    chosen: dict[torch.dtype, list[int]] = {}
    ends: dict[torch.dtype, tuple[int, int]] = {}
    at = 0
    for index, entry in enumerate(trained):
        at += entry.nbytes
        if index in without or entry.dtype not in _DTYPES or entry.nbytes > MEMBER_BYTES_MAX:
            continue
        first, size = ends.get(entry.dtype, (at - entry.nbytes, 0))
        if size + entry.nbytes > GROUP_BYTES_MAX or at - first > SPAN_BYTES_MAX:
            groups += _group(trained, chosen.pop(entry.dtype))
            first, size = at - entry.nbytes, 0
        chosen.setdefault(entry.dtype, []).append(index)
        ends[entry.dtype] = first, size + entry.nbytes
    for members in chosen.values():
        groups += _group(trained, members)
    return groups


def _group(trained: Sequence[TensorEntry], members: Sequence[int]) -> list[GradientGroup]:
    """Return the group of some gradients, or none where there is only one."""
    if len(members) < 2:
        return []
    first = trained[members[0]]
    with torch.inference_mode(False):
        flat = torch.zeros(
            sum(trained[index].tensor.numel() for index in members),
            dtype=first.dtype,
            device=first.device,
        )
    entry = extra_entry(f"{first.name} and {len(members) - 1} more", flat)
    whole = GradientBatch(members, trained)
    return [GradientGroup(tuple(members), entry, _views(trained, members, flat), whole)]


def _views(trained: Sequence[TensorEntry], members: Iterable[int], flat: Tensor) -> list[Tensor]:
    views, offset = [], 0
    with torch.inference_mode(False):
        for index in members:
            entry = trained[index]
            views.append(flat.as_strided(entry.shape, entry.stride, offset))
            offset += entry.tensor.numel()
    return views


def absences_entry(groups: Iterable[GradientGroup]) -> TensorEntry:
    """Return the entry of the tensor that tells which gradients of groups are missing."""
    count = sum(len(group.members) for group in groups)
    with torch.inference_mode(False):
        absences = torch.zeros(count, dtype=torch.float32, device="cpu")
    return extra_entry("gradlane's absent gradients", absences)


class JoinedGradients:
    """Submits the groups of one channel and takes their means back, one step after the other."""

    def __init__(
        self,
        groups: Sequence[GradientGroup],
        absences: TensorEntry | None,
        first: int,
        trained: Sequence[TensorEntry],
        carrier: Carrier,
        intake: GradientIntake,
    ) -> None:
        """Start after step 0.

        Args:
            groups: the groups; they are numbered on the channel from `first` on.
            absences: the tensor that is numbered after them; None without groups.
            first: the channel's number of the first group.
            trained: table entries by tensor number.
            carrier: brings groups to the channel and back.
            intake: takes gradients out of `.grad`.
        """
        self._groups = groups
        self._trained = trained
        self._carrier = carrier
        self._intake = intake
        self._first = first
        self.absences_index = first + len(groups) if groups else -1
        """The channel's number of the absences, or -1."""
        self._absences = None if absences is None else absences.tensor
        self.group_of: list[int] = [-1] * len(trained)
        """The group of each tensor; -1: it travels alone."""
        self._slot: dict[int, int] = {}
        for number, group in enumerate(groups):
            for index in group.members:
                self.group_of[index] = number
                self._slot[index] = len(self._slot)
        self._sizes = [len(group.members) for group in groups]
        self._missing = list(self._sizes)
        self._absent: set[int] = set()
        """Members whose gradients are missing on this rank in this step."""
        self._under_way = 0
        """Groups that were not submitted in this step."""
        self._memory: list[Tensor | None] = [None] * len(groups)
        self._unused: Tensor | None = None
        """Lent for the absences where this rank has none."""

    @property
    def numbers(self) -> range:
        """The channel's numbers of groups and absences."""
        return range(self._first, self._first + len(self._groups) + bool(self._groups))

    def number_of(self, index: int) -> int:
        """Return the channel's number of what a tensor travels in."""
        group = self.group_of[index] if 0 <= index < len(self.group_of) else -1
        return index if group < 0 else self._first + group

    def begin(self) -> None:
        """Begin a step."""
        self._missing = list(self._sizes)
        self._absent.clear()
        self._under_way = len(self._groups)

    def note_present(self, index: int) -> bool:
        """Note a gradient in `.grad`, or none; returns whether its group is whole."""
        group = self.group_of[index]
        missing = self._missing[group] = self._missing[group] - 1
        return not missing

    def note_absent(self, index: int) -> bool:
        """Note that a gradient is missing in this step; returns whether its group is whole."""
        self._absent.add(index)
        return self.note_present(index)

    def forget(self) -> None:
        """Count all gradients of groups that are not whole as missing; they stay in `.grad`."""
        for group, missing in zip(self._groups, self._missing, strict=True):
            if missing:
                self._absent.update(group.members)

    def look(self, is_noted: Sequence[bool]) -> None:
        """Look at gradients in `.grad` that wait for the others of their group.

        Args:
            is_noted: whether each tensor's gradient was noted in this step.

        Raises:
            UsageError: one cannot be averaged.
        """
        for group, missing, size in zip(self._groups, self._missing, self._sizes, strict=True):
            if 0 < missing < size:
                for index in group.members:
                    if is_noted[index] and index not in self._absent:
                        self._intake.look(index)

    def submit(self, index: int, step: int, weight: int | None) -> None:
        """Submit the group of a tensor, which is whole.

        Args:
            index: the tensor.
            step: the channel's.
            weight: factor of all gradients, or None.

        Raises:
            UsageError: a gradient cannot be averaged.
        """
        self._under_way -= 1
        if not self._under_way:
            # Before the last group: waits are for that.
            self._submit_absences(step)
        number = self.group_of[index]
        group, views = self._groups[number], self._groups[number].views
        whole = self._absent.isdisjoint(group.members)
        if whole:
            gradients = self._intake.take_batch(group.whole)
        else:
            given = {
                one: view
                for one, view in zip(group.members, views, strict=True)
                if one not in self._absent
            }
            if not given:
                self._memory[number] = self._carrier.submit_absent(self._first + number, step)
                return
            gradients, views = self._intake.take_for_copy(given), [*given.values()]
        flat = self._memory[number] = group.entry.tensor
        with torch.no_grad(), torch.inference_mode(False):
            if not whole:
                flat.zero_()
            foreach_copy(views, gradients)
            if weight is not None:
                flat.mul_(weight)
        self._carrier.submit(self._first + number, step, flat)

    def _submit_absences(self, step: int) -> None:
        if self._absences is None:
            return
        absent = [self._slot[index] for index in self._absent]
        if absent:
            with torch.no_grad(), torch.inference_mode(False):
                self._absences.zero_()
                self._absences[absent] = 1.0
            self._carrier.submit(self.absences_index, step, self._absences)
        else:
            self._unused = self._carrier.submit_absent(self.absences_index, step)

    def unsubmitted(self) -> list[int]:
        """Return the channel's numbers of what was not submitted in this step."""
        numbers = [self._first + number for number, left in enumerate(self._missing) if left]
        return [*numbers, self.absences_index] if self._under_way else numbers

    def members(self, number: int) -> tuple[int, ...]:
        """Return the tensors of a group, by the channel's number."""
        return self._groups[number - self._first].members

    def take_means(
        self, numbers: Sequence[int], wait: Callable[[int], None], *, lends: bool
    ) -> list[tuple[int, Tensor]]:
        """Return the means of groups that have arrived, and that some rank had gradients of.

        Args:
            numbers: the channel's numbers.
            wait: waits for a tensor of the channel.
            lends: the means may lie in the groups, which the next step writes.
        """
        lent = []
        for number in numbers:
            memory = self._memory[number - self._first]
            assert memory is not None
            lent.append((number, memory))
            self._memory[number - self._first] = None
        self._carrier.collect(lent)
        found: list[tuple[int, Tensor]] = []
        for number, memory in lent:
            group = self._groups[number - self._first]
            is_flat = memory is group.entry.tensor
            views = group.views if is_flat else _views(self._trained, group.members, memory)
            means = zip(group.members, views, strict=True)
            if self._absent.isdisjoint(group.members):
                found += means
            else:
                absent = self._wait_for_absences(wait)
                found += [
                    (index, view)
                    for index, view in means
                    if index not in self._absent or absent[self._slot[index]] != 1.0
                ]
        if lends or not found:
            return found
        with torch.no_grad(), torch.inference_mode(False):
            own = [self._trained[index].device_memory() for index, _ in found]
            foreach_copy(own, [view for _, view in found])
        return [(index, mean) for (index, _), mean in zip(found, own, strict=True)]

    def _wait_for_absences(self, wait: Callable[[int], None]) -> list[float]:
        """Return the part of the ranks that lack each gradient."""
        assert self._absences is not None
        wait(self.absences_index)
        self._carrier.collect([(self.absences_index, self._absences)])
        part: list[float] = self._absences.tolist()
        return part
