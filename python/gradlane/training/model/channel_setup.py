"""Connect a model to a channel: agree with all ranks, number its tensors, choose a carrier.

When `connect` returns, all ranks have rank 0's parameters and buffers; nothing is hooked yet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradlane.training.carrier import Carrier, broadcast_nothing
from gradlane.training.connection import (
    SessionContext,
    node_layout,
    open_channel,
    ranks_each_of,
)
from gradlane.training.core import (
    Channel,
    CoreModule,
    check_connected,
    rank_channel,
    translate_error,
)
from gradlane.training.model.joined_gradients import choose_groups
from gradlane.training.model.optimizers import evaluates_closure
from gradlane.training.model.served_parameters import ServedParameters
from gradlane.training.model.several_optimizers import members_of
from gradlane.training.model.staging import carrier_for
from gradlane.training.model.step_layout import StepLayout, build_step_layout
from gradlane.training.model.verification import ModelSpec, verify_model_across_ranks
from gradlane.training.monitoring.recorder import ModelRecording
from gradlane.training.node.channel import NodeChannel
from gradlane.training.node.collective_carrier import CollectiveCarrier
from gradlane.training.options.codec_choice import CodecChoice, rows_with_codecs
from gradlane.training.options.codec_options import RAW
from gradlane.training.options.going_on import STATUS_LANES, STATUS_LANES_LEAST
from gradlane.training.options.strategy import FACTOR_SCHEMES, RING
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from gradlane.training.rendezvous.serving import check_codecs_served
from gradlane.training.rendezvous.tensor_table import TensorEntry


class StagingFailures:
    """Why copies through the host ended, for a model that is made later."""

    def __init__(self) -> None:
        """Nothing has failed."""
        self._errors: list[Exception] = []
        self._listener: Callable[[Exception], None] = self._errors.append

    def tell(self, error: Exception) -> None:
        """Tell a failure."""
        self._listener(error)

    def subscribe(self, listener: Callable[[Exception], None]) -> None:
        """Have a function called with each failure, those of before included."""
        self._listener = listener
        for error in self._errors:
            listener(error)


@dataclass(frozen=True)
class Connected:
    """A model's channel and the tensors that travel on it.

    Attributes:
        core: the compiled core.
        scope: where its ranks agreed.
        spec: the model as the ranks have agreed on it.
        layout: the tensors that take part in each step.
        extras: entries of tensors beside the table, whose numbers follow it.
        codecs: how each trained tensor is encoded.
        channel: to all ranks; records, where the session does.
        recording: of this channel, or None.
        carrier: brings gradients to the channel and back.
        served: parameters in the hands of servers that update them, or None.
        staging: tells why copies through the host ended.
        ranks_each: consecutive ranks that talk to the network as one.
    """

    core: CoreModule
    scope: RendezvousScope
    spec: ModelSpec
    layout: StepLayout
    extras: Sequence[TensorEntry]
    codecs: list[CodecChoice]
    channel: Channel
    recording: ModelRecording | None
    carrier: Carrier
    served: ServedParameters | None
    staging: StagingFailures
    ranks_each: int

    def look(self) -> None:
        """Raise if these connections are lost.

        Raises:
            GradlaneError: they are.
        """
        check_connected(self.core, self.channel)

    def abort(self, reason: str) -> None:
        """Tell all ranks why nothing comes of these connections, and let them go."""
        with contextlib.suppress(self.core.ChannelError):
            self.channel.abort(reason)
        self.carrier.close()


def connect(
    ctx: SessionContext,
    scope: RendezvousScope,
    model: nn.Module,
    optimizer: Optimizer,
    buffers: str,
    checked: ModelSpec | None = None,
    *,
    spreads: bool = True,
) -> Connected:
    """Agree with all ranks, open a channel and broadcast rank 0's values.

    Args:
        ctx: the session's.
        scope: where the ranks agree.
        model: the user's.
        optimizer: the user's.
        buffers: how buffers are kept: `"broadcast"`, `"average"` or `"local"`.
        checked: the model as it was checked when it was prepared, and is now; None: check it.
        spreads: whether rank 0's values are broadcast.

    Raises:
        ValueError: the model or the optimizer cannot take part.
        GradlaneError: the ranks differ, or cannot reach each other.
    """
    spec = verify_model_across_ranks(ctx, scope, model, optimizer, buffers, checked)
    nodes = node_layout(ctx, scope)
    serves = ctx.options.update == "server"
    # Servers update a step's parameters before they have read statuses; and those of ranks that are
    # left out of a step would be missing.
    may_lack = ctx.options.stragglers.leaves_out
    has_statuses = not (serves or may_lack)
    groups = []
    # What each rank exchanges is told beside the differences.
    is_local = ctx.options.local_updates is not None
    if has_statuses and nodes is None and not is_local:
        groups = choose_groups(spec.trained, _lonely(ctx, spec))
    # Numbers that members gather, moved fragments, losses of evaluations.
    evaluates = any(map(evaluates_closure, members_of(optimizer)))
    carries_numbers = ctx.options.going_on.on or is_local or evaluates
    extras, layout = build_step_layout(
        model,
        spec.entries,
        spec.factored,
        ctx.rank_info,
        ctx.membership,
        # Ranks that are in different steps have no values in common.
        "local" if ctx.options.is_asynchronous else buffers,
        has_statuses=has_statuses,
        may_lack=may_lack,
        status_lanes=STATUS_LANES if carries_numbers else STATUS_LANES_LEAST,
        groups=groups,
    )
    trained = spec.trained
    codecs = spec.codecs
    check_codecs_served(codecs, ctx.rank_info)
    rows = _plan_rows(spec, extras, layout.joined)
    opened = channel = open_channel(
        ctx,
        scope,
        rows,
        nodes,
        update=ctx.options.update_place,
        # Differences are exchanged too rarely for collectives, which go by each step's order.
        gradients=[] if is_local else [entry.tensor for entry in trained],
        goes_on=True,
    )
    recording = None
    if ctx.recorder is not None:
        members = {
            number: [trained[index].name for index in group.members]
            for number, group in enumerate(groups, len(spec.entries))
        }
        recording = ctx.recorder.record(channel, [str(row["name"]) for row in rows], members)
        channel = recording.channel
    staging = StagingFailures()
    connected = Connected(
        ctx.core,
        scope,
        spec,
        layout,
        extras,
        codecs,
        channel,
        recording,
        _carrier(ctx, opened, channel, spec, extras, staging.tell),
        ServedParameters(
            rank_channel(channel, "updating on servers"), trained, ctx.rank_info, layout.beside
        )
        if serves
        else None,
        staging,
        ranks_each_of(opened),
    )
    run_step_0(ctx, connected, first=ctx.rank_info.rank == 0, spreads=spreads)
    return connected


def _lonely(ctx: SessionContext, spec: ModelSpec) -> Collection[int]:
    """Return the trained parameters whose gradients travel in no group.

    Round a ring the order of a sum follows from where an element lies; codecs look at the tensor as
    a whole, and keep residuals by its number; factors and rows are blocks.
    """
    if any(choice.codec != RAW for choice in spec.codecs):
        return range(len(spec.trained))
    if ctx.options.strategy.name == RING:
        return range(len(spec.trained))
    schemes = schemes_of(ctx, spec)
    return {index for index, entry in enumerate(spec.trained) if schemes[entry.name] != "ps"}


def _plan_rows(
    spec: ModelSpec, extras: Sequence[TensorEntry] = (), joined: Collection[int] = ()
) -> list[dict[str, Any]]:
    """Return the plan's tensors: the table, and what follows it.

    Args:
        spec: the model.
        extras: what follows its table.
        joined: trained parameters that take part in step 0 alone: their gradients are in groups.
    """
    rows = [entry.plan_row() for entry in (*spec.entries, *extras)]
    for index in joined:
        rows[index] = spec.entries[index].bytes_row()
    for index, one in spec.factored.items():
        rows[index] = one.plan_row()
    return rows_with_codecs(rows, [entry.coded() for entry in spec.trained], spec.codecs)


def schemes_of(ctx: SessionContext, spec: ModelSpec) -> dict[str, str]:
    """Return how each trained tensor is aggregated, by name."""
    usual = RING if ctx.options.strategy.name == RING else "ps"
    found = {}
    for index, entry in enumerate(spec.trained):
        given = ctx.schemes.get(entry.name, usual)
        # A bias has its layer's scheme in a plan, and travels as usual.
        whole = usual if given in FACTOR_SCHEMES else given
        found[entry.name] = spec.factored[index].scheme if index in spec.factored else whole
    return found


def _carrier(
    ctx: SessionContext,
    opened: Channel,
    channel: Channel,
    spec: ModelSpec,
    extras: Sequence[TensorEntry],
    staging_failed: Callable[[Exception], None],
) -> Carrier:
    """Choose who carries; `opened` is the channel as it was before anything recorded it."""
    trained = dict(enumerate(spec.trained))
    beside = dict(enumerate(extras, len(spec.entries)))
    if isinstance(opened, NodeChannel) and opened.collective_tensors:
        others = carrier_for(channel, beside, staging_failed)
        return CollectiveCarrier(opened, trained, others)
    # A part of a mean may be over ranks without a gradient, while another has a lost rank's.
    zeroes = ctx.options.going_on.on
    return carrier_for(channel, {**trained, **beside}, staging_failed, zeroes=zeroes)


def run_step_0(
    ctx: SessionContext, connected: Connected, *, first: bool, spreads: bool = True
) -> None:
    """Run step 0, or tell all ranks why it failed.

    Args:
        ctx: the session's.
        connected: its channel, on which no step has begun.
        first: whether this rank's values are broadcast.
        spreads: whether any rank's are.

    Raises:
        GradlaneError: a rank was lost.
    """
    everything = [*connected.spec.entries, *connected.extras]
    try:
        if spreads:
            connected.carrier.broadcast_initial(
                everything,
                first=first,
                without=connected.layout.factored.keys(),
            )
        else:
            broadcast_nothing(connected.channel, everything)
        if connected.layout.buffers is not None:
            connected.layout.buffers.start()
        if connected.served is not None:
            connected.served.register()
    except BaseException as error:
        connected.abort(f"{type(error).__name__} while spreading the model: {error}")
        if isinstance(error, ctx.core.ChannelError):
            raise translate_error(ctx.core, error, "spreading rank 0's values") from error
        raise
