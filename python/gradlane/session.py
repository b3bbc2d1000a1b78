"""Sessions: how a training program gets its ranks connected and its model hooked.

The loop stays the user's own::

    session = gradlane.init()
    model, optimizer = session.prepare(model, optimizer)
    for x, y in loader:
        loss_fn(model(x), y).backward()     # gradients leave as soon as they are ready
        optimizer.step()                    # returns at once
        optimizer.zero_grad()
    session.close()

`optimizer.step()` records the hyper-parameters of the moment; each parameter is updated when its
averaged gradient has arrived, at the latest when something reads it. References to parameters that
the program already holds (such as a list made before `step()`) are not guarded: call
`session.synchronize()` before reading through them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from torch._C._distributed_c10d import Store
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gradlane import lifecycle
from gradlane.buffers import MODES
from gradlane.codec_choice import RAW, CodecArgument, CodecChoice, check_codecs, codec_rules
from gradlane.connection import Surroundings
from gradlane.core import CoreModule, load_core
from gradlane.environment import Place, find_place
from gradlane.errors import GradlaneError, SessionClosed
from gradlane.join import Join
from gradlane.optimizers import steps_per_parameter
from gradlane.options import Options
from gradlane.planner.plan import Plan
from gradlane.planner.sharing import PlanArgument, agree_on_plan
from gradlane.prepared import Prepared, describe
from gradlane.rendezvous import Meeting, open_store, store_address
from gradlane.staleness import Tally
from gradlane.standstill import Standstill
from gradlane.timeline.recorder import Recorder

if TYPE_CHECKING:
    from gradlane.planner.learning import Learning
    from gradlane.planner.links import LinkReport

ModelType = TypeVar("ModelType", bound=nn.Module)
OptimizerType = TypeVar("OptimizerType", bound=Optimizer)

_CLOSE_TIMEOUT_S = 60.0
_STATE_VERSION = 1
_channels: dict[tuple[str, int, int], int] = {}
"""Channels made so far by (job, restart, rank): ranks that make the same calls count the same."""


def init(
    *,
    store: Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    strategy: str = Options.strategy,
    slice_elems: int | None = Options.slice_elems,
    seed: int = Options.seed,
    codec: CodecArgument = None,
    update: str = Options.update,
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
    work_threads: int = Options.work_threads,
    check_every: int = Options.check_every,
    trace: bool = Options.trace,
    trace_path: str | Path | None = None,
    core: CoreModule | None = None,
) -> Session:
    """Open a session on this rank; every rank calls it with the same options.

    Rank, world size and job come from torchrun, Slurm or MPI where they are not given; without
    any of them the program is a world of one. Ranks meet in a c10d store: the one that is given,
    else torch.distributed's if it is initialized, else one at `MASTER_ADDR:MASTER_PORT`.

    Args:
        store: the rendezvous store.
        rank: this rank.
        world_size: number of ranks.
        strategy: `p3`, `slicing`, `wfbp`, `kvstore` or `deferred-pull`, which all give the same
            results; or `asgd`, asynchronous training, which does not: each rank's gradients are
            applied alone and nobody waits for anybody else; see `docs/asynchronous.md`.
        slice_elems: elements in a slice at most; None: what suits the strategy.
        seed: places whole tensors where a strategy draws their server, and decides how codecs
            round.
        codec: how gradients travel: None: as they are; a codec such as `"qsgd:bits=8"`: in fewer
            bytes, at a loss, but for the smallest tensors, less than 1 % of all parameters; a
            dictionary of patterns and codecs, such as `{"*.bias": "raw", "*": "qsgd:bits=4"}`,
            of which the first that fits a parameter's name counts. See `docs/low-precision.md`.
        update: `"worker"`: any optimizer, on every rank; `"server"`: SGD, Adam or AdamW, on each
            slice's owner, which keeps the state; see `docs/optimizers.md`.
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
        frame_bytes: largest payload of a frame.
        low_water_bytes: bytes that may wait unsent in the kernel, a peer.
        send_buffer_bytes: the kernel's send buffer, a peer; 0: fitted to the path while sending.
            A fixed one must cover bandwidth times delay.
        work_threads: threads that add gradients up; 0: the thread that drives the sockets does.
        check_every: compare all ranks' parameters every so many steps; 0: never.
        trace: keep a trace of frames, for `Session.take_trace`.
        trace_path: record a timeline, and write it when the session ends; else `GRADLANE_TRACE`.
            Each rank writes a file of its own, `trace.rank0.json` for `trace.json`, which
            `gradlane trace merge` joins; see `docs/timelines.md`.
        core: in place of the compiled core; for tests.

    Returns:
        The session. It is also a context manager: an exception inside tells the other ranks.

    Raises:
        ValueError: an option or the launcher's environment makes no sense.
        RendezvousError: the store cannot be reached.
        GradlaneError: the compiled core is missing.
    """
    options = Options(
        strategy=strategy,
        slice_elems=slice_elems,
        seed=seed,
        codec=codec_rules(codec),
        update=update,
        interface=interface,
        advertise=advertise,
        ports=ports,
        silence_timeout_s=silence_timeout_s,
        progress_timeout_s=progress_timeout_s,
        connect_timeout_s=connect_timeout_s,
        frame_bytes=frame_bytes,
        low_water_bytes=low_water_bytes,
        send_buffer_bytes=send_buffer_bytes,
        work_threads=work_threads,
        check_every=check_every,
        trace=trace,
        trace_path=_trace_path(trace_path),
    )
    core = core if core is not None else load_core()
    if options.codec != RAW:
        check_codecs(options.codec)
    place = find_place(os.environ, rank=rank, world_size=world_size, job=job)
    if store is None:
        store = open_store(place, os.environ, connect_timeout_s)
    return Session(core, options, place, store, secret or os.environ.get("GRADLANE_SECRET"))


class Session:
    """A rank's part in a training job; made by `init`."""

    def __init__(
        self, core: CoreModule, options: Options, place: Place, store: Store, secret: str | None
    ) -> None:
        """Open a session; use `init` instead."""
        host, port = store_address(store, os.environ)
        self._recorder = _make_recorder(options, place)
        self._standstill = Standstill(store, place)
        self._around = Surroundings(
            core, options, place, host, port, secret, self._standstill, self._recorder
        )
        self._store = store
        self._prepared: list[Prepared] = []
        self._learnings: dict[int, Learning] = {}
        self._plan: Plan | None = None
        self._ended: str | None = None
        lifecycle.watch(self)

    @property
    def rank(self) -> int:
        """This rank."""
        return self._around.place.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._around.place.world_size

    def prepare(
        self,
        model: ModelType,
        optimizer: OptimizerType,
        *,
        defer: bool | None = None,
        buffers: str = "broadcast",
        plan: PlanArgument = None,
    ) -> tuple[ModelType, OptimizerType]:
        """Connect a model and its optimizer to all ranks; a collective call.

        Afterwards every rank has rank 0's parameters and buffers. In each step a parameter's
        gradient is the mean of what all ranks have in `.grad`, summed in rank order; none counts as
        zeros, and none on any rank stays none. The optimizer must hold exactly the trained
        parameters. Its state is not sent: load checkpoints on every rank, before or after.

        Between `backward()` and `optimizer.step()`, `.grad` is None or this rank's own, except that
        `model.parameters()` and `optimizer.param_groups` wait for the averaged gradients and put
        them there, so that `torch.nn.utils.clip_grad_norm_(model.parameters(), ...)` and
        `GradScaler` are right; the update then waits for all gradients. After `step()` whatever
        reads a parameter waits for its update.

        A model may get several gradients in a step, from several losses or backward calls: gradlane
        learns how many come and sends their sum with the last. In the first step everything is
        sent at `step()`. Where the number grows later, use `no_sync`.

        Call it again, on all ranks between two steps, when parameters are frozen, unfrozen, added
        or removed: it connects the model anew.

        Args:
            model: on CPU or CUDA; parameters f32, f16, bf16, f64 or complex. Frozen parameters are
                sent once, as they are. Sparse gradients are made dense.
            optimizer: any of `torch.optim` except LBFGS and SparseAdam; others step whole, see
                `defer`. With `update="server"` its `state_dict()` and `load_state_dict()` are
                collective calls, too.
            defer: True: update parameters as their gradients arrive, which asks for an optimizer
                that treats each parameter by itself; False: `step()` waits for all gradients and
                updates there; None: True for optimizers that are known to allow it (those of
                `torch.optim`, and classes with an attribute `steps_per_parameter = True`).
            buffers: what happens to buffers, such as the statistics of batch norm, in each step:
                `"broadcast"`: every rank gets rank 0's; `"average"`: floating-point ones are
                averaged over the ranks, others are rank 0's; `"local"`: nothing. With
                `update="server"` nothing happens to them either.
            plan: settings for this model in place of the session's: a plan or the path of a plan
                file, which only rank 0 needs to have; `"auto"`: measure the links, record some
                steps of this training, simulate, and switch to what is fastest, if anything is
                (see `docs/planning.md`); None: the session's. Results are the same bits.

        Returns:
            The same two objects.

        Raises:
            UsageError: the model was prepared before and is in the middle of a step.
            ValueError: the model or the optimizer cannot take part; the message names the tensor.
            RanksDiffer: the ranks' models, options or plans differ; raised on every rank.
            RendezvousError: a rank did not appear or cannot be reached.
        """
        self._check_open()
        if buffers not in MODES:
            raise ValueError(f"unknown buffers {buffers!r}; known are {', '.join(MODES)}")
        before, unable = None, None
        try:
            before = self._prepared_before(model)
        except GradlaneError as error:
            unable = error
        if plan is not None and self._around.options.is_asynchronous:
            raise ValueError(
                'plan= with strategy="asgd": plans choose among settings that give the same '
                "results; asynchronous training is none of them"
            )
        agreed = agree_on_plan(self._meet(), plan, _trained_sizes(model), unable)
        residuals = None
        if before is not None:
            try:
                residuals = before.residuals.state_dict()
                self._part_with(before)
            except GradlaneError as error:
                # The others are on their way to the next meeting, and would wait there.
                self._meet().refuse(str(error))
                raise
        around = self._around
        if agreed.plan is not None:
            options = agreed.plan.settings.applied_to(around.options)
            around = replace(around, options=options)
            self._plan = agreed.plan
        learns = agreed.learns and self.world_size > 1
        links = self.probe(directions=False) if learns else None
        deferred = steps_per_parameter(optimizer) if defer is None else defer
        prepared = Prepared(around, self._meet, model, optimizer, deferred, buffers)
        if residuals is not None:
            prepared.residuals.load_state_dict(prepared.residuals.fitting(residuals))
        self._prepared.append(prepared)
        if links is not None:
            self._learn(prepared, links)
        if defer is None and not deferred and self._around.options.update == "worker":
            warnings.warn(
                f"{type(optimizer).__name__} is not known to treat each parameter by itself, "
                "so step() waits for all gradients; pass defer=True to prepare(), or give the "
                "class an attribute steps_per_parameter = True, if it does",
                UserWarning,
                stacklevel=2,
            )
        return model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return what the session itself keeps for training; a collective call between steps.

        That is what codecs with error feedback have lost so far (see `docs/low-precision.md`).
        Without such codecs there is nothing in it, and nothing is sent. A checkpoint holds it
        beside the model's and the optimizer's. Every rank gets one of its own; that of any one
        rank is enough to go on with a world of any size.

        Raises:
            UsageError: a model is in the middle of a step.
            GradlaneError: the session has failed or is closed.
        """
        self._check_open()
        for prepared in self._prepared:
            prepared.check_between_steps()
        return {
            "version": _STATE_VERSION,
            "models": [prepared.residuals.state_dict() for prepared in self._prepared],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` returned; a collective call between steps.

        Where every rank loads what it saved itself in a world of the same size, training goes on
        as it would have. Otherwise all ranks share out what was kept.

        Args:
            state: what `state_dict` returned; models are matched in the order of `prepare`.

        Raises:
            ValueError: it is no such state, or of other models.
            UsageError: a model is in the middle of a step.
            GradlaneError: the session has failed or is closed.
        """
        self._check_open()
        for prepared in self._prepared:
            prepared.check_between_steps()
        version, models = state.get("version"), state.get("models")
        if version != _STATE_VERSION or not isinstance(models, list):
            raise ValueError(
                f"this is no state of a session (version {version!r}, expected {_STATE_VERSION}): "
                "load what session.state_dict() returned"
            )
        if len(models) != len(self._prepared):
            raise ValueError(
                f"the state is of {len(models)} models, and {len(self._prepared)} are prepared: "
                "call prepare() for all of them first"
            )
        for prepared, one in zip(self._prepared, models, strict=True):
            prepared.residuals.load_state_dict(one)

    @property
    def codecs(self) -> list[CodecChoice]:
        """Which codec each trained tensor of the models travels in, and why."""
        return [choice for prepared in self._prepared for choice in prepared.codecs]

    @property
    def plan(self) -> Plan | None:
        """The plan in force: the last one that was given, or found; None before."""
        return self._plan

    def probe(
        self,
        *,
        window_s: float = 1.0,
        directions: bool = True,
        on_phase: Callable[[str], None] = lambda text: None,
    ) -> LinkReport:
        """Measure bandwidth and latency between all ranks; a collective call.

        Args:
            window_s: seconds that each stream is measured for.
            directions: whether ports are also measured in one direction at a time.
            on_phase: told what is measured next.

        Returns:
            The same report on every rank.

        Raises:
            ValueError: the window is not 0.05 to 60 seconds.
            RendezvousError: two ranks cannot reach each other; raised on every rank.
        """
        from gradlane.planner.links import probe

        self._check_open()
        return probe(
            self._around,
            self._meet(),
            window_s=window_s,
            directions=directions,
            on_phase=on_phase,
        )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up in `.grad` without sending them, for accumulation over batches.

        As with DDP: run all backward calls of a step but the last inside, and the last outside,
        which sends the sums. Where all were inside, `optimizer.step()` sends them. It holds for all
        models of the session. What is sent are sums over batches: divide each loss by their number.
        """
        self._check_open()
        before = [(prepared.steps, prepared.steps.accumulates) for prepared in self._prepared]
        for steps, _ in before:
            steps.accumulates = True
        try:
            yield
        finally:
            for steps, accumulates in before:
                steps.accumulates = accumulates

    def join(self, *, throw_on_early_termination: bool = False) -> Join:
        """Return a context for loops over uneven data; all ranks run theirs inside.

        A rank that leaves the block goes on taking part in the others' steps without gradients,
        which count as zeros: means still divide by the number of all ranks, as with DDP. When the
        last rank leaves, all get its parameters, buffers, optimizer state and hyper-parameters.
        Nothing is sent for that where the data was even. Schedulers are the user's own: those that
        count batches must count alike, for example by epochs.

        Args:
            throw_on_early_termination: raise `UnevenData` on all ranks as soon as one has run out,
                in the same step, which is not taken.

        Raises:
            UsageError: on entry: with `update="server"`, or inside another one; at the end: a
                backward without `optimizer.step()` or `zero_grad()`.
        """
        self._check_open()
        return Join(list(self._prepared), self.rank, throw_on_early_termination)

    def synchronize(self) -> None:
        """Wait until every parameter of every model has its update.

        With `strategy="asgd"` it is a collective call: it waits until all ranks have made it, and
        then gives all of them the servers' parameters, so that they are the same everywhere.

        Raises:
            GradlaneError: the session has failed or was closed.
        """
        self._check_open()
        for prepared in self._prepared:
            prepared.synchronize()

    def staleness(self) -> list[dict[str, Any]]:
        """Return how stale gradients were, with `strategy="asgd"`; empty with all others.

        The staleness of a gradient is the number of updates that its slice had had since this
        gradient's rank received it. Every rank counts what it applied as an owner of slices, which
        is an even part of the whole.

        Returns:
            For each rank whose gradients were applied here: `rank`, `pushes`, `mean`, `max` and
            `histogram` (pushes by staleness from 0 on; entry 64 counts that and all above).
        """
        total: dict[int, Tally] = {}
        for prepared in self._prepared:
            for rank, reading in enumerate(prepared.staleness()):
                total.setdefault(rank, Tally()).add(reading)
        return [{"rank": rank, **tally.to_json()} for rank, tally in sorted(total.items())]

    def metrics(self) -> dict[str, Any]:
        """Return counters since the start, such as `tx_bytes`, `rx_bytes` and `wait_s`.

        Numbers are sums over all prepared models; `channels` has them one by one.
        """
        channels = [describe(prepared) for prepared in self._prepared]
        total: dict[str, Any] = {"tx_bytes": 0, "rx_bytes": 0}
        for counters in channels:
            for name, value in counters.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    total[name] = total.get(name, 0) + value
        total["channels"] = channels
        return total

    def take_trace(self) -> list[tuple[int, str, int, int, int, int, int, int]]:
        """Return and forget the trace of frames, one list for all models.

        Returns:
            Rows (time in ns, "tx" or "rx", kind, peer, step, tensor, slice, priority), empty
            unless the session was opened with `trace=True`.
        """
        return [row for prepared in self._prepared for row in prepared.channel.take_trace()]

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Bring the last step to an end, unhook the models and part from the other ranks.

        Gradients without an `optimizer.step()` are forgotten. Closing twice is allowed.

        Args:
            timeout_s: how long to wait for the other ranks to close, in seconds.

        Raises:
            GradlaneError: the session has failed, or the last step could not be finished.
        """
        if self._ended is not None:
            return
        self._ended = "closed"
        lifecycle.unwatch(self)
        self._stop_learning()
        errors: list[GradlaneError] = []
        for prepared in self._prepared:
            try:
                prepared.close(timeout_s)
            except GradlaneError as error:
                errors.append(error)
        self._standstill.close()
        self._write_timeline()
        if errors:
            raise errors[0]

    def abort(self, reason: str) -> None:
        """Give up at once and tell every other rank why; their next call raises it.

        Args:
            reason: one line.
        """
        if self._ended is not None:
            return
        self._ended = f"given up: {reason}"
        lifecycle.unwatch(self)
        self._stop_learning()
        for prepared in self._prepared:
            prepared.abort(reason)
        self._standstill.close()
        self._write_timeline()

    def __enter__(self) -> Session:
        """Return the session itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close, or, if an exception comes through, give up with its text."""
        if error is None:
            self.close()
        else:
            self.abort(lifecycle.describe_exception(error))

    def close_at_exit(self) -> None:
        """Close while the interpreter ends: what goes wrong is printed, not raised."""
        try:
            if any(prepared.in_step for prepared in self._prepared):
                self.abort("the program ended between backward() and optimizer.step()")
            else:
                self.close()
        except GradlaneError as error:
            print(f"gradlane: rank {self.rank}: {error}", file=sys.stderr)

    def forget_in_child(self) -> None:
        """Drop the session in a forked child, where it cannot be used."""
        self._ended = "left behind in the parent of this forked child"
        for prepared in self._prepared:
            prepared.forget_in_child()

    def _meet(self) -> Meeting:
        """Open the next place for ranks to meet; all ranks open the same ones in the same order."""
        place = self._around.place
        key = (place.job, place.restart, place.rank)
        number = _channels.get(key, 0)
        _channels[key] = number + 1
        return Meeting(self._store, place, number, self._around.options.connect_timeout_s)

    def _stop_learning(self) -> None:
        for learning in self._learnings.values():
            learning.stop()
        self._learnings.clear()

    def _prepared_before(self, model: nn.Module) -> Prepared | None:
        """Find a model that is to be prepared again; refuse what is in another one's hands."""
        again = next((one for one in self._prepared if one.model is model), None)
        for other in self._prepared:
            if other is not again and other.shares_with(model):
                raise ValueError(
                    "this model and one that is prepared already have trained parameters in "
                    "common: prepare one module that holds both, such as nn.ModuleList"
                )
        if again is not None:
            again.check_between_steps()
        return again

    def _part_with(self, prepared: Prepared) -> None:
        learning = self._learnings.pop(id(prepared), None)
        if learning is not None:
            learning.stop()
        prepared.close(_CLOSE_TIMEOUT_S)
        self._prepared.remove(prepared)

    def _learn(self, prepared: Prepared, links: LinkReport) -> None:
        """Have a model's plan found in its first steps."""
        from gradlane.planner.learning import Learning

        learning = Learning(
            prepared,
            links,
            self._around.options,
            self._meet,
            lambda plan: self._switch(prepared, plan),
        )
        self._learnings[id(prepared)] = learning
        prepared.installation.after_step = learning.after_step

    def _switch(self, prepared: Prepared, plan: Plan) -> None:
        """Go on under a plan; a collective call between two steps."""
        self._learnings.pop(id(prepared), None)
        self._plan = plan
        options = plan.settings.applied_to(self._around.options)
        if options == self._around.options:
            return
        position = self._prepared.index(prepared)
        try:
            self._prepared[position] = prepared.reconnected(options, _CLOSE_TIMEOUT_S)
        except GradlaneError as error:
            self.abort(f"the plan could not be put into force: {error}")
            raise

    def _write_timeline(self) -> None:
        if self._recorder is not None:
            self._recorder.write()

    def _check_open(self) -> None:
        if self._ended is not None:
            raise SessionClosed(f"the session was {self._ended}; open a new one with gradlane.init")


def _trained_sizes(model: nn.Module) -> dict[str, int]:
    """Numbers of elements that are averaged, by name; complex numbers are pairs."""
    return {
        name: parameter.numel() * (2 if parameter.is_complex() else 1)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not is_lazy(parameter) and parameter.numel() > 0
    }


def _trace_path(path: str | Path | None) -> Path | None:
    text = path if path is not None else os.environ.get("GRADLANE_TRACE")
    return Path(text) if text else None


def _make_recorder(options: Options, place: Place) -> Recorder | None:
    if options.trace_path is None:
        return None
    facts = {
        "strategy": options.strategy,
        "workers": place.world_size,
        "job": place.job,
        "slice_elems": options.slice_elems,
        "update": options.update,
    }
    return Recorder(options.trace_path, place.rank, facts)
