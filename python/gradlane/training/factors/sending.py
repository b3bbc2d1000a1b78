"""Send factors or rows in place of gradients, and make the means of all ranks' blocks.

Factors of a weight are packed as backward yields them, since their memory may change, and leave as
one block when the last part is there. A rank whose factors would be larger than the
gradient sends the gradient; so does a rank whose layer yielded a gradient in place of factors. All
ranks rebuild the mean from the same blocks in the same order. With the scheme `adam`, one rank
rebuilds the mean of a weight and sends it to the others.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradlane.training.core import Blocks, Channel, CoreModule, RankChannel, rank_channel
from gradlane.training.factors.block import (
    BlockError,
    Dense,
    Part,
    dense_block,
    narrowed,
    pack,
    part_bytes,
    unpack,
)
from gradlane.training.factors.capture import FactorSink, install, remove
from gradlane.training.factors.factored_weights import Factored
from gradlane.training.factors.rebuild import rebuild
from gradlane.training.factors.root import RootThread
from gradlane.training.log import log
from gradlane.training.modules.gradient_intake import is_alone
from gradlane.training.options.strategy import ROWS


class FactorExchange:
    """Sends and receives the blocks of one model's weights."""

    def __init__(
        self,
        core: CoreModule,
        channel: Channel,
        factored: Mapping[int, Factored],
        rank: int,
        training_step_of: Callable[[int], int],
    ) -> None:
        """Start between two steps.

        Args:
            core: where the channel's errors come from.
            channel: where these tensors have the schemes `gather` and `answer`.
            factored: the weights, by tensor number.
            rank: this rank.
            training_step_of: the number of a step of the channel in training, for messages.
        """
        self._channel = channel
        self._factored = factored
        self._rank = rank
        self._held: dict[int, list[Tensor]] = {}
        self._fresh: set[int] = set()
        """Tensors of which parts have come since their last `end_parts`."""
        self._sent: dict[int, Tensor] = {}
        self._means: dict[int, Tensor] = {}
        self._costly: set[int] = set()
        """Tensors of which it was said that rows were more bytes than the whole gradient."""
        self._dense: set[int] = set()
        """Those of which it was said that a rank's gradient was dense."""
        self._training_step_of = training_step_of
        self._made: dict[int, Tensor] = {}
        if any(one.is_answered for one in factored.values()):

            def describe(index: int, step: int) -> str:
                name = factored[index].entry.name
                return f"rebuilding {name!r} in step {training_step_of(step)}"

            self._answering = RootThread(core, self._at_root, self._answer, describe)

    @property
    def _at_root(self) -> RankChannel:
        return rank_channel(self._channel, "gathering to a root")

    def begin(self) -> None:
        """Begin a step, and forget factors that were held and not sent."""
        self._held.clear()
        self._fresh.clear()

    def holds(self, index: int) -> bool:
        """Whether there is a part of a tensor's gradient in this step."""
        return bool(self._held.get(index))

    def hold(self, index: int, part: Part) -> None:
        """Keep a copy of a part of a tensor's gradient; the parts of a step add up.

        Raises:
            BlockError: its values have a dtype that does not travel.
        """
        self._fresh.add(index)
        one = self._factored[index]
        if one.sent_as is not None and not isinstance(part, Dense):
            part = narrowed(part, one.sent_as)
        blocks = self._held.setdefault(index, [])
        if sum(block.nbytes for block in blocks) + part_bytes(part) <= one.most_bytes:
            blocks.append(pack([part]))
            return
        entry = one.entry
        kept = [part for block in blocks for part in self._parts(index, block, self._rank)]
        whole = torch.empty(entry.shape, dtype=entry.dtype, device=entry.device)
        rebuild([[*kept, part]], 1, whole)
        self._held[index] = [pack([Dense(whole)])]

    def end_parts(self, index: int) -> bool:
        """Return whether parts of a tensor have come in the backward that ends now for it."""
        was_fresh = index in self._fresh
        self._fresh.discard(index)
        return was_fresh

    def submit(self, index: int, step: int) -> None:
        """Submit the held factors of a tensor as one block."""
        blocks = self._held.pop(index)
        block = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        self._sent[index] = block
        self._channel.block_ready(index, step, block.data_ptr(), block.nbytes)

    def submit_absent(self, index: int, step: int) -> None:
        """Submit the absence of a gradient; the mean of other ranks' comes all the same."""
        self._held.pop(index, None)
        self._channel.block_absent(index, step)

    def take(self, index: int, step: int, *, wanted: bool) -> Tensor | None:
        """Return the mean gradient of a tensor that is ready, laid out like its parameter.

        Args:
            index: the tensor.
            step: the step in which it is ready.
            wanted: whether the mean is needed; None all the same where no rank had a gradient.

        Raises:
            BlockError: a rank's bytes are no block of this tensor.
        """
        own, made = self._sent.pop(index, None), self._made.pop(index, None)
        blocks = self._channel.take_blocks(index, step)
        if blocks is None:
            return made if wanted else None
        wanted = wanted and any(region is not None for region in blocks.regions())
        if wanted and self._factored[index].is_answered:
            return self._answered(index, blocks)
        try:
            if not wanted:
                return None
            return self._mean(index, step, own, blocks, lambda: self._memory_for(index))
        finally:
            blocks.release()

    def _answer(self, index: int, step: int) -> None:
        """Make the mean of a tensor of which all blocks are here, and send it to all ranks.

        Called on a thread of its own, which alone uses the tensor meanwhile.

        Raises:
            BlockError: a rank's bytes are no block of this tensor.
        """
        blocks = self._channel.take_blocks(index, step)
        assert blocks is not None, "the channel asked"
        entry = self._factored[index].entry
        try:
            block = self._means.get(index)
            if block is None or not is_alone(block):
                block = self._means[index] = dense_block(entry.shape, entry.dtype)
            (whole,) = self._parts(index, block, self._rank)
            assert isinstance(whole, Dense)
            memory = whole.values
            if entry.device.type != "cpu":
                memory = torch.empty(entry.shape, dtype=entry.dtype, device=entry.device)
            mean = self._mean(index, step, self._sent.get(index), blocks, lambda: memory)
            if mean is not whole.values:
                whole.values.copy_(mean)
        finally:
            blocks.release()
        self._made[index] = mean
        self._at_root.root_result_ready(index, step, block.data_ptr(), block.nbytes)

    def _answered(self, index: int, blocks: Blocks) -> Tensor:
        """Return what a tensor's owner has made, in the memory in which it has arrived."""
        regions = enumerate(blocks.regions())
        owner, region = next((rank, one) for rank, one in regions if one is not None)
        block = _view(region, blocks)
        parts = [] if block is None else self._parts(index, block, owner)
        if len(parts) != 1 or not isinstance(parts[0], Dense):
            name = self._factored[index].entry.name
            raise BlockError(f"rank {owner} answered for {name!r} with no whole gradient")
        return parts[0].values.to(self._factored[index].entry.device)

    def _mean(
        self,
        index: int,
        step: int,
        own: Tensor | None,
        blocks: Blocks,
        memory: Callable[[], Tensor],
    ) -> Tensor:
        """Return the mean that all ranks' blocks make; `own` is this rank's."""
        regions = blocks.regions()
        self._note_bytes(index, [0 if one is None else one[1] for one in regions])
        parts: list[list[Part]] = []
        for rank, region in enumerate(regions):
            block = own if rank == self._rank else _view(region)
            if region is None or block is None:
                parts.append([])
            else:
                parts.append(self._parts(index, block, rank))
        self._note_dense(index, step, parts)
        return self._factored[index].mean(parts, len(regions), memory)

    def _note_bytes(self, index: int, block_bytes: Sequence[int]) -> None:
        """Say once of a tensor that its rows were more bytes than servers would have sent.

        Of N ranks, a port sends (N - 1) / N of all blocks, or 2 (N - 1) / N of a whole gradient.
        """
        one, sends = self._factored[index], len(block_bytes) > 1
        total, whole = sum(block_bytes), one.entry.nbytes
        if one.scheme != ROWS or not sends or total <= 2 * whole or index in self._costly:
            return
        self._costly.add(index)
        if self._rank == 0:
            log.warning(
                "the gradient of %r has travelled as rows of %.3g MB from each of %d ranks to all "
                "others, which is more than %.3g MB of a dense one on servers; build its embedding "
                "with sparse=False where so many rows are usual",
                one.entry.name,
                total / len(block_bytes) / 1e6,
                len(block_bytes),
                whole / 1e6,
            )

    def _note_dense(self, index: int, step: int, contributions: Sequence[Sequence[Part]]) -> None:
        """Say once of a tensor that it travels as rows, and that of a rank it was not sparse."""
        one = self._factored[index]
        if one.scheme != ROWS or self._rank != 0 or index in self._dense:
            return
        for rank, parts in enumerate(contributions):
            if any(isinstance(part, Dense) for part in parts):
                self._dense.add(index)
                log.warning(
                    "the gradient of %r was dense on rank %d in step %d, and has travelled whole "
                    "to all ranks, which is more than servers would have sent; build its embedding "
                    "with sparse=False where that is usual",
                    one.entry.name,
                    rank,
                    self._training_step_of(step),
                )
                return

    def _memory_for(self, index: int) -> Tensor:
        """Return memory for a mean: last step's, unless somebody still has it."""
        kept = self._means.get(index)
        if kept is None or not is_alone(kept):
            entry = self._factored[index].entry
            with torch.inference_mode(False):
                kept = torch.empty_strided(
                    entry.shape, entry.stride, dtype=entry.dtype, device=entry.device
                )
            self._means[index] = kept
        # A tensor of its own over the same memory, so that `.grad` never is the kept one.
        return kept.detach()

    def _parts(self, index: int, block: Tensor, rank: int) -> list[Part]:
        entry = self._factored[index].entry
        return unpack(block, entry.shape, entry.dtype, rank)


class FactorHooks:
    """The hooks on all layers that send factors, with one `remove`."""

    def __init__(self, factored: Mapping[int, Factored], sink: FactorSink) -> None:
        """Tap all layers."""
        self._layers = [layer for one in factored.values() for layer in one.layers]
        self._handles = []
        for index, one in factored.items():
            accumulation: Any = torch.autograd.graph.get_gradient_edge(one.entry.tensor).node
            end = functools.partial(_end_parts, sink, index)
            self._handles.append(accumulation.register_hook(end))
            for layer in one.layers:
                install(layer, sink, index)

    def remove(self) -> None:
        """Take the taps off again."""
        for handle in self._handles:
            handle.remove()
        for layer in self._layers:
            remove(layer)


def _end_parts(sink: FactorSink, index: int, *gradients: Any) -> None:
    """Hook of the node that adds a weight's gradients up: runs also where there were none."""
    sink.end_parts(index)


def _view(region: tuple[int, int] | None, blocks: Blocks | None = None) -> Tensor | None:
    """Return memory of the core as bytes, without a copy; `blocks` live as long as it."""
    if region is None:
        return None
    address, nbytes = region
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    # Tensors keep their buffer, and this object keeps the owner of the memory.
    memory.owner = blocks  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8)
