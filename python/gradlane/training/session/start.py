"""Starting a session: what the program asks for, the launcher's environment, the store."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

from torch._C._distributed_c10d import Store

from gradlane.training.core import CoreModule, load_core
from gradlane.training.monitoring.prometheus import wanted_address
from gradlane.training.monitoring.recorder import resolve_trace_path
from gradlane.training.node.rules import check_sums, with_local
from gradlane.training.options.codec_choice import RAW, CodecArgument, check_codecs, codec_rules
from gradlane.training.options.options import FACTOR_SCHEMES, Options, strategy_of
from gradlane.training.rendezvous.environment import (
    find_rank_info,
    is_enabled,
    warn_of_unknown_variables,
)
from gradlane.training.rendezvous.rendezvous import open_store, store_timeout_s, wrap_store
from gradlane.training.session.session import Session


def init(
    *,
    store: Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    strategy: str = Options.strategy,
    scheme: str | None = None,
    slice_elems: int | None = Options.slice_elems,
    seed: int = Options.seed,
    codec: CodecArgument = None,
    exact_order: bool = Options.exact_order,
    update: str = Options.update,
    local: str = Options.local,
    local_sums: str = Options.local_sums,
    stragglers: str = Options.stragglers,
    late: str = Options.late,
    ahead_steps: int = Options.ahead_steps,
    servers: int | None = Options.servers,
    workers: int | None = Options.workers,
    interface: str | None = Options.interface,
    advertise: str | None = Options.advertise,
    ports: tuple[int, int] | None = Options.ports,
    secret: str | None = None,
    job: str | None = None,
    silence_timeout_s: float = Options.silence_timeout_s,
    progress_timeout_s: float = Options.progress_timeout_s,
    connect_timeout_s: float = Options.connect_timeout_s,
    frame_bytes: int = Options.frame_bytes,
    low_water_bytes: int = Options.low_water_bytes,
    send_buffer_bytes: int = Options.send_buffer_bytes,
    pacing: bool | None = None,
    work_threads: int = Options.work_threads,
    io_threads: int = Options.io_threads,
    check_every: int | None = Options.check_every,
    trace: bool = Options.trace,
    trace_path: str | Path | None = None,
    prometheus_port: int | str | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = Options.checkpoint_every,
    checkpoint_keep: int = Options.checkpoint_keep,
    summary: bool | None = None,
    core: CoreModule | None = None,
) -> Session:
    """Open a session on this rank; every rank calls it with the same options.

    Rank, world size and job come from torchrun, Slurm or MPI where they are not given; without
    any of them the program is a world of one. Ranks meet in a c10d store: the one that is given,
    else torch.distributed's if it is initialized, else one at `MASTER_ADDR:MASTER_PORT`.

    Args:
        store: the rendezvous store.
        rank: this rank.
        world_size: number of ranks, those that only serve included.
        strategy: `p3`, `slicing`, `wfbp`, `kvstore` or `deferred-pull`, which all give the same
            results; `ring`, which gives them at two ranks and other roundings at more, see
            `docs/ring.md`; or `asgd`, asynchronous training, which does not: each rank's gradients
            are applied alone and nobody waits for anybody else; see `docs/asynchronous.md`.
        scheme: `"ps"`: gradients are added up on servers, which all ranks are; `"ring"`: round a
            ring, which makes strategy `p3` strategy `ring`; `"sfb"`: weights of linear layers and
            embeddings from factors, which every rank sends to every other; `"adam"`: from factors
            as well, which go to one rank that sends the mean to all (Project Adam's), see
            `docs/factors.md`; None: as the strategy does.
        slice_elems: elements in a slice at most; None: what suits the strategy.
        seed: places whole tensors where a strategy draws their server, and decides how codecs
            round.
        codec: how gradients travel: None: as they are; a codec such as `"qsgd:bits=8"`: in fewer
            bytes, at a loss, but for the smallest tensors, less than 1 % of all parameters; a
            dictionary of patterns and codecs, such as `{"*.bias": "raw", "*": "qsgd:bits=4"}`,
            of which the first that fits a parameter's name counts. See `docs/low-precision.md`.
        exact_order: whether a plan that is found (`prepare(plan="auto")`) keeps to sums in rank
            order, as servers make them, and so changes no bit; False: it may choose a ring or
            factors where they are faster, whose results differ in the last bits. See
            `docs/planning.md`. So with `local_sums="auto"`.
        update: `"worker"`: any optimizer, on every rank; `"server"`: SGD, Adam or AdamW, on each
            slice's owner, which keeps the state; see `docs/optimizers.md`.
        local: what the ranks of a node do: `"off"`: each talks to all others by itself; `"leader"`:
            they add up in shared memory, and the first one talks to the network for all;
            `"shared"`: each does, for its share; `"auto"`: `"leader"` where there are several
            nodes of several ranks and it goes with the other options. Sums are taken node by
            node then, another rounding; see `docs/several-accelerators.md`.
        local_sums: where they add up: `"host"`: in shared memory; `"collective"`: where their
            gradients are, in a group of torch.distributed's (NCCL on CUDA devices, Gloo in plain
            memory), so that only ranks that talk to the network copy to the host; `"auto"`: the
            latter where all gradients are on CUDA devices and no bit changes (two ranks a node),
            or `exact_order=False` lets bits change.
        stragglers: `"wait"`: each step waits for all ranks; `"backup=1"`: for all but one (or
            more); `"drop"`: until a rank is later than half of the others by more than ranks and
            steps usually differ by (`"drop=1.5"`: at 1.5 times the length of recent steps).
            The mean is over the ranks that were in time, the same on all. Put the batches through
            `Session.keep_pace` then; see `docs/stragglers.md`.
        late: what becomes of a gradient that came too late: `"discard"`, or `"carry"`: it is
            added to this rank's next one.
        ahead_steps: how many steps the others may be ahead of the slowest rank, which keeps that
            many results.
        servers: the first so many ranks own slices, the others none; None: all do.
        workers: the first so many ranks train, and those after them only serve: they own all slices
            and train nothing, see `Session.serve`; None: all train. See `docs/servers.md`.
        interface: network interface to use; else `GRADLANE_INTERFACE`; else the one that leads to
            the store.
        advertise: address or name that other ranks reach this one at, where it is another.
        ports: lowest and highest port to listen on.
        secret: what connections are keyed with; else `GRADLANE_SECRET`; else rank 0 draws one and
            leaves it in the store.
        job: name of the job; else the launcher's.
        silence_timeout_s: a rank that sends nothing for so many seconds is lost.
        progress_timeout_s: seconds to wait for ranks that are alive but do not take part.
        connect_timeout_s: seconds to wait for ranks to appear.
        frame_bytes: payload of a frame; up to three times as much on connections so fast that it
            takes 3 ms at most. A rest of up to an eighth goes with the last frame of a slice.
        low_water_bytes: bytes that may wait unsent in the kernel, a peer; more on fast connections,
            where `send_buffer_bytes` is 0.
        send_buffer_bytes: the kernel's send buffer, a peer; 0: fitted to the path while sending.
            A fixed one must cover bandwidth times delay.
        pacing: hold each connection to its part of what this rank's port was seen to carry, so that
            no queue of the network overflows; None: unless `GRADLANE_PACING` is 0.
        work_threads: threads that add gradients up; 0: the threads that drive the sockets do.
        io_threads: threads that drive the sockets, each those of its part of the peers. One carries
            some 10 Gbit/s in each direction; more help faster ports, where there are processors for
            them.
        check_every: compare all ranks' parameters every so many steps, all of them: ranks wait for
            each other there; 0: never; None: a sample of each, every 100 steps, which nobody waits
            for (with `update="worker"`).
        trace: keep a trace of frames, for `Session.take_trace`.
        trace_path: record a timeline, and write it when the session ends; else `GRADLANE_TRACE`.
            Each rank writes a file of its own, `trace.rank0.json` for `trace.json`, which
            `gradlane trace merge` joins; see `docs/timelines.md`.
        prometheus_port: answer Prometheus at this port of the loopback interface, plus the local
            rank; 0: any; or at `host:port`, such as `"0.0.0.0:9400"`; else at
            `GRADLANE_PROMETHEUS`, as either; else do not. See `docs/observability.md`.
        checkpoint: folder to write checkpoints to, shared by all ranks; None: write none. See
            `docs/checkpoints.md`.
        checkpoint_every: training steps from one checkpoint to the next.
        checkpoint_keep: how many complete checkpoints stay; older ones are removed.
        summary: whether rank 0 prints a line to stderr at the end, on what the steps have waited
            for; None: unless `GRADLANE_SUMMARY` is 0.
        core: in place of the compiled core; for tests.

    Returns:
        The session. It is also a context manager: an exception inside tells the other ranks.

    Raises:
        ValueError: an option or the launcher's environment makes no sense.
        RendezvousError: the store cannot be reached.
        GradlaneError: the compiled core is missing.
    """
    # Arguments have the names of the options; those that are kept in another form follow below.
    names = {one.name for one in fields(Options)}
    given = {name: value for name, value in locals().items() if name in names}
    options = Options(
        **{
            **given,
            "strategy": strategy_of(strategy, scheme),
            "codec": codec_rules(codec),
            "factors": scheme if scheme in FACTOR_SCHEMES else "",
            "trace_path": resolve_trace_path(trace_path),
            "prometheus": wanted_address(prometheus_port, os.environ),
            "checkpoint": None if checkpoint is None else Path(checkpoint),
            "summary": is_enabled(summary, os.environ, "GRADLANE_SUMMARY"),
            "pacing": is_enabled(pacing, os.environ, "GRADLANE_PACING"),
        }
    )
    warn_of_unknown_variables(os.environ)
    check_sums(options)
    options = with_local(options)
    core = core if core is not None else load_core()
    if options.codec != RAW:
        check_codecs(options.codec)
    place = find_rank_info(os.environ, rank=rank, world_size=world_size, job=job)
    options.check_world(place.world_size)
    place = place.with_workers(options.workers)
    bounded = (
        open_store(place, os.environ, connect_timeout_s, store_timeout_s(options))
        if store is None
        else wrap_store(store, place, os.environ, store_timeout_s(options))
    )
    return Session(core, options, place, bounded, secret or os.environ.get("GRADLANE_SECRET"))


def init_serving(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    job: str | None = None,
    interface: str | None = None,
    advertise: str | None = None,
    ports: tuple[int, int] | None = Options.ports,
    work_threads: int = Options.work_threads,
    io_threads: int = Options.io_threads,
    connect_timeout_s: float = Options.connect_timeout_s,
) -> Session:
    """Open a session on a rank that only serves and does not know how many ranks train.

    Args:
        rank: as for `init`.
        world_size: as for `init`: ranks that train and ranks that serve.
        job: as for `init`.
        interface: as for `init`.
        advertise: as for `init`.
        ports: as for `init`.
        work_threads: as for `init`.
        io_threads: as for `init`.
        connect_timeout_s: seconds to wait for rank 0's word on who trains.

    Raises:
        ValueError: an option or the launcher's environment makes no sense.
        RendezvousError: the store cannot be reached.
        GradlaneError: the compiled core is missing.
    """
    options = Options(
        interface=interface,
        advertise=advertise,
        ports=ports,
        work_threads=work_threads,
        io_threads=io_threads,
        connect_timeout_s=connect_timeout_s,
        summary=is_enabled(None, os.environ, "GRADLANE_SUMMARY"),
    )
    warn_of_unknown_variables(os.environ)
    core = load_core()
    place = find_rank_info(os.environ, rank=rank, world_size=world_size, job=job)
    if place.rank == 0:
        raise ValueError(
            f"rank 0 of {place.world_size} trains, and ranks that serve come after all that train: "
            "give --rank and --world-size, or set RANK and WORLD_SIZE"
        )
    # Who trains is for rank 0 to say.
    place = place.with_workers(0)
    store = open_store(place, os.environ, connect_timeout_s, store_timeout_s(options))
    return Session(core, options, place, store, os.environ.get("GRADLANE_SECRET"))
