"""Residuals of codecs and late gradients: out of a session into a checkpoint, and back.

A codec with error feedback keeps its rounding errors and adds them to the next gradients, so a
checkpoint without them forgets gradients. There are two kinds. The residual of this rank's own
contributions is another tensor on every rank, and so are its late gradients. The residual of
results is kept in parts, by the owner of each slice. Here every rank has all parts: the owners
broadcast them unchanged in a step of the channel that trains nothing and leaves out no rank.

Where the ranks of a node add up first, its leader encodes their mean, and the residual of that is
every rank's own: the mean over ranks is then the mean over nodes.

When training goes on without lost ranks, their own residuals are lost, and so are the residuals of
the slices that they owned: the new owners of these slices begin without one. The other ranks keep
theirs. So means are over the members. In a step that reads the owners' residuals, each member
contributes to every tensor, so a rank that is lost during the step costs no result.

A checkpoint of one rank is enough for a world of any size, cut in any way: beside this rank's own
it holds the means over all ranks. For training only their share of the mean gradient counts, so
where the ranks do not each load their own, every rank starts with the mean, and nothing is lost or
counted twice. In tensors of 16-bit floats the mean is rounded to the dtype.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from gradlane.errors import RefusedError, UsageError
from gradlane.training.core import Channel, rank_channel
from gradlane.training.model.stages.late_gradients import LateGradientBuffer
from gradlane.training.model.step_layout import StepLayout
from gradlane.training.options.codec_choice import CodecChoice
from gradlane.training.rendezvous.membership import Membership
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from gradlane.training.rendezvous.tensor_table import TensorEntry, in_layout

WORKER = "worker_residual"
OWNER = "owner_residual"
CARRIED = "carried"
MEAN_OF = {WORKER: "mean_worker_residual", CARRIED: "mean_carried"}
"""Each rank's own kinds of state, and the names of their means over all ranks."""
_RESIDUALS = (WORKER, MEAN_OF[WORKER], OWNER)
_KINDS = (*_RESIDUALS, CARRIED, MEAN_OF[CARRIED])


class ResidualState:
    """The residuals of one model, seen from one rank; all calls are collective, between steps."""

    def __init__(
        self,
        *,
        channel: Channel,
        scope: RendezvousScope,
        layout: StepLayout,
        choices: Sequence[CodecChoice],
        updates_on_servers: bool,
        settle: Callable[[], None],
        spend_step: Callable[[Callable[[int], None]], None],
        translating: Callable[[str], AbstractContextManager[None]],
        settle_late: Callable[[], LateGradientBuffer | None] = lambda: None,
        leaves_out: bool = False,
        ranks_per_residual: int = 1,
        membership: Membership,
        gather: Callable[[Sequence[int]], list[list[int]]] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Find the tensors whose codecs keep a residual.

        Args:
            channel: the model's.
            scope: where the ranks agree.
            layout: the tensors that take part in its steps.
            choices: the codecs of the trained tensors.
            updates_on_servers: whether results are parameters, which travel as they are.
            settle: waits for the end of a step that is still under way.
            spend_step: runs a function with the number of a channel's step that is no training.
            translating: a context that turns errors of the channel into the package's own.
            settle_late: returns the late gradients, or None where they are lost.
            leaves_out: whether steps may go on without ranks that are late.
            ranks_per_residual: consecutive ranks that have one of contributions in common.
            membership: the ranks that train.
            gather: gathers whole numbers of all members, where training goes on without lost
                ranks; None: it does not.
            ranks: of the world, by their numbers on the channel; None: all.
        """
        self._channel = channel
        self._scope = scope
        self._layout = layout
        self._owners_keep = not updates_on_servers
        self._settle = settle
        self._spend_step = spend_step
        self._translating = translating
        self._settle_late = settle_late
        self._carries = settle_late() is not None and scope.rank_info.world_size > 1
        self._ranks_per_residual = ranks_per_residual
        self._membership = membership
        self._gather = gather
        self._ranks = range(scope.rank_info.world_size) if ranks is None else ranks
        self._begin = (
            rank_channel(channel, "leaving out late ranks").step_barrier
            if leaves_out
            else channel.step_begin
        )
        self._kept = [
            index
            for index, choice in enumerate(choices)
            if choice.facts is not None and choice.facts.residual_width > 0 and len(self._ranks) > 1
        ]
        self._widths = {
            index: choices[index].facts.residual_width  # type: ignore[union-attr]
            for index in self._kept
        }
        self._loads = 0
        self._lent: list[Tensor] = []

    @property
    def is_empty(self) -> bool:
        """Whether no codec keeps a residual, and late gradients are lost."""
        return not self._kept and not self._carries

    def state_dict(self) -> dict[str, Any]:
        """Return all residuals, f32 and laid out like the tensors, by name.

        Raises:
            GradlaneError: the session has failed.
        """
        state: dict[str, Any] = {
            "rank": self._membership.rank,
            "world_size": self._membership.world_size,
            "ranks_per_residual": self._ranks_per_residual,
        }
        state.update({kind: {} for kind in _KINDS})
        if self.is_empty:
            return state
        self._settle()
        late = self._settle_late()
        if late is not None and self._carries:
            carried = self._carried(late)
            self._note(state, CARRIED, carried)
            self._note(state, MEAN_OF[CARRIED], self._mean_carried(carried))
        if self._kept:
            own = {index: self._own(index) for index in self._kept}
            self._note(state, WORKER, own)
            self._note(state, MEAN_OF[WORKER], self._mean(own))
            self._note(state, OWNER, self._of_owners() if self._owners_keep else {})
        return state

    def _note(self, state: dict[str, Any], kind: str, values: Mapping[int, Tensor]) -> None:
        state[kind] = {self._entry(index).name: value for index, value in values.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load residuals; those of tensors whose codec keeps none are dropped.

        Args:
            state: a result of `state_dict`, of any rank of a world of any size.

        Raises:
            ValueError: it is no such state, or of another model.
            UsageError: ranks were lost since all were connected.
            RendezvousError: a rank has not called it.
        """
        checked = self._check(state)
        if self.is_empty:
            return
        self._settle()
        rank_info = self._scope.rank_info
        # Earlier versions had residuals of single ranks alone.
        own = (
            int(state["rank"]),
            int(state["world_size"]),
            int(state.get("ranks_per_residual", 1)),
        ) == (rank_info.rank, rank_info.world_size, self._ranks_per_residual)
        said = self._exchange_own(own)
        kind = WORKER if all(said) else MEAN_OF[WORKER]
        late = self._settle_late()
        if late is not None and self._carries:
            self._carry(late, checked[CARRIED if all(said) else MEAN_OF[CARRIED]])
        with self._translating("loading residuals"):
            for index in self._kept:
                name = self._entry(index).name
                for source, target in ((kind, WORKER), (OWNER, OWNER)):
                    value = checked[source].get(name)
                    if value is None or (target == OWNER and not self._owners_keep):
                        value = torch.zeros((), dtype=torch.float32, device="cpu")
                    elif target == WORKER and value.dim() == len(self._shape(self._entry(index))):
                        # Another codec kept one number, the residual: the first of several.
                        value = self._as_first(index, value)
                    self._load(index, target, value)

    def _exchange_own(self, own: bool) -> list[bool]:
        """Tell all ranks whether this one has its own residuals; return what each says."""
        rank_info = self._scope.rank_info
        if self._gather is not None:
            said = [bool(one) for (one,) in self._gather([int(own)])]
            if len(said) < rank_info.world_size:
                # The members are the same on all ranks then.
                raise UsageError(
                    f"load_state_dict() with {len(said)} of {rank_info.world_size} ranks: slices "
                    "of the lost ranks have new owners, which would not get their part of the "
                    "state; load it before the first step, or restart"
                )
            return said
        self._loads += 1
        key = f"residuals/{self._loads}"
        self._scope.put(f"{key}/{rank_info.rank}", json.dumps(own))
        return [
            json.loads(self._scope.get(f"{key}/{rank}", rank))
            for rank in range(rank_info.world_size)
        ]

    def for_more_ranks(self, ranks: int) -> dict[str, Tensor]:
        """Return this rank's residuals for a world that a rank joins; a collective call.

        Slices have other owners there, so what owners hold back goes back to all members'
        contributions. These are smaller parts of a mean there, so they hold back more: the mean of
        what all hold back is the same in both worlds, to rounding.

        Args:
            ranks: of that world.

        Returns:
            By name, f32 and laid out like the tensors.

        Raises:
            GradlaneError: the session has failed.
        """
        if not self._kept:
            return {}
        self._settle()
        scale = ranks / self._membership.world_size
        return {
            self._entry(index).name: (self._own(index) + of_mean) * scale
            for index, of_mean in self._of_owners().items()
        }

    def take_over(self, residuals: Mapping[str, Tensor]) -> None:
        """Begin with what `for_more_ranks` returned in the world before."""
        with self._translating("loading residuals"):
            for index in self._kept:
                value = residuals.get(self._entry(index).name)
                if value is not None:
                    self._load(index, WORKER, value)

    def fitting(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a state that fits a model that trains other tensors than before."""
        shapes = {entry.name: self._shape(entry) for entry in self._layout.trained}
        left: dict[str, Any] = dict(state)
        for kind in _KINDS:
            left[kind] = {
                name: value
                for name, value in state.get(kind, {}).items()
                if tuple(value.shape[: len(shapes.get(name, ()))]) == shapes.get(name)
            }
        return left

    def _check(self, state: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
        missing = [key for key in ("rank", "world_size", *_RESIDUALS) if key not in state]
        if missing:
            raise RefusedError(
                f"this is no state of residuals: it lacks {', '.join(missing)}; load what "
                "session.state_dict() returned"
            )
        shapes = {entry.name: entry for entry in self._layout.trained}
        for kind in _KINDS:
            for name, value in state.get(kind, {}).items():
                if name not in shapes:
                    raise RefusedError(f"{kind} has {name!r}, which this model does not train")
                entry = shapes[name]
                shape = self._shape(entry)
                kept = self._kept_shape(name) if kind in (WORKER, MEAN_OF[WORKER]) else ()
                if tuple(value.shape) not in (shape, shape + kept):
                    raise RefusedError(
                        f"{kind} of {name!r} has shape {tuple(value.shape)}, expected "
                        f"{shape + kept}: is the checkpoint another model's?"
                    )
        return {kind: dict(state.get(kind, {})) for kind in _KINDS}

    @staticmethod
    def _shape(entry: TensorEntry) -> tuple[int, ...]:
        return (*entry.shape, 2) if entry.dtype.is_complex else tuple(entry.shape)

    def _kept_shape(self, name: str) -> tuple[int, ...]:
        widths = [width for index, width in self._widths.items() if self._entry(index).name == name]
        return (widths[0],) if widths and widths[0] > 1 else ()

    def _entry(self, index: int) -> TensorEntry:
        return self._layout.trained[index]

    def _empty(self, index: int, dtype: torch.dtype | None = None, width: int = 1) -> Tensor:
        """Return memory for a tensor, on the host and in its layout; complex numbers are pairs.

        Args:
            index: the tensor.
            dtype: in place of its own.
            width: numbers for each value, in a dimension of their own where there are several.
        """
        entry = self._entry(index)
        shape, stride, own = self._shape(entry), entry.stride, entry.dtype
        if own.is_complex:
            stride, own = (*(2 * step for step in stride), 1), own.to_real()
        if width > 1:
            shape, stride = (*shape, width), (*(width * step for step in stride), 1)
        with torch.inference_mode(False):
            return torch.empty_strided(shape, stride, dtype=dtype or own, device="cpu")

    def _own(self, index: int) -> Tensor:
        value = self._empty(index, torch.float32, self._widths[index])
        with self._translating("reading residuals"):
            self._channel.copy_worker_residual(index, value.data_ptr(), value.numel())
        return value

    def _load(self, index: int, kind: str, value: Tensor) -> None:
        room = self._empty(index, torch.float32, self._widths[index] if kind == WORKER else 1)
        room.copy_(value)
        self._channel.load_state(index, kind, room.data_ptr(), room.numel())

    def _as_first(self, index: int, value: Tensor) -> Tensor:
        width = self._widths[index]
        if width == 1:
            return value
        wide = torch.zeros((*value.shape, width), dtype=value.dtype, device=value.device)
        wide[..., 0] = value
        return wide

    def _carried(self, late: LateGradientBuffer) -> dict[int, Tensor]:
        """Return copies of this rank's late gradients, each tensor in its own dtype."""
        found = {}
        for index in range(len(self._layout.trained)):
            gradient = late.carried(index)
            if gradient is not None:
                found[index] = self._empty(index)
                found[index].copy_(_as_real(gradient))
        return found

    def _mean_carried(self, carried: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Average carried gradients over all ranks, nothing counting as zeros."""
        means = {index: self._empty(index).zero_() for index in range(len(self._layout.trained))}
        for index, value in carried.items():
            means[index].copy_(value)
        self._step(means, read=None, gives=lambda index: index in carried)
        return means

    def _carry(self, late: LateGradientBuffer, values: Mapping[str, Tensor]) -> None:
        """Have these added to this rank's next gradients."""
        for index, entry in enumerate(self._layout.trained):
            if entry.name in values:
                with torch.inference_mode(False), torch.no_grad():
                    gradient = torch.empty_like(entry.tensor)
                    _as_real(gradient).copy_(values[entry.name])
                late.carry(index, gradient)

    def _mean(self, own: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Average residuals over all ranks, each tensor in its own dtype."""
        means = {index: torch.empty_like(value) for index, value in own.items()}
        for part in range(max(self._widths.values())):
            given = {}
            for index, value in own.items():
                if part < self._widths[index]:
                    given[index] = self._empty(index)
                    given[index].copy_(value if self._widths[index] == 1 else value[..., part])
            self._step(given, read=None, gives=lambda index: True)
            for index, value in given.items():
                mean = means[index]
                (mean if self._widths[index] == 1 else mean[..., part]).copy_(value)
        return means

    def _of_owners(self) -> dict[int, Tensor]:
        """Have the owners broadcast their residuals, 16-bit tensors in two halves."""
        number = self._ranks.index(self._scope.rank_info.rank)
        may_be_lost = self._gather is not None

        def gives(index: int) -> bool:
            return may_be_lost or index % len(self._ranks) == number

        def read(part: int, indices: Sequence[int]) -> dict[int, Tensor]:
            landings = {index: self._empty(index) for index in indices}
            for landing in landings.values():
                landing.zero_()
            # A rank submits a gradient that is not looked at: no owner answers without.
            self._step(landings, read=part, gives=gives)
            return landings

        values = read(0, self._kept)
        halves = [index for index in self._kept if self._entry(index).dtype.itemsize == 2]
        for index, upper in (read(1, halves) if halves else {}).items():
            lower = values[index].view(torch.int16).to(torch.int32) & 0xFFFF
            upper = upper.view(torch.int16).to(torch.int32)
            words = (upper << 16) | lower
            if may_be_lost:
                # A new owner has zeros; the lower half may still be of the one before.
                words = torch.where(upper == 0, 0, words)
            values[index] = in_layout(words.view(torch.float32), self._entry(index).stride)
        return values

    def _step(
        self, memory: Mapping[int, Tensor], *, read: int | None, gives: Callable[[int], bool]
    ) -> None:
        """Run a step without codecs in which these tensors land, and nothing else does.

        Args:
            memory: submitted values, and where results land, by tensor number.
            read: which half of the owners' residuals results are; None: they are means.
            gives: whether this rank gives a tensor.
        """
        layout, channel = self._layout, self._channel
        others = {index: entry.tensor for index, entry in enumerate(layout.trained)}
        others |= layout.beside
        # If this breaks off, the core may still write there.
        self._lent = list(memory.values())

        def run(step: int) -> None:
            self._begin(step)
            if read is None:
                channel.send_raw(step)
            else:
                channel.read_state(OWNER, read)
            for index, tensor in others.items():
                if index in layout.factored:
                    channel.block_absent(index, step)
                    continue
                landing = memory.get(index)
                if landing is None:
                    # No rank has any: nothing is written there.
                    channel.tensor_absent(index, step, tensor.data_ptr(), _nbytes(tensor))
                    continue
                broadcast_state = channel.gradient_ready if gives(index) else channel.tensor_absent
                broadcast_state(index, step, landing.data_ptr(), _nbytes(landing))
            channel.step_end(step)
            channel.wait_step(step)
            channel.take_ready(step)
            for index in layout.factored:
                channel.take_blocks(index, step)

        self._spend_step(run)
        self._lent = []


def _as_real(tensor: Tensor) -> Tensor:
    """Return complex numbers as pairs, in the same memory; others as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
