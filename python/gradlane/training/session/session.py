"""The session: connects a training program to its ranks, and hooks its models.

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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from gradlane.errors import RefusedError, UsageError
from gradlane.training.checkpoints.manager import CheckpointManager
from gradlane.training.connection import SessionContext
from gradlane.training.local_updates.state import LOCAL
from gradlane.training.log import log
from gradlane.training.model.joining import Stateful
from gradlane.training.model.prepared import CLOSE_TIMEOUT_S
from gradlane.training.model.uneven_data import Join
from gradlane.training.monitoring.metrics import Metrics
from gradlane.training.monitoring.tensorboard import ScalarFunction, ScalarWriter
from gradlane.training.options.compatibility import Feature
from gradlane.training.plans.agreement import PlanArgument
from gradlane.training.rendezvous.membership import MembershipChange
from gradlane.training.rendezvous.serving import ServedStats, Server
from gradlane.training.session import lifecycle
from gradlane.training.session.accelerators import warn_of_accelerator
from gradlane.training.session.array_calls import ArrayCalls
from gradlane.training.session.ending import SessionEnding
from gradlane.training.session.explanation import ExplainedModel, Explanation
from gradlane.training.session.models import ModelType, OptimizerType
from gradlane.training.session.monitoring_calls import MonitoringCalls
from gradlane.training.session.pace import BatchType, at_pace
from gradlane.training.session.parts import SessionParts
from gradlane.training.session.planning_calls import PlanningCalls
from gradlane.training.session.world import World
from gradlane.training.sharded.fsdp import is_sharded

_STATE_VERSION = 1
_TOLD_EVERY_S = 0.5
"""Seconds between two reports of a rank that serves."""


_SAMPLES_MAX = 1 << 46
"""A rank's status holds numbers below 2^48."""


class Session:
    """A rank's part in a training job; made by `gradlane.init`.

    Models are averaged by `prepare`; arrays of any framework by the calls of `arrays`.
    """

    def __init__(
        self,
        world: World,
        parts: SessionParts,
        checkpoints: CheckpointManager | None,
        server: Server | None,
        ending: SessionEnding,
    ) -> None:
        """Open a session of these parts; use `gradlane.init` instead.

        Args:
            world: the ranks that this one is connected to.
            parts: the models and arrays.
            checkpoints: takes checkpoints, or None.
            server: serves, on a rank that only serves, or None.
            ending: ends all of them.
        """
        self._world = world
        self._parts = parts
        self._models = models = parts.models
        self.has_accelerator = False
        """Whether a Hugging Face accelerator leaves models to this session."""
        self._checkpoints = checkpoints
        self._server = server
        self._ending = ending
        self.arrays = ArrayCalls(parts.arrays, models, ending)
        """Means of arrays of any framework."""
        self.planning = PlanningCalls(models, world, ending)
        """The plan in force, and what plans are made from."""
        self.monitoring = MonitoringCalls(parts, world)
        """How tensors travel, and where numbers are served."""

    @property
    def _ctx(self) -> SessionContext:
        return self._world.ctx

    def __repr__(self) -> str:
        models = f", models={len(self.models)}" if self.models else ""
        strategy = self._ctx.options.strategy.name
        state = self._ending.how or "open"
        role = ", serves" if self.serves else ""
        return (
            f"<Session rank {self.rank} of {self.world_size + self._ctx.rank_info.serving}{role}, "
            f"strategy={strategy!r}"
            f"{models}, {state}>"
        )

    @property
    def rank(self) -> int:
        """This rank; after ranks were lost or have joined, its place among the members."""
        return self._ctx.membership.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that train: all, unless `workers` is given, ranks were lost or joined."""
        return self._ctx.membership.world_size

    @property
    def step(self) -> int:
        """Training steps of the first model that have ended; 0 before there is one."""
        return self._parts.step

    @property
    def goes_on(self) -> bool:
        """Whether training goes on when ranks are lost: `gradlane.init(going_on=True)`."""
        return self._ctx.options.going_on.on

    def on_membership(self, callback: Callable[[MembershipChange], object]) -> None:
        """Call a function when training has gone on without lost ranks, or a rank has joined.

        It is called inside `optimizer.step()`, before that returns, on the thread that steps: on
        all members at the end of the same step; on a rank that joins, inside `prepare`. From then
        on `rank` and `world_size` are those of the change. The step has ended, and its update may
        be pending. The callback may read the model and call `gather_integers`; what it raises
        comes out of `optimizer.step()`. With local updates `synchronize()` calls it, too, and of
        members that change in `close()` it is not told. See `docs/going-on.md`.

        Args:
            callback: a function of the change. Several are called in the order of registration.

        Raises:
            SessionClosedError: the session has ended.
        """
        self._ending.check_open()
        self._ctx.membership.listeners.append(callback)

    def gather_integers(self, values: list[int]) -> list[list[int]]:
        """Return integers of every member, by rank; a collective call between two steps.

        They travel on the connections of the first model, with `gradlane.init(going_on=True)`.
        If members are lost meanwhile, the callbacks of `on_membership` are called before it
        returns, and the result is that of the new members.

        Args:
            values: this rank's, any number of them.

        Raises:
            UsageError: the session is without `going_on`, no model is prepared, or it is in a step.
            SessionFailedError: another rank takes a step instead.
            GradlaneError: the session has failed or is closed.
        """
        self._ending.check_open()
        return self._models.gather_integers(values)

    def share_state(self, **objects: Stateful) -> None:
        """Name objects whose state a rank that joins takes over; see `docs/going-on.md`.

        Parameters, buffers and the optimizer's state are taken over anyway. Learning rate
        schedulers, a `GradScaler` and what else the program keeps alike on all ranks are shared::

            session.share_state(scheduler=scheduler, scaler=scaler)     # before prepare()

        Their `state_dict()` is handed over as the others begin their next step.

        Args:
            objects: with `state_dict` and `load_state_dict`, by name; the same names on all ranks.

        Raises:
            TypeError: an object lacks one of the two.
            SessionClosedError: the session has ended.
        """
        self._ending.check_open()
        for name, one in objects.items():
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                raise TypeError(
                    f"share_state({name}=...) was given a {type(one).__name__}, which has no "
                    "state_dict() and load_state_dict()"
                )
        self._models.joins.shared.update(objects)

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
        gradient is the mean of the ranks' `.grad`, summed in rank order. A missing gradient counts
        as zeros; a gradient that is missing on all ranks stays None. The optimizer must hold
        exactly the trained parameters. Its state is not sent: load checkpoints on every rank,
        before or after.

        After `backward()`, `.grad` is the averaged gradient. Any access to one, by any reference,
        waits for all of them, so that `torch.nn.utils.clip_grad_norm_` is right; the update then
        waits, too (the session's `clip_grad_norm_` and `GradScaler` wait for the norm alone).
        After `step()` any access to a parameter waits for its update,
        and `.grad` stays until `zero_grad()`.

        A model may get several gradients in a step, from several losses or backward calls: gradlane
        learns how many come and sends their sum with the last. In the first step everything is
        sent at `step()`. Where the number grows later, use `no_sync`.

        A model that `fully_shard` has sharded within the node is averaged shard by shard between
        the nodes; its gradients are the means when `backward()` returns (`docs/sharded.md`).

        Call it again, on all ranks between two steps, when parameters are frozen, unfrozen, added
        or removed: it connects the model anew.

        Args:
            model: on CPU or CUDA; parameters f32, f16, bf16, f64 or complex. Frozen parameters are
                sent once, as they are. Gradients of sparse embeddings travel as rows (see
                `docs/sparse.md`), other sparse ones dense.
            optimizer: any of `torch.optim`; others step whole, see `defer`. With
                `update="server"` its `state_dict()` and `load_state_dict()` are collective calls,
                too. Several that step a part of the model each come as a list, or in an object that
                holds them (see `docs/optimizers.md`).
            defer: True: update parameters as their gradients arrive, which asks for an optimizer
                that treats each parameter by itself; False: `step()` waits for all gradients and
                updates there; None: True for optimizers that are known to allow it (those of
                `torch.optim`, and classes with an attribute `steps_per_parameter = True`).
            buffers: the treatment of buffers, such as the statistics of batch norm, in each step:
                `"broadcast"`: every rank gets rank 0's; `"average"`: floating-point ones are
                averaged over the ranks, others are rank 0's; `"local"`: none. A step that goes on
                without rank 0 has no new ones of it. With `strategy="asgd"` buffers stay each
                rank's own. A program that changes buffers between steps changes them alike on all
                ranks.
            plan: settings for this model in place of the session's: a plan or the path of a plan
                file, which only rank 0 needs to have; `"auto"`: measure the links, record some
                steps of this training, simulate, and switch to faster settings, if there are any
                (see `docs/planning.md`); `"poseidon"`: record some steps, and from then on send
                factors of the linear layers where they are fewer numbers (see `docs/factors.md`);
                None: the session's. Results are the same bits, but of tensors with another scheme.

        Returns:
            The same two objects.

        Raises:
            UsageError: no model or no optimizer was given, or they cannot be used together; or the
                model was prepared before and is in the middle of a step.
            ValueError: the model or the optimizer cannot take part; the message names the tensor.
            RanksDifferError: the ranks' models, options or plans differ; raised on every rank.
            RendezvousError: a rank did not appear or cannot be reached.
        """
        self._ending.check_open()
        if not self.has_accelerator:
            warn_of_accelerator()
        return self._models.prepare(model, optimizer, defer=defer, buffers=buffers, plan=plan)

    @property
    def models(self) -> list[nn.Module]:
        """The prepared models, in the order of `prepare`; sharded ones come last."""
        return [part.model for part in self._parts.connected_models()]

    def explain(self) -> Explanation:
        """Return what each step passes: the stages in force, in order, each with its reason.

        `print(session.explain())` shows a table, `to_json()` returns plain values. A stage is one
        thing that a step does beside sending gradients and applying means: weighting, clipping,
        updates on servers. No rank waits for another. See `docs/observability.md`.
        """
        return Explanation(
            tuple(
                ExplainedModel(type(part.model).__name__, part.explain())
                for part in self._parts.connected_models()
            )
        )

    def exchange(self, value: Any) -> list[Any]:
        """Exchange a small value with all ranks through the job's store; a collective call.

        Args:
            value: this rank's; JSON-serializable.

        Returns:
            The values of all ranks, in rank order, the same on every rank.

        Raises:
            TypeError: the value is not JSON-serializable.
            RendezvousError: a rank did not come.
        """
        self._ending.check_open()
        self._ctx.membership.refuse_lost("exchange()")
        return self._models.exchange(value)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up in `.grad` without sending them, for accumulation over batches.

        As with DDP: run all backward calls of a step but the last inside, and the last outside,
        which sends the sums. Where all were inside, `optimizer.step()` sends them. It holds for all
        models of the session. What is sent are sums over batches: divide each loss by their number.
        """
        self._ending.check_open()
        self._models.check_call(Feature.NO_SYNC)
        before = [
            (prepared.steps.phases, prepared.steps.phases.accumulates)
            for prepared in self._models.prepared
        ]
        for phases, _ in before:
            phases.accumulates = True
        try:
            yield
        finally:
            for phases, accumulates in before:
                phases.accumulates = accumulates

    def weight(self, samples: int, *, model: nn.Module | None = None) -> None:
        """Have the next step average over all ranks' samples in place of over ranks.

        Without it every rank counts the same, as with DDP, so that a sample in a small batch counts
        more than one in a large batch. With it the mean is ((g0 s0 + g1 s1) + ...) / (s0 + s1 +
        ...), in rank order, where g is the rank's gradient of its *mean* loss and s its samples,
        or its tokens. Call it before `backward()` in each step, on all ranks that have data.

        Args:
            samples: behind this rank's gradients of the next step, all its batches together; 0 is
                a rank that counts nothing.
            model: the prepared model; None: all of them.

        Raises:
            ValueError: a negative number, or over 2^46.
            UsageError: gradients are under way already; float16, factors, stragglers or
                `update="server"`; no such model.
            GradlaneError: the session has failed.
        """
        self._ending.check_open()
        sharded = self._models.has_sharded if model is None else is_sharded(model)
        self._models.check_call(Feature.WEIGHT, is_sharded=sharded)
        if not (isinstance(samples, int) and 0 <= samples <= _SAMPLES_MAX):
            raise RefusedError(f"weight({samples!r}): give a number of samples, 0 to 2^46")
        local = self._models.local
        if local is not None and model in (None, local.model):
            local.weigh(samples)
            return
        found = self._models.prepared
        if model is not None or not found:
            found = [self._models.find(model, "weight()")]
        for prepared in found:
            if self._ctx.rank_info.world_size > 1:
                steps = prepared.steps
                steps.stages.weighting.weigh(samples, steps.phases, steps.step)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        model: nn.Module | None = None,
    ) -> Tensor:
        """Clip a model's averaged gradients by the norm of all of them; between backward and step.

        As `torch.nn.utils.clip_grad_norm_`, which is right as well but waits for all means in each
        step. Here the owners of slices add up the squares of what they have reduced: the norm is
        known before the means are everywhere, and each mean is clipped as it arrives, during the
        next forward. The first step that is clipped still waits, and so do other norms than the
        2-norm, `local="shared"`, stragglers, factors and rows. All ranks clip alike.

        Args:
            max_norm: the largest norm that gradients keep.
            norm_type: p of the p-norm.
            error_if_nonfinite: wait for the norm, and refuse one that is infinite or NaN.
            model: the prepared model; None: the only one.

        Returns:
            The norm before clipping: of no dimensions, f32 or, with f64 gradients, f64, on the CPU.
            It waits when it is read. Exact sums of squares, rounded once: the same bits whatever
            the plan.

        Raises:
            RuntimeError: `error_if_nonfinite`, and the norm is not finite.
            UsageError: no model, or one of several, is meant; parameters are given, as torch's
                function takes them; inside `no_sync()` or `backward()`; or updates run on the
                servers, where averaged gradients stay.
            GradlaneError: the session has failed.
        """
        self._ending.check_open()
        if isinstance(max_norm, Iterable) and not isinstance(max_norm, Tensor):
            raise UsageError(
                "session.clip_grad_norm_() clips all gradients of a prepared model and takes no "
                "parameters: give the largest norm first, session.clip_grad_norm_(1.0)"
            )
        prepared = self._models.find(model, "clip_grad_norm_()")
        return prepared.steps.clipping.clip(
            float(max_norm), float(norm_type), error_if_nonfinite=error_if_nonfinite
        )

    def join(self, *, throw_on_early_termination: bool = False) -> Join:
        """Return a context for loops over uneven data; all ranks run theirs inside.

        A rank that leaves the block goes on taking part in the others' steps without gradients,
        which count as zeros: means still divide by the number of all ranks, as with DDP. When the
        last rank leaves, all get its parameters, buffers, optimizer state and hyper-parameters.
        Nothing is sent for that where the data was even. Schedulers are the user's own: those that
        count batches must count alike, for example by epochs.

        Args:
            throw_on_early_termination: raise `UnevenDataError` on all ranks as soon as one has run
                out, in the same step, which is not taken.

        Raises:
            UsageError: on entry: with `update="server"`, or inside another one; at the end: a
                backward without `optimizer.step()` or `zero_grad()`.
        """
        self._ending.check_open()
        self._models.check_call(Feature.JOIN)
        return Join(list(self._models.prepared), self.rank, throw_on_early_termination)

    def synchronize(self) -> None:
        """Wait until every parameter of every model has its update.

        With `strategy="asgd"` it is a collective call: it waits until all ranks have made it, and
        then gives all of them the servers' parameters, so that they are the same everywhere. So it
        is with `update=gradlane.Local(...)`: it ends the round on all ranks, and gives them the
        values that they then have in common.

        Raises:
            GradlaneError: the session has failed or was closed.
        """
        self._ending.check_open()
        for prepared in self._models.prepared:
            prepared.synchronize()
        if self._models.local is not None:
            self._models.local.synchronize()

    def keep_pace(
        self,
        batches: Iterable[BatchType],
        on_pass: Callable[[], object] | None = None,
    ) -> Iterator[BatchType]:
        """Yield batches at the pace of the other ranks, where steps go on without late ones.

        A rank that has fallen behind takes the results of the steps that it missed, and the batches
        that it would have had for them are left out. On all other ranks, and with
        `stragglers="wait"`, these are all batches. Each batch has to be one step, and all ranks
        have to give as many, so that all end with the same step and the same parameters. See
        `docs/stragglers.md`.

        Args:
            batches: this rank's, such as a data loader.
            on_pass: called after each step that was passed, such as `scheduler.step`, so that
                learning rates follow the steps.

        Raises:
            UsageError: not exactly one model is prepared, or its step has not ended.
            GradlaneError: the session has failed or is closed.
        """
        self._ending.check_open()
        if not self._ctx.options.stragglers.leaves_out or self._ctx.rank_info.world_size == 1:
            return iter(batches)
        return at_pace(batches, self._models.keeping_pace, on_pass)

    def state_dict(self) -> dict[str, Any]:
        """Return the training state of the session itself; a collective call between steps.

        It holds the residuals of codecs with error feedback (see `docs/low-precision.md`) and late
        gradients that are carried on (`late="carry"`): no rank is left out of this call.
        Without either there is nothing in it, and nothing is sent. A checkpoint holds it
        beside the model's and the optimizer's. Every rank gets one of its own; that of any one
        rank is enough to go on with a world of any size.

        Raises:
            UsageError: a model is in the middle of a step.
            GradlaneError: the session has failed or is closed.
        """
        self._ending.check_open()
        for prepared in self._models.prepared:
            prepared.check_between_steps()
        models = [prepared.residuals.state_dict() for prepared in self._models.prepared]
        if self._models.local is not None:
            models.append(self._models.local.state_dict())
        return {"version": _STATE_VERSION, "models": models}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`; a collective call between steps.

        Where every rank loads its own state in a world of the same size, training goes on as if it
        had not stopped. Otherwise the ranks share the state out.

        Args:
            state: the result of `state_dict`; models are matched in the order of `prepare`.

        Raises:
            ValueError: it is no such state, or of other models.
            UsageError: a model is in the middle of a step.
            GradlaneError: the session has failed or is closed.
        """
        self._ending.check_open()
        for prepared in self._models.prepared:
            prepared.check_between_steps()
        version, models = state.get("version"), state.get("models")
        if version != _STATE_VERSION or not isinstance(models, list):
            raise RefusedError(
                f"this is no state of a session (version {version!r}, expected {_STATE_VERSION}): "
                "load what session.state_dict() returned"
            )
        if len(models) != len(self.models):
            raise RefusedError(
                f"the state is of {len(models)} models, and {len(self.models)} are "
                "prepared: call prepare() for all of them first"
            )
        if self._models.local is not None:
            self._models.local.load_state_dict(models[0])
            return
        for prepared, one in zip(self._models.prepared, models, strict=True):
            if LOCAL in one:
                raise RefusedError(
                    "this is the state of a session with update=gradlane.Local(...): to go on in "
                    "exact training, load the model and the optimizer alone, as they were after "
                    "session.synchronize()"
                )
            prepared.residuals.load_state_dict(one)

    def restore(self) -> int:
        """Go on from the last complete checkpoint; a collective call after `prepare()`.

        Parameters, buffers, the optimizer's state and settings, and residuals of codecs are those
        of that step afterwards, in a world of any size. See `docs/checkpoints.md`. A rank that has
        just joined has the others' state: it alone calls, and nothing is read.

        Returns:
            The number of training steps that were taken before; 0 if there is no checkpoint.

        Raises:
            UsageError: the session takes no checkpoints, or it is too early or too late for this.
            CheckpointError: the checkpoint is damaged, of another version, or another model's.
        """
        self._ending.check_open()
        self._models.check_call(Feature.RESTORE)
        assert self._checkpoints is not None
        return self._checkpoints.restore()

    def metrics(self) -> Metrics:
        """Return the counters of this rank since the start; from any thread, also after the end.

        Bytes, queues, waits by layer, late ranks, step times: see `docs/observability.md`. All are
        dictionaries, lists and numbers. Numbers are sums over all models; `channels` has the
        core's own, one of each model.

        Raises:
            SessionClosedError: this is a forked child.
        """
        return self._ctx.observer.metrics()

    def log_to(self, writer: ScalarWriter | ScalarFunction, every: int = 10) -> None:
        """Give scalars to a logger at every n-th training step of the first model.

        A failing writer is warned of and left out; training goes on.

        Args:
            writer: a function of (values by tag, step), such as `wandb.log` or
                `mlflow.log_metrics`; a `torch.utils.tensorboard.SummaryWriter`, or an object with
                its `add_scalar`.
            every: steps between two writes.

        Raises:
            ValueError: `every` is below 1.
            TypeError: the writer is no function and has no `add_scalar`.
            SessionClosedError: the session has ended.
        """
        self._ending.check_open()
        self._ctx.observer.log_to(writer, every)

    @property
    def serves(self) -> bool:
        """Whether this rank only serves: it trains nothing, and calls `serve` in place of that."""
        return self._server is not None

    def serve(
        self, on_tick: Callable[[list[ServedStats]], None] | None = None
    ) -> list[ServedStats]:
        """Serve the ranks that train until they have closed their sessions, and close this one.

        Takes no model: the tensors and all settings that must be the same everywhere come from
        rank 0.

        Args:
            on_tick: called twice a second with the work so far, by channel. A record of the logger
                `gradlane` names each connected channel unless `Monitoring.summary` is off.

        Returns:
            The work by channel: models and arrays of the ranks that train, in the order in which
            they were connected.

        Raises:
            UsageError: this rank trains.
            RanksDifferError: rank 0 has another number of training ranks, or another version.
            RendezvousError: the other ranks do not come, or cannot be reached.
            GradlaneError: a rank was lost, fell silent or gave up; the message names it.
        """
        if self._server is None:
            raise UsageError(
                f"rank {self._ctx.rank_info.rank} trains: serve() is for ranks that only serve, "
                "those from gradlane.init(workers=...) on"
            )
        server = self._server
        last = time.monotonic()

        def tick() -> None:
            nonlocal last
            if on_tick is not None and time.monotonic() - last > _TOLD_EVERY_S:
                last = time.monotonic()
                on_tick(server.served())

        server.run(self._say, tick)
        served = server.served()
        self.close()
        return served

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Finish the last step, unhook the models and part from the other ranks.

        Gradients without an `optimizer.step()` are forgotten. Closing twice is allowed.

        Args:
            timeout_s: how long to wait for the other ranks to close, in seconds.

        Raises:
            GradlaneError: the session has failed, or the last step could not be finished.
        """
        self._ending.close(timeout_s)

    def abort(self, reason: str) -> None:
        """Abort at once and tell every other rank why; their next call raises it.

        Args:
            reason: one line.
        """
        self._ending.abort(reason)

    def __enter__(self) -> Session:
        """Return the session itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close, or, if an exception comes through, give up with its text.

        `sys.exit()` with status 0 closes.
        """
        if error is None or not lifecycle.failed(error):
            self.close()
        else:
            self.abort(lifecycle.describe_exception(error))

    def _say(self, connected: ServedStats) -> None:
        """Say that a channel is served from now on."""
        if not self._ctx.options.monitoring.summary:
            return
        rank_info = self._ctx.rank_info
        log.info(
            "rank %d serves %.1f of %.1f MB in %d tensors",
            rank_info.rank,
            connected.owned_bytes / 1e6,
            connected.total_bytes / 1e6,
            connected.tensors,
        )
