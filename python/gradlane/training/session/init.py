"""Start a session from options, the environment and the store, and make its parts."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from gradlane.errors import RefusedError
from gradlane.training.arrays.registered import RegisteredArrays
from gradlane.training.checkpoints import manager as checkpointing
from gradlane.training.connection import SessionContext, listen
from gradlane.training.core import CoreModule, check_connected, load_core
from gradlane.training.log import log
from gradlane.training.monitoring.observer import make_observer
from gradlane.training.monitoring.recorder import make_recorder
from gradlane.training.node.rules import AUTO, OFF, nodes_refusal, with_local
from gradlane.training.options.codec_choice import CodecArgument, check_codecs
from gradlane.training.options.codec_options import CODECS, RAW
from gradlane.training.options.going_on import GoingOn
from gradlane.training.options.local_updates import Local
from gradlane.training.options.option_fields import option_rules, with_environment
from gradlane.training.options.option_groups import Checkpoints, Monitoring, Network, Rendezvous
from gradlane.training.options.options import GROUPS, Options
from gradlane.training.options.stragglers import Stragglers
from gradlane.training.options.strategy import LocalSums, Strategy
from gradlane.training.rendezvous.bounded_store import BoundedStore
from gradlane.training.rendezvous.deadline import SuspendAwareDeadline
from gradlane.training.rendezvous.deadlock import DeadlockDetector
from gradlane.training.rendezvous.environment import (
    RankInfo,
    ending_survivors,
    find_local_size,
    find_rank_info,
    own_processors,
    warn_of_unknown_variables,
)
from gradlane.training.rendezvous.join_requests import join_keys, ranks_in_training
from gradlane.training.rendezvous.membership import Membership
from gradlane.training.rendezvous.rendezvous import (
    open_store,
    store_address,
    store_timeout_s,
    wrap_store,
)
from gradlane.training.rendezvous.serving import JobAnnouncements, Server, ServerRegistry
from gradlane.training.rendezvous.start_failures import TELL_S, StartFailures
from gradlane.training.session import lifecycle
from gradlane.training.session.ending import SessionEnding
from gradlane.training.session.models import PreparedModels
from gradlane.training.session.parts import SessionParts
from gradlane.training.session.scopes import SessionScopes
from gradlane.training.session.session import Session
from gradlane.training.session.world import World
from gradlane.training.torch_internals import check_torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@contextlib.contextmanager
def _telling_all(rendezvous: Any, network: Any) -> Iterator[None]:
    """Tell all ranks of an error inside, where this rank has not opened the store yet.

    Args:
        rendezvous: of the options, as far as they are known; another object stands for none.
        network: the same.
    """
    try:
        yield
    except Exception as error:
        # What is wrong with the options, or the store, comes through already.
        with contextlib.suppress(Exception):
            _tell_all(rendezvous, network, error)
        raise


def _tell_all(rendezvous: Any, network: Any, error: Exception) -> None:
    given = rendezvous if isinstance(rendezvous, Rendezvous) else Rendezvous()
    given = with_environment(given, os.environ)
    rank_info = find_rank_info(
        os.environ, rank=given.rank, world_size=given.world_size, job=given.job
    )
    if given.join or rank_info.ranks == 1:
        return
    secret = None
    with contextlib.suppress(ValueError):
        network = network if isinstance(network, Network) else Network()
        secret = with_environment(network, os.environ).read_secret()
    reason = f"rank {rank_info.rank} gave up: {lifecycle.describe_exception(error)}"
    log.error("%s (in gradlane.init; telling the others)", reason)
    if given.store is None or isinstance(given.store, str):
        timeouts = (TELL_S, TELL_S)
        store = open_store(rank_info, os.environ, *timeouts, secret, given.store_address)
    else:
        store = wrap_store(given.store, rank_info, os.environ, TELL_S, secret)
    StartFailures(store, rank_info).tell(reason)
    store.close()


def _names_objects(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return the function; its refusal of an unknown keyword names the object that has it."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: Arguments.args, **given: Arguments.kwargs) -> Result:
        unknown = [name for name in given if name not in known]
        if unknown:
            lines = [_line_of(name, given) for name in unknown]
            with _telling_all(given.get("rendezvous"), given.get("network")):
                raise TypeError(f"gradlane.{function.__name__}: {'; '.join(lines)}")
        return function(*args, **given)

    return checked


def _line_of(name: str, given: Mapping[str, Any]) -> str:
    """Return what to write in place of an unknown keyword.

    Args:
        name: the keyword.
        given: all arguments of the call.
    """
    for keyword, kind in GROUPS.items():
        for one in fields(kind):  # type: ignore[arg-type]
            if name in (one.name, option_rules(kind)[one.name].name):
                other = given.get(keyword)
                kept = f"{other!r}, " if isinstance(other, str) else ""
                value = repr(given[name]) if one.repr else "..."
                line = f"{keyword}=gradlane.{kind.__name__}({kept}{one.name}={value})"
                return f"{name} is an option of {kind.__name__}; write {line}"
    codecs = [kind for kind in CODECS.values() if name in option_rules(kind)]
    if codecs:
        known = " or ".join(f"{kind.__name__}({name}={given[name]!r})" for kind in codecs)
        return f"{name} is an option of a codec; write codec=gradlane.codecs.{known}"
    names = [
        *option_rules(Options),
        *(field for kind in GROUPS.values() for field in option_rules(kind)),
    ]
    close = get_close_matches(name, names, n=1)
    meant = f"; perhaps {close[0]}" if close else ""
    return f"{name} is unknown{meant}; docs/options.md lists all options"


@_names_objects
def init(
    *,
    strategy: str | Strategy = Strategy.name,
    codec: CodecArgument = None,
    update: str | Local = Options.update,
    local: str | LocalSums = LocalSums.mode,
    stragglers: str | Stragglers = Stragglers.rule,
    going_on: bool | GoingOn = False,
    servers: int | None = Options.servers,
    workers: int | None = Options.workers,
    check_every: int | None = Options.check_every,
    rendezvous: Rendezvous | None = None,
    network: Network | None = None,
    checkpoints: Checkpoints | None = None,
    monitoring: Monitoring | None = None,
    join: bool = False,
) -> Session:
    """Open a session on this rank; every rank calls it with the same options.

    Rank, world size and job come from torchrun, Slurm or MPI where they are not given; without
    any of them the program is a world of one. Ranks meet in a c10d store: the one that is given
    (also by its address: `GRADLANE_STORE`), else torch.distributed's if it is initialized, else
    one at `MASTER_ADDR:MASTER_PORT`.

    `docs/options.md` lists all options with their ranges. Options of `rendezvous`, `network`,
    `checkpoints` and `monitoring` that the program does not give are read from environment
    variables: `GRADLANE_LANES=2`.

    Args:
        strategy: how gradients are cut, ordered and added up: `p3`, `slicing`, `wfbp`, `kvstore`,
            `deferred-pull`, `ring` or `asgd`; or a `Strategy`, which also has the scheme, the
            slice size, the seed, and whether plans may change the order of sums.
        codec: how gradients travel: None: as they are; a codec such as `codecs.Qsgd(bits=8)`, or
            its text `"qsgd:bits=8"`: in fewer bytes, at a loss, but for the smallest tensors, less
            than 1 % of all parameters; or a dictionary of patterns and codecs, such as
            `{"*.bias": None, "*": codecs.Qsgd(bits=4)}`, where the first pattern that fits a
            parameter's name counts. See `docs/low-precision.md`.
        update: `"worker"`: any optimizer, on every rank; `"server"`: SGD, Adam or AdamW, on each
            slice's owner, which keeps the state; see `docs/optimizers.md`; `Local(...)`: any
            optimizer, on every rank by itself, with rare exchanges; see
            `docs/local-updates.md`.
        local: what the ranks of a node do before anything goes to the network: `"auto"`: they add
            up where several nodes have several ranks, and the order of sums, so the last bits,
            follows from the layout; `"leader"` or `"shared"`: they do; `"off"`: each rank talks to
            the network by itself; or `LocalSums`, which also says where they add up. See
            `docs/several-accelerators.md`.
        stragglers: `"wait"`: each step waits for all ranks; `"backup=1"`: for all but one (or
            more); `"drop"`, `"drop=1.5"`: not for late ones; or `Stragglers`, which also says what
            becomes of late gradients. See `docs/stragglers.md`.
        going_on: True: when ranks are lost, the others finish the step and train on, with means
            over those that are left; or `GoingOn`, which also says how many must be left. False: a
            lost rank ends the session on all. See `docs/going-on.md`.
        servers: number of ranks, from rank 0 on, that own slices; None: all do.
        workers: number of ranks, from rank 0 on, that train; those after them only serve: they own
            all slices, see `Session.serve`; None: all train. See `docs/servers.md`.
        check_every: steps between comparisons of all parameters of all ranks, which makes ranks
            wait for each other; 0: never; None: a sample of each, after steps 1, 10 and every 100,
            which no rank waits for (with `update="worker"`), and one as the session closes.
        rendezvous: the store, rank, world size and job, in place of the launcher's.
        network: interface, addresses, ports, secret, time-outs, frames, buffers and threads.
        checkpoints: the folder of checkpoints, how often they are taken, and how many stay.
        monitoring: Prometheus, a live page, timelines, the line at the end.
        join: True: join a training of this job that runs with `going_on`, as its last rank; the
            same as `Rendezvous(join=True)`, and `GRADLANE_JOIN=1` in the environment. See
            `docs/going-on.md`.

    Returns:
        The session. It is also a context manager: an exception inside tells the other ranks.

    Raises:
        ValueError: an option or the launcher's environment makes no sense.
        RendezvousError: the store cannot be reached.
        GradlaneError: the compiled core is missing.
    """
    given = {name: value for name, value in locals().items() if name != "join"}
    with _telling_all(rendezvous, network):
        options = Options.of(environment=os.environ, **given)
    if join:
        options = replace(options, rendezvous=replace(options.rendezvous, join=True))
    warn_of_unknown_variables(os.environ)
    with _telling_all(rendezvous, network):
        check_torch()
        core = load_core()
    return open_session(core, options)


def open_session(core: CoreModule, options: Options) -> Session:
    """Find the other ranks, and open a session.

    Args:
        core: the compiled core.
        options: the session's.

    Raises:
        ValueError: the options do not go with the number of ranks, or a codec is unknown.
        RendezvousError: the store cannot be reached.
    """
    with _telling_all(options.rendezvous, options.network):
        given_local, options = options.local.mode, with_local(options)
        if options.codec != RAW:
            check_codecs(options.codec)
        rank_info = _find_rank_info(options)
        options.check_world(rank_info.world_size)
    if options.going_on.on and rank_info.rank == 0 and rank_info.ranks > 1:
        by_node = options.local.mode != OFF
        ending = ending_survivors(os.environ, rank_info.ranks, by_node=by_node)
        if ending:
            log.warning("going_on will not help: %s; see docs/launching.md", ending)
    gives_up_nodes = given_local == AUTO and options.local.mode == OFF
    if gives_up_nodes and find_local_size(os.environ) > 1 and rank_info.rank == 0:
        log.info("each rank talks to the network by itself: %s", nodes_refusal(options))
    return _assemble(core, options, rank_info.with_workers(options.workers))


def init_serving(
    *, rendezvous: Rendezvous | None = None, network: Network | None = None
) -> Session:
    """Open a session on a rank that only serves and does not know how many ranks train.

    Args:
        rendezvous: as for `init`.
        network: as for `init`; `connect_timeout_s` is the wait for rank 0's word on who trains.

    Raises:
        ValueError: an option or the launcher's environment makes no sense.
        RendezvousError: the store cannot be reached.
        GradlaneError: the compiled core is missing.
    """
    options = Options.of(rendezvous=rendezvous, network=network, environment=os.environ)
    # A rank that serves takes no checkpoints and records no timeline of its own.
    options = replace(
        options,
        checkpoints=Checkpoints(),
        monitoring=Monitoring(summary=options.monitoring.summary),
    )
    warn_of_unknown_variables(os.environ)
    core = load_core()
    rank_info = _find_rank_info(options)
    if rank_info.rank == 0:
        raise RefusedError(
            f"rank 0 of {rank_info.world_size} trains, and ranks that serve come after all that "
            "train: give --rank and --world-size, or set RANK and WORLD_SIZE"
        )
    # Who trains is for rank 0 to say.
    return _assemble(core, options, rank_info.with_workers(0))


def _find_rank_info(options: Options) -> RankInfo:
    given = options.rendezvous
    if given.join:
        # Which rank it will be is for the members to say.
        return find_rank_info(os.environ, rank=1, world_size=2, job=given.job)
    return find_rank_info(os.environ, rank=given.rank, world_size=given.world_size, job=given.job)


def _assemble(core: CoreModule, options: Options, rank_info: RankInfo) -> Session:
    """Connect to the store and make the parts of a session."""
    network = options.network
    with _telling_all(options.rendezvous, network):
        secret = network.read_secret()
    store = _open_store(options, rank_info, secret)
    failures = StartFailures(store, rank_info)
    try:
        return _assemble_with(core, options, rank_info, secret, store, failures)
    except Exception as error:
        if not options.rendezvous.join:
            failures.tell(f"rank {rank_info.rank} gave up: {lifecycle.describe_exception(error)}")
        failures.stop()
        store.close()
        raise


def _assemble_with(
    core: CoreModule,
    options: Options,
    rank_info: RankInfo,
    secret: str | None,
    store: BoundedStore,
    failures: StartFailures,
) -> Session:
    """Make the parts of a session whose store is open."""
    network = options.network
    if options.rendezvous.join:
        deadline = SuspendAwareDeadline(network.connect_timeout_s)
        count = ranks_in_training(join_keys(store, rank_info.job), deadline)
        rank_info, store = (
            replace(rank_info, rank=count, world_size=count + 1),
            store.as_rank(count),
        )
    host, port = store_address(store.store, os.environ)
    registry = (
        ServerRegistry(store, rank_info, network.connect_timeout_s, failures)
        if rank_info.serving
        else None
    )
    folder = None if rank_info.serves else options.checkpoints.folder
    recorder = None if rank_info.serves else make_recorder(options, rank_info)
    deadlocks = DeadlockDetector(store, rank_info)
    membership = Membership(rank_info)
    observer = make_observer(options, rank_info, lambda: deadlocks.wait, membership)
    checkpoints = None
    if folder is not None:
        checkpoints = checkpointing.CheckpointManager(
            Path(folder),
            options.checkpoints.every,
            options.checkpoints.keep,
            membership,
            network.connect_timeout_s,
            network.progress_timeout_s,
            secret,
            observer.add_event,
        )
    ctx = SessionContext(
        core,
        options,
        rank_info,
        host,
        port,
        secret,
        deadlocks,
        observer,
        membership,
        checkpoints,
        recorder,
        announcements=JobAnnouncements(registry) if registry and rank_info.rank == 0 else None,
    )
    server = None
    if registry and rank_info.serves:
        work_threads, lanes = network.thread_counts(own_processors(os.environ))
        server = Server(
            core,
            registry,
            store,
            secret,
            lambda rank_info: listen(replace(ctx, rank_info=rank_info)),
            work_threads=work_threads,
            lanes=lanes,
            idle_timeout_s=network.progress_timeout_s,
        )

    def look() -> None:
        """Raise if a model or the arrays have lost a rank."""
        for part in parts.all():
            if not part.has_parted:
                check_connected(core, part.channel)

    def look_for_all() -> None:
        """Raise also if a rank is left out of the connections that are open: it does not come."""
        look()
        membership.check_complete()
        failures.check()

    scopes = SessionScopes(
        store,
        rank_info,
        network.connect_timeout_s,
        ctx.deadlocks,
        look_for_all,
        None if options.rendezvous.join else network.progress_timeout_s,
        None if options.rendezvous.join else failures,
    )
    if registry is not None:
        registry.presence = scopes.presence
    world = World(ctx, scopes)
    models = PreparedModels(world, store, look, lambda reason: ending.abort(reason))
    arrays = RegisteredArrays(ctx, scopes.open)
    parts = SessionParts(models, arrays)
    ending = SessionEnding(world, store, parts, checkpoints, server, lifecycle.unwatch)
    lifecycle.watch(ending)
    return Session(world, parts, checkpoints, server, ending)


def _open_store(options: Options, rank_info: RankInfo, secret: str | None) -> BoundedStore:
    """Return the store that is given, torch.distributed's, or the launcher's."""
    given, limit_s = options.rendezvous, store_timeout_s(options)
    if given.store is not None and not isinstance(given.store, str):
        return wrap_store(given.store, rank_info, os.environ, limit_s, secret)
    timeout_s = options.network.connect_timeout_s
    return open_store(rank_info, os.environ, timeout_s, limit_s, secret, given.store_address)
