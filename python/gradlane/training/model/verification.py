"""Verify across ranks that all prepare the same model: its tensors, its optimizer, the options."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradlane.errors import RefusedError, UsageError
from gradlane.training.connection import SessionContext
from gradlane.training.factors.factored_weights import (
    Factored,
    choose_factored,
    with_dtypes,
    without_codecs,
)
from gradlane.training.factors.rows import choose_row_sparse
from gradlane.training.log import log
from gradlane.training.model.optimizers import (
    check_optimizer,
    check_server_optimizer,
    needing_sparse,
    takes_sparse,
)
from gradlane.training.model.several_optimizers import members_of, name_of
from gradlane.training.model.state_checks import check_taken_over
from gradlane.training.model.validation import check_forward_writes, check_model
from gradlane.training.modules.shared_storage import SharedMemoryGroups
from gradlane.training.options.codec_choice import (
    CodecChoice,
    choose_codecs,
    local_clip,
    unused_codec_option,
    unused_pattern,
)
from gradlane.training.options.compatibility import Feature, refusal
from gradlane.training.options.momentum import check_momentum, keeps_momentum, momentum_of
from gradlane.training.options.strategy import RING, ring_ranks
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from gradlane.training.rendezvous.tensor_table import (
    TensorEntry,
    build_table,
    is_expanded,
    names_of,
)


@dataclass(frozen=True)
class ModelSpec:
    """A model as all ranks have agreed on it.

    Attributes:
        entries: the model's table; trained parameters come first.
        factored: trained parameters that travel as factors or rows, by tensor number.
        chosen_codecs: how each trained tensor is encoded, unless it travels as one of these.
    """

    entries: Sequence[TensorEntry]
    factored: Mapping[int, Factored]
    chosen_codecs: Sequence[CodecChoice]

    @property
    def codecs(self) -> list[CodecChoice]:
        """How each trained tensor is encoded."""
        return without_codecs(self.chosen_codecs, self.factored)

    @property
    def trained(self) -> list[TensorEntry]:
        """Table entries of the trained parameters, by tensor number."""
        return [entry for entry in self.entries if entry.trained]

    @property
    def momentum_codecs(self) -> dict[int, str]:
        """Codecs that keep momentum, by `id` of the parameter."""
        return {
            id(entry.tensor): choice.codec
            for entry, choice in zip(self.trained, self.codecs, strict=True)
            if keeps_momentum(choice.codec)
        }


def verify_model_across_ranks(
    ctx: SessionContext,
    scope: RendezvousScope,
    model: nn.Module,
    optimizer: Optimizer,
    buffers: str,
    checked: ModelSpec | None = None,
) -> ModelSpec:
    """Check a model and its optimizer, and that all ranks have the same.

    Args:
        ctx: the session's.
        scope: where the ranks agree; one that refuses tells the others there.
        model: the user's.
        optimizer: the user's.
        buffers: how buffers are kept.
        checked: the model as it was checked when it was prepared, and is now; None: check it.

    Raises:
        ValueError: the model or the optimizer cannot take part; the message names the tensor.
        UsageError: the optimizer would apply momentum again that a codec has applied.
        RanksDifferError: the ranks have different ones.
    """
    options = {
        **ctx.options.agreed(),
        "world_size": ctx.rank_info.world_size,
        "buffers": buffers,
        "optimizer": name_of(optimizer),
    }
    try:
        spec = _checked(ctx, model, optimizer, options) if checked is None else checked
    except (ValueError, UsageError) as error:
        scope.refuse(str(error))
        raise
    rows = [
        {**entry.row(), "scheme": spec.factored[index].scheme}
        if index in spec.factored
        else entry.row()
        for index, entry in enumerate(spec.entries)
    ]
    scope.agree({"options": options, "tensors": rows})
    return spec


def _checked(
    ctx: SessionContext, model: nn.Module, optimizer: Optimizer, options: dict[str, Any]
) -> ModelSpec:
    """Check a model and its optimizer on this rank.

    Raises:
        ValueError: the model or the optimizer cannot take part; the message names the tensor.
        UsageError: the optimizer would apply momentum again that a codec has applied.
    """
    check_model(model)
    if ctx.rank_info.world_size > 1:
        check_forward_writes(model)
    entries = build_table(model)
    _check_memory(entries)
    if ctx.options.checkpoints.folder is not None:
        _check_loadable(model, entries)
    check_optimizer(optimizer, entries)
    trained = [entry for entry in entries if entry.trained]
    factored = choose_factored(model, trained, ctx.schemes, ctx.options)
    row_sparse = choose_row_sparse(
        model,
        trained,
        ctx.options,
        rank=ctx.rank_info.rank,
        needing_sparse=needing_sparse(optimizer),
        takes_sparse=functools.partial(takes_sparse, optimizer),
    )
    ranks = ring_ranks(ctx.options.strategy.name, ctx.rank_info.world_size)
    coded = [entry.coded() for entry in trained]
    codecs = choose_codecs(ctx.options.codec, coded, ranks)
    spec = ModelSpec(entries, row_sparse | with_dtypes(factored, codecs), codecs)
    has_ring = ranks is not None or RING in ctx.schemes.values()
    unused = unused_codec_option(ctx.options.codec, has_ring=has_ring) or unused_pattern(
        ctx.options.codec, [entry.name for entry in entries], ctx.fitting_patterns
    )
    if unused:
        raise RefusedError(unused)
    _check_all_clipped(spec)
    may_take_over = ctx.options.update == "worker"
    for member in members_of(optimizer):
        check_momentum(member, spec.momentum_codecs, may_take_over=may_take_over)
    if ctx.options.update == "server":
        check_server_optimizer(optimizer, entries)
        if ctx.rank_info.rank == 0 and ctx.rank_info.ranks > 1:
            for codec in sorted(set(spec.momentum_codecs.values())):
                log.info(
                    "codec %r applies a momentum of %g, and %s has none: it trains with that",
                    codec,
                    momentum_of(codec),
                    type(optimizer).__name__,
                )
        _check_apart(trained)
        options["optimizer_state"] = check_taken_over(optimizer, trained)
    return spec


def _check_memory(entries: Sequence[TensorEntry]) -> None:
    """Check that nothing shares memory with a trained parameter that is none itself.

    Reading it would not wait for the parameter's update.
    """
    shared = SharedMemoryGroups([entry.tensor for entry in entries])
    for index, entry in enumerate(entries):
        if not entry.trained:
            others = [entries[other] for other in shared.whole([index]) if entries[other].trained]
            if others:
                raise RefusedError(
                    f"{entry.name!r}, which is not trained, lies in the memory of "
                    f"{names_of(others)}, which is: replace it by its .clone(), or compute it in "
                    "the forward"
                )


def _check_loadable(model: nn.Module, entries: Sequence[TensorEntry]) -> None:
    """Check that torch can load everything that a checkpoint will hold."""
    expanded = {entry.name: entry for entry in entries if is_expanded(entry.tensor)}
    saved = [expanded[name] for name in model.state_dict() if name in expanded] if expanded else []
    if saved:
        raise RefusedError(
            f"{names_of(saved)} would be in checkpoints and torch loads no expanded tensor "
            "(stride 0): replace it by its .clone(), or register it with persistent=False"
        )


def _check_all_clipped(spec: ModelSpec) -> None:
    """Check that a codec that clips by the norm of all gradients has all of them."""
    clipping = next((one.codec for one in spec.codecs if local_clip(one.codec)), None)
    if clipping is not None and spec.factored:
        index, one = next(iter(spec.factored.items()))
        layer = f"{spec.trained[index].name!r}, which travels as {one.parts},"
        words = {Feature.FACTOR_LAYER: layer, Feature.CLIPPING_CODEC: f"codec {clipping!r}"}
        raise RefusedError(refusal(words))


def _check_apart(trained: Sequence[TensorEntry]) -> None:
    shared = SharedMemoryGroups([entry.tensor for entry in trained]).members
    if shared:
        tied = f"{names_of(trained[index] for index in shared)}, which share memory,"
        raise RefusedError(refusal({Feature.TIED: tied, Feature.SERVER: Feature.SERVER.label}))
