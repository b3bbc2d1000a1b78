"""The gradients of a sharded model's units on their way between nodes, backward by backward.

FSDP calls a hook with each unit's reduce-scattered gradients, one flat buffer, and then makes the
parameters' gradients of it: views, or copies in another dtype. The hook lends the buffer to the
core, which has the mean land in it while backward goes on. At the end of backward the means are
waited for and put where FSDP would have had them: into views they have landed already; they are
copied into gradients of another dtype, and added to gradients of earlier backward calls.

A step of the channel is one exchange: of a backward, or of a part of it where a unit is reduced
several times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradlane.errors import RanksDifferError
from gradlane.training.core import Channel
from gradlane.training.options.compatibility import Feature, refusal
from gradlane.training.rendezvous.parameter_check import SAMPLE_EVERY, is_sampled
from gradlane.training.sharded.column import ColumnCalls
from gradlane.training.sharded.fsdp import (
    ShardedUnit,
    after_backward,
    in_backward,
    local_of,
)
from gradlane.training.sharded.status import StatusNumbers, checksum
from gradlane.training.torch_internals import post_accumulate_hooks

STATUS = 0
"""Tensor number of what ranks compare: the most urgent, so that it passes the gradients that wait.

The units follow in their order."""


@dataclass
class Reduced:
    """A unit's gradients of one call of FSDP's hook.

    Attributes:
        unit: number of the unit.
        buffer: the flat buffer that FSDP makes gradients of.
        before: gradients of earlier backward calls, by the unit's trained parameters; None: those
            are in an earlier reduction of this backward, whose result it is added to.
        leaves: whether it goes to the other nodes now (`set_requires_all_reduce`).
        divisor: what FSDP divides the buffer by after the hook, or None.
        present: positions of the parameters whose mean is in `lent`.
        lent: what the core has the mean land in, with all trained parameters; None: not sent yet.
        raw: the gradients before anything was divided.
        made: gradients that FSDP has made of it, by the unit's trained parameters.
    """

    unit: int
    buffer: Tensor
    before: list[Tensor | None] | None
    leaves: bool
    divisor: float | None
    present: set[int] = field(default_factory=set)
    lent: Tensor | None = None
    raw: Tensor | None = None
    made: list[Tensor | None] = field(default_factory=list)


@dataclass
class _Kept:
    """A unit's gradients that have not left the node yet, of earlier backward calls."""

    sum: Tensor
    present: set[int]


class GradientRounds:
    """The exchanges of one model."""

    def __init__(
        self,
        channel: Channel,
        units: Sequence[ShardedUnit],
        dtypes: Sequence[torch.dtype],
        status: StatusNumbers,
        nodes: int,
        check_every: int | None,
        calls: ColumnCalls,
        on_begin: Callable[[], int],
    ) -> None:
        """Start before the first backward.

        Args:
            channel: of the column. Its tensors are the status and the units.
            units: with trained parameters.
            dtypes: that each unit's gradients are reduced in.
            status: what the ranks of the column compare.
            nodes: ranks of the column.
            check_every: backward calls between comparisons of all parameters; 0: none; None:
                samples.
            calls: translates errors of the channel, and keeps the first.
            on_begin: called as the first exchange of a backward begins; returns the training steps
                that have ended.
        """
        self._channel = channel
        self._units = units
        self._dtypes = dtypes
        self._nodes = nodes
        self._check_every = check_every
        self._calls = calls
        self._on_begin = on_begin
        self._steps = 0
        self._first_number = [0]
        for unit in units:
            self._first_number.append(self._first_number[-1] + len(unit.trained))
        self.status = status
        self.step = 0
        """Exchanges so far, the current one included: the step of the channel."""
        self.backward = 0
        """Backward calls so far whose gradients have left the node, the current one included."""
        self.is_running = False
        """Whether a backward is under way in which a unit was reduced."""
        self._is_open = False
        self._submitted = True
        """Whether this rank has submitted all of the current exchange."""
        self._exchange = 0
        self._reduced: list[Reduced] = []
        self._sent: dict[int, set[int]] = {}
        self._kept: dict[int, _Kept] = {}
        self._landings: dict[int, Tensor] = {}

    def hook_of(self, number: int) -> Callable[[Tensor], None]:
        """Return the hook of a unit."""
        return functools.partial(self._on_reduced, number)

    def unsubmitted_tensors(self) -> list[int]:
        """Numbers of the tensors that were not submitted in the current exchange."""
        if self._submitted:
            return []
        return [STATUS, *(1 + number for number in self._absent())]

    def forget(self) -> None:
        """Forget gradients that are kept, once the channel has ended."""
        self._reduced.clear()
        self._kept.clear()
        self._landings.clear()

    def check_whole(self) -> None:
        """Check, outside of backward, that none has ended in the middle of an exchange.

        Raises:
            UsageError: an exception has ended one; the session is given up.
        """
        if self.is_running and not in_backward():
            self._calls.refuse(
                "an exception has ended a backward() whose gradients were under way to the other "
                "nodes, which wait for the rest: restart from the last checkpoint"
            )

    # ---- while backward runs

    @torch.no_grad()
    def _on_reduced(self, number: int, buffer: Tensor) -> None:
        """Take over a unit's reduce-scattered gradients; FSDP's hook."""
        self._calls.check()
        unit = self._units[number]
        self._check_buffer(number, buffer)
        if not self.is_running:
            self.is_running = True
            after_backward(self._at_end)
        held = [one.parameter.grad for one in unit.trained]
        before = None if self._end_earlier(number, held) else held
        for one in unit.trained:
            # FSDP would add what is no mean yet.
            one.parameter.grad = None
        divisor = unit.later_divisor(buffer.dtype)
        reduced = Reduced(number, buffer, before, unit.all_reduces, divisor)
        reduced.raw = buffer if divisor is None else buffer.clone()
        self._reduced.append(reduced)
        if reduced.leaves and buffer.numel() == unit.elements:
            self._send(reduced, reduced.raw, set(range(len(unit.trained))))

    def _check_buffer(self, number: int, buffer: Tensor) -> None:
        unit, dtype = self._units[number], self._dtypes[number]
        if not in_backward():
            what = f"gradients of unit {unit.name!r}, reduced after {Feature.END_BY_HAND.label},"
            words = {Feature.END_BY_HAND: what, Feature.FSDP: Feature.FSDP.label}
            self._calls.refuse(refusal(words))
        if buffer.dtype != dtype or buffer.numel() > unit.elements:
            self._calls.refuse(
                f"unit {unit.name!r} reduces {buffer.numel()} gradients in {buffer.dtype}, and had "
                f"{unit.elements} in {dtype} in prepare(): give "
                f"MixedPrecisionPolicy(reduce_dtype={buffer.dtype}), and change which parameters "
                "are trained before prepare() alone"
            )
        for one in unit.trained:
            if post_accumulate_hooks(one.parameter):
                hook = f"register_post_accumulate_grad_hook() of parameter {one.name!r}"
                words = {Feature.GRADIENT_HOOK: hook, Feature.FSDP: Feature.FSDP.label}
                self._calls.refuse(refusal(words))

    def _end_earlier(self, number: int, made: list[Tensor | None]) -> bool:
        """Note what FSDP has made of a unit's earlier gradients of this backward; returns whether
        there are any."""
        earlier = [one for one in self._reduced if one.unit == number]
        for one in earlier:
            one.made = one.made or made
        if number in self._sent:
            # The channel takes a unit once a step.
            self._end_exchange(is_last=False)
        return bool(earlier)

    def _send(self, reduced: Reduced, whole: Tensor, present: set[int]) -> None:
        """Lend the core a unit's gradients, with those that were kept back before.

        Args:
            reduced: of the unit.
            whole: a buffer with all of its trained parameters.
            present: positions of those with a gradient.
        """
        number = reduced.unit
        kept = self._kept.pop(number, None)
        if kept is not None:
            whole += kept.sum
            present = present | kept.present
        reduced.lent, reduced.present = whole, present
        self._begin()
        self._sent[number] = present
        nbytes = whole.numel() * whole.element_size()
        with self._calls.translating(f"sending the gradients of {self._units[number].name!r}"):
            self._channel.gradient_ready(1 + number, self.step, whole.data_ptr(), nbytes)

    def _begin(self) -> None:
        if self._is_open:
            return
        if self._exchange == 0:
            self.backward += 1
            self._steps = self._on_begin()
        self._exchange += 1
        self.step += 1
        self._is_open, self._submitted = True, False
        with self._calls.translating("beginning to send gradients"):
            self._channel.step_begin(self.step)

    # ---- at the end of backward

    @torch.no_grad()
    def _at_end(self) -> None:
        """Wait for all means, and put them into the parameters' gradients."""
        try:
            self._calls.check()
            for number, unit in enumerate(self._units):
                for reduced in self._reduced:
                    if reduced.unit == number and not reduced.made:
                        reduced.made = [one.parameter.grad for one in unit.trained]
            self._reduced += [self._left_over(number) for number in self._due()]
            for reduced in self._reduced:
                if reduced.lent is None:
                    self._send_late(reduced)
            if self._is_open:
                self._end_exchange(is_last=True)
            for reduced in self._reduced:
                self._finish(reduced)
        finally:
            self._reduced = []
            self._exchange = 0
            self.is_running = False

    def _due(self) -> list[int]:
        """Return the units without new gradients whose earlier ones leave now."""
        reduced = {one.unit for one in self._reduced}
        return [n for n in self._kept if n not in reduced and self._units[n].all_reduces]

    def _left_over(self, number: int) -> Reduced:
        """Return zeros in place of a unit's gradients of this backward."""
        unit = self._units[number]
        zeros = torch.zeros(unit.elements, dtype=self._dtypes[number], device="cpu")
        before = [one.parameter.grad for one in unit.trained]
        divisor = unit.later_divisor(zeros.dtype)
        made: list[Tensor | None] = [None] * len(before)
        return Reduced(number, zeros, before, True, divisor, raw=zeros, made=made)

    def _send_late(self, reduced: Reduced) -> None:
        """Send, or keep back, gradients that could not be sent by the hook: not all are there."""
        number = reduced.unit
        unit, raw = self._units[number], reduced.raw
        assert raw is not None
        present = {at for at, made in enumerate(reduced.made) if made is not None}
        whole = raw
        if raw.numel() != unit.elements:
            whole = torch.zeros(unit.elements, dtype=raw.dtype, device=raw.device)
            source = _regions(unit, raw, present)
            for at, region in _regions(unit, whole, set(range(len(unit.trained)))).items():
                if at in present:
                    region.copy_(source[at])
        if not reduced.leaves:
            kept = self._kept.get(number)
            if kept is None:
                self._kept[number] = _Kept(whole, present)
            else:
                kept.sum += whole
                kept.present |= present
            return
        if number in self._sent:
            self._end_exchange(is_last=False)
        self._send(reduced, whole, present)

    def _end_exchange(self, *, is_last: bool) -> None:
        """Wait until an exchange is complete, and check that all nodes were in the same."""
        positions = [
            self._first_number[number] + at for number, held in self._sent.items() for at in held
        ]
        self.status.fill(
            self._steps, self.backward, self._exchange, is_last, self._sample(), positions
        )
        numbers = self.status.mean
        with self._calls.translating("waiting for the gradients of the other nodes"):
            self._channel.gradient_ready(STATUS, self.step, numbers.data_ptr(), 8 * numbers.numel())
            for number in self._absent():
                landing = self._landing(number)
                nbytes = landing.numel() * landing.element_size()
                self._channel.tensor_absent(1 + number, self.step, landing.data_ptr(), nbytes)
            self._submitted = True
            self._channel.step_end(self.step)
            with self._calls.waiting(self.step):
                self._channel.wait_step(self.step)
            self._channel.take_ready(self.step)
        self._is_open = False
        self._sent = {}
        difference = self.status.difference()
        if difference:
            self._calls.fail(RanksDifferError(difference))

    def _sample(self) -> int:
        """Return the checksum of the parameters that is compared in this exchange; 0 for none."""
        every = self._check_every
        if self._exchange > 1 or every == 0:
            return 0
        if every is None:
            part: int | None = self.backward // SAMPLE_EVERY
            due = is_sampled(self.backward)
        else:
            part = None
            due = self.backward % every == 0
        if not due:
            return 0
        shards = (local_of(one.parameter) for unit in self._units for one in unit.parameters)
        return checksum(shards, part)

    def _absent(self) -> list[int]:
        """Return the units without gradients in the current exchange."""
        return [number for number in range(len(self._units)) if number not in self._sent]

    def _landing(self, number: int) -> Tensor:
        """Return memory for the mean of a unit that this rank has no gradients of."""
        if number not in self._landings:
            unit = self._units[number]
            dtype = self._dtypes[number]
            self._landings[number] = torch.empty(unit.elements, dtype=dtype, device="cpu")
        return self._landings[number]

    def _finish(self, reduced: Reduced) -> None:
        """Make a unit's gradients those that native HSDP has."""
        unit = self._units[reduced.unit]
        mean = reduced.lent
        means: dict[int, Tensor] = {}
        if mean is not None:
            if unit.sums:
                mean *= self._nodes
            if reduced.divisor is not None:
                mean /= reduced.divisor
            means = _regions(unit, mean, set(range(len(unit.trained))))
        for at, one in enumerate(unit.trained):
            made = reduced.made[at]
            before = one.parameter.grad if reduced.before is None else reduced.before[at]
            if mean is None or at not in reduced.present:
                one.parameter.grad = before
                continue
            if made is None:
                made = unit.gradient_of(one, means[at])
            local = local_of(made)
            if local.untyped_storage().data_ptr() != means[at].untyped_storage().data_ptr():
                local.copy_(means[at][: local.numel()].view_as(local))
            if before is not None:
                local_of(before).add_(local)
                made = before
            one.parameter.grad = made


def _regions(unit: ShardedUnit, flat: Tensor, present: set[int]) -> dict[int, Tensor]:
    """Return the parts of a flat buffer, by position among the unit's trained parameters.

    Args:
        unit: whose gradients they are.
        flat: the gradients of some parameters, one after the other, each padded.
        present: positions of these.
    """
    position = {one.number: at for at, one in enumerate(unit.trained)}
    found: dict[int, Tensor] = {}
    first = 0
    for one in unit.in_buffer_order():
        at = position[one.number]
        if at in present:
            found[at] = flat[first : first + one.elements]
            first += one.elements
    return found
