"""One sharded model and its optimizer on the channel of a column, from `prepare` to `close`.

The ranks of a node hold a shard each. A *column* is the ranks of all nodes with the same shard: it
has a channel of its own, between all columns nothing is sent. Parameters, gradients and optimizer
stay torch's; after `close` they are plain again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from gradlane.errors import (
    GradlaneError,
    RefusedError,
    SessionClosedError,
    SessionFailedError,
    UsageError,
)
from gradlane.training.connection import SessionContext, open_column, shutdown_channel
from gradlane.training.core import Channel, translate_error
from gradlane.training.model.several_optimizers import members_of
from gradlane.training.options.codec_choice import (
    CodecChoice,
    choose_codecs,
    rows_with_codecs,
    unused_codec_option,
)
from gradlane.training.options.strategy import RING, ring_ranks
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from gradlane.training.rendezvous.tensor_table import TensorEntry, extra_entry
from gradlane.training.sharded.column import ColumnCalls, ColumnChannel, column_of
from gradlane.training.sharded.fsdp import ShardedUnit
from gradlane.training.sharded.rounds import GradientRounds
from gradlane.training.sharded.status import StatusNumbers
from gradlane.training.sharded.units import agree_on_units, initial_entries

_STATUS = "(status)"


class ShardedModel:
    """A connected sharded model."""

    def __init__(
        self,
        ctx: SessionContext,
        scope: RendezvousScope,
        model: nn.Module,
        optimizer: Optimizer,
        units: Sequence[ShardedUnit],
    ) -> None:
        """Agree with all ranks, connect this rank's column, and give it the first node's shards.

        Args:
            ctx: the session's.
            scope: where all ranks agree.
            model: the user's.
            optimizer: the user's.
            units: as `read_sharded` has returned them.

        Raises:
            ValueError, UsageError: a codec is invalid, or keeps a residual.
            GradlaneError: the ranks differ, or cannot reach each other.
        """
        self._ctx = ctx
        self._scope = scope
        self.model = model
        self.optimizer = optimizer
        self._units = units
        self.step = 0
        """Training steps that have ended."""
        rank_info = ctx.rank_info
        shards = units[0].mesh.size()
        self._column = column_of(rank_info.rank, rank_info.world_size, shards)
        dtypes = [unit.reduce_dtype for unit in units]
        buffers = [
            extra_entry(unit.name, torch.empty(unit.elements, dtype=dtype, device="cpu"))
            for unit, dtype in zip(units, dtypes, strict=True)
        ]
        initial = initial_entries(model, units)
        try:
            self.codecs = self._choose_codecs(buffers)
        except (ValueError, UsageError) as error:
            scope.refuse(str(error))
            raise
        agree_on_units(ctx, scope, optimizer, units)
        status = StatusNumbers([one.name for unit in units for one in unit.trained])
        rows = [
            {"name": _STATUS, "numel": status.count, "dtype": "f64", "role": "parameter"},
            *rows_with_codecs(
                [entry.plan_row() for entry in buffers],
                [entry.coded() for entry in buffers],
                self.codecs,
            ),
            *(entry.bytes_row() for entry in initial),
        ]
        opened = open_column(ctx, scope, rows, self._column)
        self.channel: Channel = ColumnChannel(ctx.core, opened, self._column, rank_info.world_size)
        names = [str(row["name"]) for row in rows]
        if ctx.recorder is not None:
            self.channel = ctx.recorder.record(self.channel, names).channel
        self._name = f"{scope.name}/{self._column[0]}"
        self._calls = ColumnCalls(ctx, self.channel, self._name)
        self.rounds = GradientRounds(
            self.channel,
            units,
            dtypes,
            status,
            len(self._column),
            ctx.options.check_every,
            self._calls,
            self._on_begin,
        )
        self._broadcast_initial(buffers, initial)
        self._watch = ctx.observer.watch(
            model, self.channel, self, name=self._name, tensors=names, codecs=self.codecs
        )
        self._begun = 0
        self.has_parted = False
        """Whether every rank of the column has said goodbye."""
        ctx.deadlocks.watch(self._name, self.rounds, self._on_deadlock)
        self._handles: list[Any] = [model.register_forward_pre_hook(self._before_forward)]
        for member in members_of(optimizer):
            self._handles.append(member.register_step_pre_hook(self._before_step))
        last = members_of(optimizer)[-1]
        self._handles.append(last.register_step_post_hook(self._after_step))
        for number, unit in enumerate(units):
            unit.set_hook(self.rounds.hook_of(number))

    @property
    def in_step(self) -> bool:
        """Whether gradients of this step were sent, and no optimizer has stepped yet."""
        return self._calls.failure.error is None and self._begun > self.step

    def training_step_of(self, step: int) -> int:
        """Return the training step of an exchange: of the current one, the others are not kept."""
        return self._begun if step >= self.rounds.step else min(step, self._begun)

    def close(self, timeout_s: float) -> None:
        """Unhook the model and close the channel.

        Args:
            timeout_s: how long to wait for the other ranks' goodbyes; it is no error if they do
                not come.

        Raises:
            GradlaneError: the session has failed.
        """
        try:
            self._calls.check()
            self.rounds.check_whole()
        except GradlaneError as error:
            self.abort(f"closed after an error: {error}")
            raise
        self._ctx.deadlocks.unwatch(self._name)
        self._remove_hooks()
        self._calls.failure.fail(SessionClosedError("the session was closed"))
        if shutdown_channel(self._ctx, self.channel, self._watch, self._scope, timeout_s):
            self._scope.delete_keys_if_last()
            self.has_parted = True

    def abort(self, reason: str) -> None:
        """Give up and tell all ranks why."""
        self._calls.failure.fail(SessionClosedError(f"the session was given up: {reason}"))
        with contextlib.suppress(self._ctx.core.ChannelError):
            self.channel.abort(reason)
        self.rounds.forget()

    def forget_in_child(self) -> None:
        """Drop the connections in a forked child."""
        self.channel.forget_in_child()
        self._calls.failure.fail(
            SessionClosedError("this session belongs to the parent of this forked child")
        )

    # ---- inside

    def _choose_codecs(self, buffers: Sequence[TensorEntry]) -> list[CodecChoice]:
        options = self._ctx.options
        ranks = ring_ranks(options.strategy.name, len(self._column))
        choices = choose_codecs(options.codec, [entry.coded() for entry in buffers], ranks)
        unused = unused_codec_option(options.codec, has_ring=options.strategy.name == RING)
        if unused:
            raise RefusedError(unused)
        return choices

    def _broadcast_initial(
        self, buffers: Sequence[TensorEntry], initial: Sequence[TensorEntry]
    ) -> None:
        """Run step 0: this column gets the values of its first rank."""
        channel, status = self.channel, self.rounds.status.mean
        lent = [_dense(entry) for entry in initial]
        scratch = [entry.tensor for entry in buffers]
        try:
            channel.step_begin(0)
            for index, tensor in enumerate((status, *scratch)):
                nbytes = tensor.numel() * tensor.element_size()
                channel.tensor_absent(index, 0, tensor.data_ptr(), nbytes)
            first = len(scratch) + 1
            for index, (entry, tensor) in enumerate(zip(initial, lent, strict=True), first):
                channel.gradient_ready(index, 0, tensor.data_ptr(), entry.nbytes)
            channel.step_end(0)
            with self._calls.waiting(0):
                channel.wait_step(0)
        except BaseException as error:
            with contextlib.suppress(self._ctx.core.ChannelError):
                channel.abort(f"{type(error).__name__} while spreading the model: {error}")
            if isinstance(error, self._ctx.core.ChannelError):
                where = "spreading the first node's values"
                raise translate_error(self._ctx.core, error, where) from error
            raise
        if self._ctx.rank_info.rank == self._column[0]:
            return
        with torch.no_grad():
            for entry, tensor in zip(initial, lent, strict=True):
                if tensor.data_ptr() != entry.tensor.data_ptr():
                    entry.tensor.copy_(tensor)
                else:
                    # The core wrote there, and torch has not counted that.
                    increment_version(entry.tensor)

    def _on_begin(self) -> int:
        if self._begun == self.step:
            self._begun += 1
            self._watch.step_begins(self._begun)
        return self.step

    def explain(self) -> list[dict[str, Any]]:
        """Return the one stage that its steps pass: they wait at the end of backward."""
        reason = "fully_shard() in the nodes: shards are averaged between them inside backward()"
        return [{"stage": "sharded model", "reason": reason, "acts": []}]

    def _before_forward(self, *_: Any) -> None:
        self._calls.check()
        self.rounds.check_whole()

    def _before_step(self, *_: Any) -> None:
        self._calls.check()
        self.rounds.check_whole()

    def _after_step(self, *_: Any) -> None:
        self.step = self._begun

    def _on_deadlock(self, reason: str) -> None:
        """Fail here and tell all ranks; called while this rank waits."""
        self._calls.failure.fail(SessionFailedError(reason, self.step))
        with contextlib.suppress(self._ctx.core.ChannelError):
            self.channel.abort(reason)

    def _remove_hooks(self) -> None:
        for unit in self._units:
            unit.set_hook(None)
        for handle in self._handles:
            handle.remove()


def _dense(entry: TensorEntry) -> Tensor:
    """Return a tensor's memory, or a dense copy of one with gaps."""
    tensor = entry.tensor
    if tuple(tensor.stride()) == entry.stride:
        return tensor
    own = torch.empty_strided(tensor.shape, entry.stride, dtype=tensor.dtype, device="cpu")
    return own.copy_(tensor)
