"""A rank's shard of a model that `fully_shard` has sharded within the node, between exchanges.

The ranks of a node train one model together, exactly: torch averages in the node. Between nodes the
ranks with the same shard, a column, exchange what it has changed by, on a channel of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from gradlane.errors import RefusedError, UsageError
from gradlane.training.connection import SessionContext, open_column
from gradlane.training.local_updates.fragments import divide
from gradlane.training.local_updates.replica import Form, Replica, form_of
from gradlane.training.model.channel_setup import Connected, StagingFailures, run_step_0
from gradlane.training.model.consistency_check import StatusTensor
from gradlane.training.model.staging import carrier_for
from gradlane.training.model.step_layout import StepLayout
from gradlane.training.model.verification import ModelSpec
from gradlane.training.options.codec_choice import (
    CodecChoice,
    choose_codecs,
    rows_with_codecs,
    unused_codec_option,
    unused_pattern,
)
from gradlane.training.options.going_on import STATUS_LANES
from gradlane.training.options.local_updates import Local
from gradlane.training.options.strategy import RING, ring_ranks
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from gradlane.training.rendezvous.tensor_table import TensorEntry, extra_entry
from gradlane.training.sharded.column import ColumnChannel, column_of
from gradlane.training.sharded.fsdp import ShardedUnit, local_of, reshard
from gradlane.training.sharded.units import agree_on_units, initial_entries


def connect_shards(
    ctx: SessionContext,
    scope: RendezvousScope,
    model: nn.Module,
    optimizer: Optimizer,
    local: Local,
    units: Sequence[ShardedUnit],
) -> Replica:
    """Agree with all ranks, connect this rank's column, and take the first node's values.

    Args:
        ctx: the session's.
        scope: where all ranks agree.
        model: the user's.
        optimizer: the user's.
        local: how often and how nodes exchange.
        units: of the model, as `read_sharded` has returned them.

    Raises:
        ValueError, UsageError: the model cannot take part, or a codec is invalid.
        GradlaneError: the ranks differ, or cannot reach each other.
    """
    rank_info = ctx.rank_info
    shards = units[0].mesh.size()
    ranks = column_of(rank_info.rank, rank_info.world_size, shards)
    parameters = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    # Of whole parameters, so that all columns have the same turns.
    whole = [extra_entry(name, one) for name, one in parameters]
    shards_of = [extra_entry(name, local_of(one)) for name, one in parameters]
    numbers = [at for at, entry in enumerate(shards_of) if entry.nbytes]
    trained = [shards_of[at] for at in numbers]
    try:
        places = {at: index for index, at in enumerate(numbers)}
        fragments = [
            [places[at] for at in one if at in places]
            for one in divide(model, whole, local.fragments)
        ]
        codecs = _choose_codecs(ctx, trained, [entry.name for entry in whole], len(ranks))
    except (ValueError, UsageError) as error:
        scope.refuse(str(error))
        raise
    agree_on_units(ctx, scope, optimizer, units)
    initial = initial_entries(model, units, trained=False)
    entries = [*trained, *initial]
    status = StatusTensor(ranks.index(rank_info.rank), len(ranks), lanes=STATUS_LANES)
    extras = [extra_entry("gradlane's rank statuses", status.tensor)]
    rows = rows_with_codecs(
        [entry.plan_row() for entry in (*entries, *extras)],
        [entry.coded() for entry in trained],
        codecs,
    )
    channel = ColumnChannel(
        ctx.core, open_column(ctx, scope, rows, ranks), ranks, rank_info.world_size
    )
    staging = StagingFailures()
    carried = {**dict(enumerate(trained)), len(entries): extras[0]}
    connected = Connected(
        core=ctx.core,
        scope=scope,
        spec=ModelSpec(entries, {}, codecs),
        layout=StepLayout(
            trained, len(entries), extras=1, status=status, status_index=len(entries)
        ),
        extras=extras,
        codecs=codecs,
        channel=channel,
        recording=None,
        carrier=carrier_for(channel, carried, staging.tell),
        served=None,
        staging=staging,
        ranks_each=1,
    )
    run_step_0(ctx, connected, first=rank_info.rank == ranks[0])
    names = {name for name, _ in model.named_parameters()}

    def form() -> Form:
        memory = {name: local_of(one).data_ptr() for name, one in model.named_parameters()}
        return {name: (*one, memory[name]) for name, one in form_of(model).items()}

    return Replica(
        connected,
        f"{scope.name}/{ranks[0]}",
        ranks,
        shards,
        fragments,
        [entry for entry in initial if entry.name in names],
        functools.partial(reshard, model),
        form,
    )


def _choose_codecs(
    ctx: SessionContext, trained: Sequence[TensorEntry], names: Sequence[str], nodes: int
) -> list[CodecChoice]:
    """Choose the codec of each shard.

    Args:
        ctx: the session's.
        trained: table entries of this rank's shards.
        names: of all trained parameters: of some this rank may have none.
        nodes: ranks of the column.

    Raises:
        ValueError, UsageError: a codec is invalid, or changes nothing.
    """
    options = ctx.options
    ranks = ring_ranks(options.strategy.name, nodes)
    choices = choose_codecs(options.codec, [entry.coded() for entry in trained], ranks)
    has_ring = options.strategy.name == RING
    unused = unused_codec_option(options.codec, has_ring=has_ring) or unused_pattern(
        options.codec, names, ctx.fitting_patterns
    )
    if unused:
        raise RefusedError(unused)
    return choices
