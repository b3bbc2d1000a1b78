"""The tensor numbers of everything that takes part in the steps of one channel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gradlane.errors import UsageError
from gradlane.training.factors.factored_weights import Factored
from gradlane.training.factors.rows import RowSparse
from gradlane.training.model.buffers import BufferForm, BufferPack, form_of, pack_buffers
from gradlane.training.model.consistency_check import StatusTensor
from gradlane.training.model.joined_gradients import GradientGroup, absences_entry
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.membership import Membership
from gradlane.training.rendezvous.tensor_table import TensorEntry, extra_entry


@dataclass(frozen=True)
class StepLayout:
    """The tensors that take part in the steps of a channel.

    Attributes:
        trained: table entries of the trained parameters, by tensor number.
        table_size: number of entries of the table, which the extras follow.
        extras: number of tensors that travel beside the table.
        status: how all ranks ended their steps, or None where updates run on the servers, or steps
            go on without late ranks.
        status_index: its tensor number.
        buffers: buffers that are kept alike, or None.
        buffers_index: their tensor number.
        form: the form that buffers were prepared in, or None where they are left alone.
        factored: trained parameters that travel as factors or rows, by tensor number.
        groups: small trained parameters whose gradients travel together; their numbers follow the
            table's.
        absences: tells which gradients of groups are missing; its number follows theirs.
    """

    trained: Sequence[TensorEntry]
    table_size: int
    extras: int = 0
    status: StatusTensor | None = None
    status_index: int = -1
    buffers: BufferPack | None = None
    buffers_index: int = -1
    form: BufferForm | None = None
    factored: Mapping[int, Factored] = field(default_factory=dict)
    groups: Sequence[GradientGroup] = ()
    absences: TensorEntry | None = None

    @property
    def joined(self) -> set[int]:
        """Those parameters whose gradients travel in groups."""
        return {index for group in self.groups for index in group.members}

    @property
    def gradient_numbers(self) -> list[int]:
        """The channel's numbers of what gradients travel in: alone, in groups, and the absences."""
        joined = self.joined
        alone = [index for index in range(len(self.trained)) if index not in joined]
        beside = len(self.groups) + bool(self.groups)
        return [*alone, *range(self.table_size, self.table_size + beside)]

    @property
    def number_bytes(self) -> int:
        """How many bytes of a rank's numbers travel at once; 0: there are no statuses."""
        return 0 if self.status is None else self.status.part_bytes

    @property
    def means(self) -> int:
        """Number of leading tensors of the channel among which all means of gradients are."""
        return self.table_size + len(self.groups) if self.groups else len(self.trained)

    @property
    def captured(self) -> dict[int, Factored]:
        """Those parameters whose layers give factors in backward; all others have a `.grad`."""
        return {index: one for index, one in self.factored.items() if one.layers}

    @property
    def beside(self) -> dict[int, Tensor]:
        """The tensors that take part beside parameters, by their numbers."""
        found = {}
        if self.status is not None:
            found[self.status_index] = self.status.tensor
        if self.buffers is not None:
            found[self.buffers_index] = self.buffers.tensor
        return found

    def check_takes_dense(self, index: int) -> None:
        """Check that a parameter's optimizer takes a gradient that is not sparse by rows.

        Raises:
            UsageError: it takes sparse ones alone.
        """
        one = self.factored.get(index)
        if isinstance(one, RowSparse) and one.is_needed:
            raise UsageError(
                f"the gradient of {self.trained[index].name!r} is not sparse by rows, and its "
                "optimizer takes no other: step it by another one, or build its embedding with "
                "sparse=True"
            )

    def zeros(self, index: int) -> Tensor:
        """Return what torch leaves in `.grad` of a parameter where it zeroes a mean."""
        one = self.factored.get(index)
        if isinstance(one, RowSparse) and one.keeps_sparse:
            return one.no_rows()
        return torch.zeros_like(self.trained[index].tensor)


def build_step_layout(
    model: nn.Module,
    entries: Sequence[TensorEntry],
    factored: Mapping[int, Factored],
    rank_info: RankInfo,
    membership: Membership,
    buffers: str,
    *,
    has_statuses: bool,
    may_lack: bool,
    status_lanes: int,
    groups: Sequence[GradientGroup] = (),
) -> tuple[list[TensorEntry], StepLayout]:
    """Number everything that takes part in each step.

    Args:
        model: the user's.
        entries: its table; tensors that are not in it are numbered after it.
        factored: trained parameters that travel as factors or rows, by tensor number.
        rank_info: this rank.
        membership: the ranks that train.
        buffers: how they are kept: `"broadcast"`, `"average"` or `"local"`.
        has_statuses: whether all ranks' statuses travel with each step.
        may_lack: whether steps go on without ranks that are late.
        status_lanes: numbers of each rank's status.
        groups: trained parameters whose gradients travel together.

    Returns:
        The entries that follow the table, and the layout.
    """
    trained = [entry for entry in entries if entry.trained]
    pack = None
    if rank_info.world_size > 1:
        compares = not has_statuses
        pack = pack_buffers(model, buffers, membership, compares=compares, may_lack=may_lack)
    status = None
    extras = [group.entry for group in groups]
    absences = absences_entry(groups) if groups else None
    if absences is not None:
        extras.append(absences)
    index = len(entries) + len(extras)
    if has_statuses:
        status = StatusTensor(rank_info.rank, rank_info.world_size, pack, status_lanes)
        extras.append(extra_entry("gradlane's rank statuses", status.tensor))
    if pack is not None:
        extras.append(extra_entry("the packed buffers", pack.tensor))
    # Blocks are of training steps alone: something else carries the weights in step 0.
    extras += [one.first_values() for one in factored.values()]
    return extras, StepLayout(
        trained,
        len(entries),
        len(extras),
        status,
        index if has_statuses else -1,
        pack,
        index + has_statuses if pack is not None else -1,
        form_of(model, buffers, rank_info.world_size),
        factored,
        groups,
        absences,
    )
