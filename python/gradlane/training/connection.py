"""Opening and closing of a channel between all ranks: plan, secret, addresses, connections."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from gradlane.errors import RendezvousError
from gradlane.formats.longer_waits import with_variables
from gradlane.training.core import (
    Channel,
    CoreChannel,
    CoreModule,
    Listener,
    check_connected,
    translate_error,
)
from gradlane.training.log import log
from gradlane.training.monitoring.observer import ModelWatch, Observer
from gradlane.training.monitoring.recorder import SessionRecorder
from gradlane.training.node.channel import NodeChannel
from gradlane.training.node.layout import NodeLayout, agree_on_layout
from gradlane.training.node.opening import nodes_conflict, open_node_channel
from gradlane.training.node.rules import AUTO, OFF
from gradlane.training.options.going_on import GoingOn
from gradlane.training.options.options import Options
from gradlane.training.options.strategy import FACTOR_SCHEMES
from gradlane.training.rendezvous import addresses
from gradlane.training.rendezvous.connecting import connect_channel, wait_until_all_are_connected
from gradlane.training.rendezvous.deadlock import DeadlockDetector
from gradlane.training.rendezvous.environment import RankInfo, own_processors
from gradlane.training.rendezvous.half_register import HalfRegister
from gradlane.training.rendezvous.membership import Membership
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from gradlane.training.rendezvous.serving import JobAnnouncement, JobAnnouncements


class ModelFollower(Protocol):
    """Follows the models of a session as they are prepared, to take checkpoints."""

    def follow(self, prepared: Any, scope: RendezvousScope) -> None:
        """Start with a model; a collective call.

        Args:
            prepared: the prepared model.
            scope: for the agreement of the ranks.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what a rank that joins takes over."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Take over what another rank has returned."""


@dataclass(frozen=True)
class SessionContext:
    """The session's state that each of its models uses.

    Attributes:
        core: the compiled core or its double.
        options: the session's.
        rank_info: this rank.
        store_host: host of the rendezvous store.
        store_port: its port.
        secret: the user's own secret, or None.
        deadlocks: detects ranks that wait for each other.
        observer: has the metrics of all models.
        checkpoints: takes checkpoints, or None.
        recorder: of a timeline, or None.
        schemes: aggregation schemes of a plan, by tensor name; other tensors use the strategy's.
        announcements: of channels to dedicated servers, on rank 0, or None.
        membership: the ranks that train.
        fitting_patterns: patterns of codecs that fit a tensor of some model.
    """

    core: CoreModule
    options: Options
    rank_info: RankInfo
    store_host: str
    store_port: int
    secret: str | None
    deadlocks: DeadlockDetector
    observer: Observer
    membership: Membership
    checkpoints: ModelFollower | None = None
    recorder: SessionRecorder | None = None
    schemes: Mapping[str, str] = field(default_factory=dict)
    announcements: JobAnnouncements | None = None
    fitting_patterns: set[str] = field(default_factory=set)


def node_layout(ctx: SessionContext, scope: RendezvousScope) -> NodeLayout | None:
    """Agree on the ranks of each node; a collective call of ranks with the same options.

    Returns:
        The layout; None where each rank talks to the network by itself.
    """
    if ctx.options.local.mode == OFF or ctx.rank_info.world_size == 1:
        return None
    return agree_on_layout(ctx.options, scope, os.environ)


def open_channel(
    ctx: SessionContext,
    scope: RendezvousScope,
    rows: Sequence[Mapping[str, Any]],
    layout: NodeLayout | None,
    *,
    update: str,
    first: int = 0,
    gradients: Sequence[Tensor] = (),
    goes_on: bool = False,
) -> Channel:
    """Connect to all ranks.

    Args:
        ctx: of the session.
        scope: of this channel.
        rows: the plan's tensors.
        layout: of the ranks on nodes, as `node_layout` has returned it.
        update: where the optimizer runs.
        first: the rank that is rank 0 of the channel, whose values step 0 broadcasts; the ranks
            after it follow in their order.
        gradients: tensors like the gradients of the first rows, where those are torch's.
        goes_on: whether the channel goes on when ranks are lost, where the session does.

    Raises:
        RendezvousError: the ranks cannot reach each other.
    """
    if not goes_on:
        ctx = replace(ctx, options=replace(ctx.options, going_on=GoingOn(on=False)))
    register = HalfRegister(scope)
    if ctx.rank_info.ranks > 1 and ctx.options.going_on.on:
        register.open()
    channel = _open(ctx, scope, rows, layout, update, first, gradients)
    if ctx.rank_info.ranks > 1:
        if ctx.options.going_on.on:
            # From the first moment on half of the ranks may ask for the word of the store.
            ctx.membership.follow(ctx.core, channel, scope, register)
            scope.loss_of = functools.partial(ctx.membership.loss_of, world=scope.rank_info.job)
        wait_until_all_are_connected(ctx.core, channel, scope)
    limit_s = ctx.options.network.progress_timeout_s
    scope.mark_connected(limit_s, functools.partial(check_connected, ctx.core, channel))
    return channel


def open_column(
    ctx: SessionContext,
    scope: RendezvousScope,
    rows: Sequence[Mapping[str, Any]],
    ranks: Sequence[int],
) -> CoreChannel:
    """Connect some of the ranks, while all others connect in the same way; collective for all.

    Args:
        ctx: of the session.
        scope: of all ranks.
        rows: the plan's tensors, those of these ranks.
        ranks: of the channel, in its order; this one is among them.

    Raises:
        RendezvousError: ranks cannot reach each other; the same text on all.
    """
    channel = _connect(ctx, scope, scope.secret(ctx.secret), "worker", rows, ranks)
    wait_until_all_are_connected(ctx.core, channel, scope)
    limit_s = ctx.options.network.progress_timeout_s
    scope.mark_connected(limit_s, functools.partial(check_connected, ctx.core, channel))
    return channel


def ranks_in_errors(ctx: SessionContext, channel: Channel, first: int) -> list[int]:
    """Return the world ranks by their number in a channel's errors.

    Args:
        ctx: of the session.
        channel: as `open_channel` has returned it.
        first: as `open_channel` was given it.
    """
    turn = 0 if isinstance(channel, NodeChannel) else first
    world_size = ctx.rank_info.world_size
    own = [(turn + index) % world_size for index in range(world_size)]
    return [*own, *range(world_size, ctx.rank_info.ranks)]


def ranks_each_of(channel: Channel) -> int:
    """Return the number of consecutive ranks that talk to the network as one, those of a node.

    Args:
        channel: as `open_channel` has returned it.
    """
    return channel.ranks_each if isinstance(channel, NodeChannel) else 1


def _open(
    ctx: SessionContext,
    scope: RendezvousScope,
    rows: Sequence[Mapping[str, Any]],
    layout: NodeLayout | None,
    update: str,
    first: int,
    gradients: Sequence[Tensor],
) -> Channel:
    options, rank_info = ctx.options, ctx.rank_info
    # The rows of tensors with blocks name their scheme already.
    schemes = {name: one for name, one in ctx.schemes.items() if one not in FACTOR_SCHEMES}
    table = [
        {"scheme": schemes[row["name"]], **row} if row["name"] in schemes else row for row in rows
    ]
    secret = scope.secret(ctx.secret)
    if layout is not None:
        is_default = options.local.mode == AUTO
        found = nodes_conflict(table, layout) if is_default else None
        obstacle = "" if found is None else found.why
        if is_default and rank_info.rank == 0 and scope.channel == 0:
            _say_layout(layout, obstacle)
        if not obstacle:
            inter_node = functools.partial(_connect, ctx, scope, secret, update)
            return open_node_channel(
                ctx.core,
                options,
                scope,
                table,
                layout,
                source_rank=first,
                open_inter_node=inter_node,
                gradients=gradients,
            )
    ranks = [(first + index) % rank_info.world_size for index in range(rank_info.world_size)]
    return _connect(ctx, scope, secret, update, table, ranks)


def _say_layout(layout: NodeLayout, obstacle: str) -> None:
    """Say how sums are taken, which bits follow from, where the program has not."""
    nodes = f"{layout.nodes} nodes of {layout.local_size} ranks"
    if obstacle:
        log.info("%s, but each rank talks to the network by itself: %s", nodes, obstacle)
        return
    log.info(
        "%s: the ranks of a node add up first, and one of them talks to the network; sums are in "
        'the order of nodes (local="off": in that of ranks, with %d times the bytes on a port)',
        nodes,
        layout.local_size,
    )


def _connect(
    ctx: SessionContext,
    scope: RendezvousScope,
    secret: bytes,
    update: str,
    rows: Sequence[Mapping[str, Any]],
    ranks: Sequence[int],
) -> CoreChannel:
    """Open the core's channel between some ranks, in their order."""
    options, rank_info = ctx.options, ctx.rank_info
    # Dedicated servers are the last ranks of each channel.
    everyone = [*ranks, *range(rank_info.world_size, rank_info.ranks)]
    # Node leaders have one channel for each local rank.
    job = scope.name if len(ranks) == rank_info.world_size else f"{scope.name}/{ranks[0]}"
    settings = _channel_options(
        ctx,
        job,
        scope.generation,
        ranks.index(rank_info.rank),
        len(everyone),
        ranks_each=rank_info.world_size // len(ranks),
    )
    # A core without these options still works where they are not used.
    optional: dict[str, Any] = {} if options.servers is None else {"servers": options.servers}
    if rank_info.serving:
        optional["workers"] = len(ranks)
    rule = options.stragglers.parsed
    if rule is not None and rank_info.world_size > 1:
        optional["stragglers_json"] = rule.core_rule(options.stragglers.ahead_steps)
    plan = ctx.core.plan_json(
        json.dumps(rows),
        options.strategy.name,
        options.strategy.slice_elems,
        options.strategy.seed,
        update,
        len(everyone),
        **optional,
    )
    if ctx.announcements is not None:
        ctx.announcements.announce(
            JobAnnouncement(
                channel=scope.channel,
                ranks=everyone,
                rows=rows,
                strategy=options.strategy.name,
                slice_elems=options.strategy.slice_elems,
                seed=options.strategy.seed,
                update=update,
                settings=settings,
            )
        )
    listener, host = listen(ctx)
    return connect_channel(ctx.core, scope, listener, host, settings, plan, secret, everyone)


def _channel_options(
    ctx: SessionContext, job: str, generation: int, rank: int, world_size: int, *, ranks_each: int
) -> dict[str, Any]:
    options = ctx.options
    port = addresses.port_rate_bps(listening_hosts(ctx)[0][0])
    work_threads, lanes = options.network.thread_counts(own_processors(os.environ), port)
    # A core without this option still works where it is not used.
    going_on = options.going_on
    optional = {"going_on": going_on.core_options(ranks_each)} if going_on.on else {}
    return {
        **optional,
        "rank": rank,
        "world_size": world_size,
        "job": job,
        "generation": generation,
        "seed": options.strategy.seed,
        "frame_bytes": options.network.frame_bytes,
        "credit_bytes": options.network.frame_bytes,
        "low_water_bytes": options.network.low_water_bytes,
        "send_buffer_bytes": options.network.send_buffer_bytes,
        "pacing": options.network.pacing,
        # A secret that rank 0 has left in the store is no secret.
        "seal": options.network.seal and ctx.secret is not None,
        "receive_buffer_bytes": 0,
        "work_depth": max(2, 2 * work_threads),
        "work_threads": work_threads,
        "lanes": lanes,
        "silence_timeout_s": options.network.silence_timeout_s,
        "progress_timeout_s": options.network.progress_timeout_s,
        "connect_timeout_s": options.network.connect_timeout_s,
        "trace": options.monitoring.frame_trace or ctx.recorder is not None,
    }


def shutdown_channel(
    ctx: SessionContext,
    channel: Channel,
    watch: ModelWatch,
    scope: RendezvousScope,
    timeout_s: float,
) -> bool:
    """Close a channel in good order, and share the wait statistics of its ranks.

    Args:
        ctx: of the session.
        channel: sends what is due, and waits for the goodbye of every rank.
        watch: has this rank's wait statistics; on rank 0 collects the others'.
        scope: of this channel.
        timeout_s: for all goodbyes.

    Returns:
        Whether every rank said goodbye in time.

    Raises:
        GradlaneError: the session has failed.
    """
    # Where ranks were lost, the store may be lost, too.
    shares = not ctx.membership.lacks_ranks
    if shares:
        watch.publish_lateness(scope)
    try:
        channel.finish(timeout_s)
    except ctx.core.ChannelTimeout as error:
        log.warning("%s", with_variables(str(error.args[0])))
        return False
    except ctx.core.ChannelError as error:
        raise translate_error(ctx.core, error, "closing the session") from error
    scope.mark_closed()
    if shares and not ctx.membership.lacks_ranks:
        watch.collect_lateness(scope)
    return True


def listening_hosts(ctx: SessionContext) -> tuple[list[str], str | None]:
    """Return the addresses to listen on, and the advertised one if it differs.

    Raises:
        RendezvousError: none is found.
    """
    network = ctx.options.network
    store = None if ctx.rank_info.ranks == 1 else (ctx.store_host, ctx.store_port)
    try:
        hosts = addresses.listening_addresses(network.interface, network.advertise, store)
        return hosts, network.advertise
    except OSError as error:
        raise RendezvousError(
            f"rank {ctx.rank_info.rank} finds no address to listen on ({error}): give "
            "interface= or advertise="
        ) from error


def listen(ctx: SessionContext) -> tuple[Listener, str]:
    """Bind a socket; return it and its address for other ranks."""
    low, high = ctx.options.network.ports or (0, 0)
    hosts, advertised = listening_hosts(ctx)
    for host in hosts:
        try:
            return ctx.core.Listener(host, low, high), advertised or host
        except OSError as error:
            last = error
    raise RendezvousError(
        f"rank {ctx.rank_info.rank} cannot listen on {hosts[0]} (ports {low}-{high}, 0 is any): "
        f"{last}"
    ) from last
