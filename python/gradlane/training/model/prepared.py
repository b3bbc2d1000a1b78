"""One model and one optimizer on one channel, from `Session.prepare` to `close`.

All ranks have rank 0's parameters and buffers, and the user's own objects have hooks. After `close`
they are plain objects again.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradlane.errors import (
    CheckpointError,
    GradlaneError,
    SessionClosedError,
    SessionFailedError,
    UsageError,
)
from gradlane.training.connection import SessionContext, shutdown_channel
from gradlane.training.core import check_connected, rank_channel, translate_error
from gradlane.training.factors.sending import FactorHooks
from gradlane.training.model import optimizers
from gradlane.training.model.barrier import Barrier
from gradlane.training.model.broadcast_state import (
    attributes_of,
    broadcast_state,
    describe_state,
    with_current_buffers,
)
from gradlane.training.model.buffers import BufferWatch
from gradlane.training.model.channel_setup import Connected, connect, schemes_of
from gradlane.training.model.consistency_check import compare_endings, tell_ending
from gradlane.training.model.contributors import Contributors
from gradlane.training.model.deferred_update import DeferredUpdate
from gradlane.training.model.failure_latch import FailureLatch
from gradlane.training.model.hooks import HookManager
from gradlane.training.model.joining import JoinedWorld, connect_to_join
from gradlane.training.model.kernel.gradient_exchange import GradientExchange
from gradlane.training.model.kernel.parts import KernelParts
from gradlane.training.model.kernel.phases import Phase, Phases
from gradlane.training.model.lazy_parameters import Exemption, LazyParameters
from gradlane.training.model.model_structure import ModelStructure
from gradlane.training.model.number_exchange import NumberExchange
from gradlane.training.model.precopy import PrecopyPlan, PrecopySource
from gradlane.training.model.residual_state import ResidualState
from gradlane.training.model.server_state import AsyncContext, ServerState
from gradlane.training.model.server_updates import ServerUpdates
from gradlane.training.model.several_optimizers import members_of
from gradlane.training.model.stages.before_step import BeforeStep
from gradlane.training.model.stages.build import build_stages
from gradlane.training.model.stages.late_gradients import LateGradientBuffer
from gradlane.training.model.stages.momentum_takeover import MomentumTakeover
from gradlane.training.model.stages.stage import StepStage
from gradlane.training.model.step_listeners import StepListeners
from gradlane.training.model.training_steps import TrainingSteps
from gradlane.training.model.update_set import UpdateSet
from gradlane.training.modules.stale_flags import StaleFlags
from gradlane.training.options.codec_choice import local_limit
from gradlane.training.options.momentum import adding_up, check_momentum
from gradlane.training.options.options import Options
from gradlane.training.rendezvous.bounded_store import BoundedStore
from gradlane.training.rendezvous.parameter_check import ParameterCheck
from gradlane.training.rendezvous.rendezvous import PublishedAddress, RendezvousScope
from gradlane.training.rendezvous.tensor_table import TensorEntry

CLOSE_TIMEOUT_S = 60.0
"""Seconds to wait for the other ranks' goodbyes by default."""


class _OwnSteps:
    """Numbers of a model's steps since its ranks were connected, for what counts those."""

    def __init__(self, exchange: GradientExchange, steps_before: int) -> None:
        self._exchange = exchange
        self._steps_before = steps_before

    @property
    def step(self) -> int:
        """Number of the current training step."""
        return self._exchange.training_step - self._steps_before

    def training_step_of(self, step: int) -> int:
        """Return the training step that a step of the channel was, or came after."""
        return self._exchange.training_step_of(step) - self._steps_before


class PreparedModel:
    """A connected model."""

    def __init__(
        self,
        ctx: SessionContext,
        meet: Callable[[], RendezvousScope],
        model: nn.Module,
        optimizer: Optimizer,
        defer: bool | None,
        buffers: str = "local",
        *,
        connected: Connected | None = None,
        attributes: dict[str, Any] | None = None,
        steps_before: int = 0,
        on_step_begin: Callable[[], None] = lambda: None,
    ) -> None:
        """Agree with all ranks, connect, broadcast rank 0's values and install all hooks.

        Args:
            ctx: the session's.
            meet: opens a scope where the ranks agree, another one each time.
            model: the user's.
            optimizer: the user's.
            defer: whether updates may happen after `optimizer.step()` and in parts; None: those of
                optimizers that step per parameter.
            buffers: how buffers are kept: `"broadcast"`, `"average"` or `"local"`.
            connected: all ranks are connected already, and have rank 0's values; None: connect.
            attributes: what `attributes_of` gave when the program prepared the model; None: now.
            steps_before: training steps before the ranks were connected.
            on_step_begin: called before each step.

        Raises:
            ValueError: the model or the optimizer cannot take part.
            GradlaneError: the ranks differ, or cannot reach each other.
        """
        self._ctx = ctx
        self._meet = meet
        self._addresses: list[PublishedAddress | None] | None = None
        self._optimizer = optimizer
        self._attributes = attributes_of(optimizer) if attributes is None else attributes
        self._defer = defer
        self._buffers = buffers
        self._steps_before = steps_before
        self._before_step = on_step_begin
        self.model = model
        if connected is None:
            connected = connect(ctx, meet(), model, optimizer, buffers)
        self._connected = connected
        scope = self._scope = connected.scope
        self.channel, self.codecs = connected.channel, connected.codecs
        self._layout, self._served = connected.layout, connected.served
        self._entries, self._trained = connected.spec.entries, connected.spec.trained
        rank_info = ctx.rank_info
        # Alone, a rank encodes nothing, and its optimizer keeps its momentum.
        encodes = rank_info.ranks > 1
        self._momentum_codecs = connected.spec.momentum_codecs if encodes else {}
        self._index_of = {id(entry.tensor): index for index, entry in enumerate(self._trained)}
        self._failure = FailureLatch()
        self._agreement = ParameterCheck(
            scope, self._trained, self._frozen(), ctx.options.check_every, steps_before
        )
        pack = self._layout.buffers
        self._structure = ModelStructure(model, self._entries)
        self._stale_flags = StaleFlags(self._structure.modules)
        self.listeners = StepListeners()
        """Called at the end of each training step."""
        self._hook_manager = HookManager(
            model,
            optimizer,
            self._structure,
            self._stale_flags,
            self.listeners,
            self._trained,
            pack.owners if pack is not None else set(),
            splits_graphs=rank_info.ranks > 1,
        )
        self._takeover = None
        self._local_limit = local_limit(
            (choice.codec for choice in self.codecs), ctx.rank_info.world_size
        )
        if self._momentum_codecs and ctx.options.update == "worker":
            self._takeover = MomentumTakeover(
                optimizer, self._momentum_codecs, [entry.tensor for entry in self._trained]
            )
        self._updates = self._make_server_updates()
        self.steps = self._make_steps()
        self._hook_manager.install(self.steps)
        self._hook_manager.remove_with(FactorHooks(self._layout.captured, self.steps.factors))
        if pack is not None:
            self._hook_manager.remove_with(BufferWatch(pack, self.steps.gate.before_buffers))
        if connected.recording is not None:
            connected.recording.watch(model, self.steps.stages.in_order.counters)
        self._watch = ctx.observer.watch(
            model,
            self.channel,
            _OwnSteps(self.steps.exchange, steps_before),
            name=scope.name,
            tensors=[entry.name for entry in (*self._entries, *connected.extras)],
            codecs=self.codecs,
            counters=self.steps.stages.in_order.counters,
        )
        connected.staging.subscribe(self._staging_failed)
        self._barrier: Barrier | None = None
        if ctx.options.is_asynchronous:
            limit_s = ctx.options.network.progress_timeout_s
            self._barrier = Barrier(self.channel, scope, limit_s)
        else:
            # With asynchronous training no rank waits for another's gradients: no deadlock.
            ctx.deadlocks.watch(scope.name, self.steps.exchange, self._on_deadlock)
        self._server = self._make_server_state(self._updates) if self._updates else None
        self.residuals = ResidualState(
            channel=self.channel,
            scope=scope,
            layout=self._layout,
            choices=self.codecs,
            updates_on_servers=self._served is not None,
            settle=self.steps.update.wait_for_all,
            spend_step=self.steps.update.spend_step,
            translating=self._translating,
            settle_late=self._settle_late,
            leaves_out=ctx.options.stragglers.leaves_out,
            ranks_per_residual=connected.ranks_each,
            membership=ctx.membership,
            gather=self.steps.numbers.gather_integers if ctx.options.going_on.on else None,
        )
        if self._barrier is not None and self._updates is not None:
            # From now on this rank updates its own slices, also before its own first step.
            with self._translating("preparing the model"):
                ranks = rank_channel(self.channel, "updating on servers")
                ranks.set_optimizer(0, self._updates.checked_rows())

        ctx.membership.training_step_of = self.steps.exchange.training_step_of
        self.has_parted = False
        """Whether every rank has said goodbye."""
        scope.mark_connected(ctx.options.network.progress_timeout_s, self._look)
        if ctx.checkpoints is not None:
            try:
                with scope.failing_alike():
                    ctx.checkpoints.follow(self, scope)
            except (CheckpointError, UsageError):
                # On all ranks alike.
                raise
            except BaseException as error:
                # The session has not got this model yet, and would not tell the others.
                self.abort(f"{type(error).__name__} while preparing the model: {error}")
                raise

    @property
    def options(self) -> Options:
        """The options in force for the model."""
        return self._ctx.options

    @property
    def evaluates_closure(self) -> bool:
        """Whether the optimizer calls its closure itself."""
        return any(map(optimizers.evaluates_closure, members_of(self._optimizer)))

    @property
    def trained(self) -> Sequence[TensorEntry]:
        """The model's trained parameters, in the order of the tensor table."""
        return self._trained

    def addresses(self) -> list[PublishedAddress | None]:
        """Return where each rank listens for this model; None for one that only talks to its node.

        Raises:
            RendezvousError: the store is gone or does not answer.
        """
        if self._addresses is None:
            everyone = range(self._ctx.rank_info.ranks)
            self._addresses = [self._scope.published_address(rank) for rank in everyone]
        return self._addresses

    def whole_state(self) -> dict[str, Any]:
        """Return the whole state of training on every rank; a collective call."""
        self.check_between_steps()
        return {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "session": self.residuals.state_dict(),
        }

    def load_whole_state(self, state: dict[str, Any]) -> None:
        """Restore a result of `whole_state`; a collective call between steps.

        Raises:
            ValueError: it is another model's.
        """
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.residuals.load_state_dict(state["session"])

    def close(self, timeout_s: float) -> None:
        """Settle, remove the hooks and close the channel.

        Args:
            timeout_s: how long to wait for the other ranks' goodbyes; it is no error if they
                do not come.

        Raises:
            GradlaneError: the last step could not be brought to an end.
        """
        try:
            self._failure.raise_failure()
            self.steps.update.finish()
            self._pull("session.close()")
            self._ctx.membership.leave_register(self._scope.name)
        except GradlaneError as error:
            self.abort(f"closed after an error: {error}")
            raise
        self._ctx.deadlocks.unwatch(self._scope.name)
        self._hook_manager.remove()
        if self._connected.recording is not None:
            self._connected.recording.remove_hooks()
        if self._server is not None:
            self._server.release()
        self._failure.fail(SessionClosedError("the session was closed"))
        # What ends the session from now on is the reason, not that it was closed.
        self._scope.on_poll = functools.partial(check_connected, self._ctx.core, self.channel)
        self._connected.carrier.close()
        # Where ranks were lost, the store may be lost, too.
        compares = self._ctx.rank_info.world_size > 1 and not self._ctx.membership.lacks_ranks
        if compares:
            compared = self.steps.stages.consistency if self._layout.status is not None else None
            tell_ending(self._scope, self.steps.step, compared, self._agreement)
        if shutdown_channel(self._ctx, self.channel, self._watch, self._scope, timeout_s):
            if compares:
                compare_endings(self._scope, self._agreement)
            self._scope.delete_keys()
            self.has_parted = True

    def synchronize(self) -> None:
        """Wait until every parameter has its update, and, where ranks train asynchronously, until
        all ranks are here and have the same parameters.

        Raises:
            GradlaneError: the session has failed.
        """
        self._failure.raise_failure()
        self.steps.update.wait_for_all()
        if self._barrier is not None and self.in_step:
            raise UsageError(
                f"session.synchronize() in the middle of step {self.steps.step}: with "
                'strategy="asgd" it waits for all ranks; call it after optimizer.step()'
            )
        self._pull("session.synchronize()")

    def staleness(self) -> list[dict[str, Any]]:
        """Return, by rank, how stale the gradients were that this rank's servers applied."""
        readings: list[dict[str, Any]] = json.loads(self.channel.metrics_json()).get(
            "staleness", []
        )
        return readings

    def _pull(self, call: str) -> None:
        """Give all ranks the servers' parameters, if they train asynchronously; collective then."""
        if self._barrier is None or self._served is None or self._ctx.rank_info.world_size == 1:
            return
        with self._translating(f"waiting for all ranks in {call}"):
            self._served.register()
            self._barrier.all_here(call)
            self.steps.update.spend_step(self._served.pull)
            # Further training changes the servers' parameters: not before all ranks have them.
            self._barrier.all_here(f"{call}, with all parameters")

    def reconnected(
        self, options: Options, timeout_s: float, schemes: Mapping[str, str] | None = None
    ) -> PreparedModel:
        """Close, and connect the same model with other options; a collective call between steps.

        The optimizer's state stays, also that on the servers, and so do buffers and residuals.

        Args:
            options: in place of the session's.
            timeout_s: how long to wait for the other ranks' goodbyes.
            schemes: how tensors are aggregated, by name; None: as before.

        Raises:
            GradlaneError: a rank was lost, or cannot connect.
        """
        self._failure.raise_failure()
        self.steps.update.wait_for_all()
        self.bring_state_home()
        residuals = self.residuals.state_dict()
        self.close(timeout_s)
        # Connecting spreads rank 0's; buffers may be each rank's own.
        kept = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        ctx = replace(self._ctx, options=options)
        if schemes is not None:
            ctx = replace(ctx, schemes=schemes)
        again = PreparedModel(
            ctx,
            self._meet,
            self.model,
            self._optimizer,
            self._defer,
            self._buffers,
        )
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
        again.residuals.load_state_dict(residuals)
        return again

    def bring_state_home(self) -> None:
        """Put optimizer state that is on the servers into the optimizer; collective, between steps.

        It stays on the servers with asynchronous training, and where a parameter was converted: the
        core would read past its memory.

        Raises:
            GradlaneError: a rank was lost, or has state of other tensors.
        """
        if self._server is None or self._served is None or self.is_asynchronous:
            return
        if self._served.converted is None:
            self._server.bring_home()

    def connect_beside(self, world: JoinedWorld, precopy: PrecopySource | None) -> Connected:
        """Connect the model in the world that a rank joins, and stay connected to those of this.

        A collective call of the ranks of both worlds between two steps.

        Args:
            world: that a rank joins.
            precopy: what this rank has given of the state before; None: nothing.

        Raises:
            UsageError: the program has changed the model since it was prepared.
            ValueError: the model or the optimizer cannot take part.
            GradlaneError: the ranks differ, or cannot reach each other.
        """
        self.steps.update.wait_for_all()
        self.check_between_steps()
        self._check_unchanged()
        spec = self._connected.spec
        checked = replace(spec, entries=with_current_buffers(spec.entries, self.model))
        return connect_to_join(
            world, self.model, self._optimizer, self._buffers, self._attributes, checked, precopy
        )

    @property
    def ranks_each(self) -> int:
        """Number of consecutive ranks that talk to the network as one."""
        return self._connected.ranks_each

    @property
    def can_precopy(self) -> bool:
        """Whether a rank that joins can repeat this model's updates."""
        return optimizers.is_known(self._optimizer) and self._takeover is None

    def begin_precopy(
        self, store: BoundedStore, plan: PrecopyPlan, look: Callable[[], object]
    ) -> PrecopySource:
        """Begin to give the state as it is now to a rank that joins, while training goes on.

        Args:
            store: the rendezvous store.
            plan: who gives; this rank does.
            look: raises when the session has failed.
        """
        self.steps.update.wait_for_all()
        entries = with_current_buffers(self._entries, self.model)
        # One rank's words are enough; the others' tensors have the same form.
        tells = self._ctx.membership.rank == 0
        described = describe_state(self._optimizer, self._attributes) if tells else b""
        source = PrecopySource(self._ctx, store, plan, entries, self._optimizer, described, look)
        source.start()
        self._updates_here[0].keep_log(source.log)
        return source

    def moved_to(
        self,
        world: JoinedWorld,
        connected: Connected,
        on_step_begin: Callable[[], None],
        residuals: Mapping[str, Tensor],
    ) -> PreparedModel:
        """Train in another world from now on; the connections of this one are closed already.

        Args:
            world: that a rank has joined.
            connected: what `connect_beside` returned.
            on_step_begin: called before each step.
            residuals: what `residuals.for_more_ranks` has returned in this world.
        """
        moved = PreparedModel(
            world.ctx,
            world.meet,
            self.model,
            self._optimizer,
            self._defer,
            self._buffers,
            connected=connected,
            attributes=self._attributes,
            steps_before=self.steps.step,
            on_step_begin=on_step_begin,
        )
        moved.residuals.take_over(residuals)
        return moved

    def broadcast_state(self, source: int) -> None:
        """Give every rank the parameters, optimizer state and buffers of one; a collective call."""
        self.steps.update.wait_for_all()
        try:
            entries = with_current_buffers(self._entries, self.model)
            broadcast_state(
                self._ctx, self._meet(), entries, self._optimizer, self._attributes, source
            )
        except GradlaneError as error:
            self.abort(f"the state of rank {source} could not be handed over: {error}")
            raise
        if self._layout.buffers is not None:
            self._layout.buffers.start()

    def abort(self, reason: str) -> None:
        """Give up, tell all ranks why, and make the model unreadable if it is in mid-step."""
        self._failure.fail(SessionClosedError(f"the session was given up: {reason}"))
        self._connected.abort(reason)

    def _on_deadlock(self, reason: str) -> None:
        """Fail here and tell all ranks; called while this rank waits."""
        self._failure.fail(SessionFailedError(reason, self.steps.step - 1))
        with contextlib.suppress(self._ctx.core.ChannelError):
            self.channel.abort(reason)

    def forget_in_child(self) -> None:
        """Drop the connections in a forked child, where the model is a plain one."""
        self.channel.forget_in_child()
        if self.steps.phases.phase in (Phase.IDLE, Phase.LOCAL) and self._failure.error is None:
            self._hook_manager.remove()
            if self._server is not None:
                self._server.release()
        reason = "this session belongs to the parent of this forked child"
        self._failure.fail(SessionClosedError(reason))

    def shares_with(self, model: nn.Module) -> bool:
        """Whether another model has a trained parameter of this one."""
        if self._failure.error is not None:
            return False
        return any(id(parameter) in self._index_of for parameter in model.parameters())

    def check_between_steps(self) -> None:
        """Check that the model can be connected anew.

        Raises:
            UsageError: it is in the middle of a step.
        """
        if self.steps.phases.phase not in (Phase.IDLE, Phase.PENDING):
            raise UsageError(
                f"prepare() again in the middle of step {self.steps.step}: call it between "
                "zero_grad() and the next backward()"
            )

    @property
    def is_asynchronous(self) -> bool:
        """Whether each rank trains at its own pace."""
        return self._ctx.options.is_asynchronous

    @property
    def optimizer(self) -> Optimizer:
        """The user's optimizer."""
        return self._optimizer

    @property
    def per_rank_buffers(self) -> set[str]:
        """Names of the buffers that differ from rank to rank, as in the model's state."""
        may_lack = self._ctx.options.stragglers.leaves_out
        if self._layout.buffers is not None and not may_lack:
            return set()
        return {name for name, _ in self.model.named_buffers()}

    @property
    def schemes(self) -> dict[str, str]:
        """How each trained tensor is aggregated, by name."""
        return schemes_of(self._ctx, self._connected.spec)

    @property
    def reads_averages(self) -> bool:
        """Whether the program reads averaged gradients between backward and step."""
        return self.steps.stages.full_waits.reads_averages

    def explain(self) -> list[dict[str, Any]]:
        """Return the stages that each step passes, in order."""
        return self.steps.stages.in_order.describe()

    def pass_step(self) -> bool:
        """Take the result of the next step without a part in it, if the others are there already.

        Listeners of training steps, such as checkpoints, are called for this one, too.

        Returns:
            Whether it was done.

        Raises:
            UsageError: this rank's own step has not ended.
        """
        passed = self.steps.others.pass_step()
        if passed:
            self.listeners.step_ended()
        return passed

    @property
    def in_step(self) -> bool:
        """Whether gradients are under way without an `optimizer.step()`."""
        return self.steps.phases.phase in (Phase.BACKWARD, Phase.ATTACHED)

    # ---- inside

    def _frozen(self) -> list[TensorEntry]:
        """Return the parameters that are not trained; buffers are not among them."""
        parameters = {id(parameter) for parameter in self.model.parameters()}
        return [
            entry for entry in self._entries if not entry.trained and id(entry.tensor) in parameters
        ]

    def _staging_failed(self, error: Exception) -> None:
        core = self._ctx.core
        if isinstance(error, core.ChannelError):
            self._failure.fail(translate_error(core, error, "handing a gradient over"))
        else:
            self.abort(f"staging failed: {error}")

    def _settle_late(self) -> LateGradientBuffer | None:
        """Return the late gradients that are carried on, those of the last step included.

        None where late gradients are lost. The last step must have ended here.
        """
        self.steps.exchange.complete()
        return self.steps.stages.late

    def _make_steps(self) -> TrainingSteps:
        ctx, optimizer, rank_info = self._ctx, self._optimizer, self._ctx.rank_info
        exempt = Exemption()
        parameters = [entry.tensor for entry in self._trained]
        members = members_of(optimizer)
        self._updates_here = [
            self._deferred(member, self._hook_manager.step_whole(number), parameters)
            for number, member in enumerate(members)
        ]
        owner = {
            id(parameter): number
            for number, member in enumerate(members)
            for group in member.param_groups
            for parameter in list.__iter__(group["params"])
        }
        owners = [owner[id(parameter)] for parameter in parameters]
        updates = UpdateSet(self._updates_here, owners, parameters)
        contributors = Contributors(ctx.core, self.channel, self._failure)
        stages = build_stages(
            ctx.options,
            rank_info,
            self.channel,
            self._layout,
            self._buffers,
            optimizer,
            updates,
            self._agreement,
            ctx.membership,
            self._failure,
            exempt,
            contributors,
            of_session=self._session_stages(),
            server=self._updates,
            takeover=self._takeover,
            local_limit=self._local_limit,
            adding_up=adding_up(choice.codec for choice in self.codecs),
        )
        exchange = GradientExchange(
            ctx.core,
            self.channel,
            self._connected.carrier,
            self._layout,
            stages.consistency,
            self._failure,
            functools.partial(ctx.deadlocks.waiting, self._scope.name),
            stages.in_order,
            rank_info.rank,
            self._steps_before,
        )
        parts = KernelParts(
            Phases(self._failure, stages.in_order),
            exchange,
            updates,
            stages.in_order,
            exempt,
            LazyParameters(
                parameters, [entry.tensor for entry in self._entries if not entry.trained]
            ),
            self._stale_flags,
        )
        return TrainingSteps(
            parts,
            stages,
            self._structure,
            self.listeners,
            self._check_unchanged,
            ctx.membership,
            contributors,
            NumberExchange(self.channel, self._connected.carrier, self._layout, exchange.spend),
        )

    def _session_stages(self) -> list[StepStage]:
        """Return what the session does before each step, all of it between two steps."""
        every = self._ctx.options.check_every
        watched = "always: metrics, traces and the live page"
        stages = [BeforeStep("monitoring", watched, self._monitor)]
        if every:
            compared = f"check_every={every}: all ranks compare their parameters"
            stages.append(BeforeStep("parameter check", compared, self._compare_parameters))
        if self._ctx.options.going_on.on:
            joining = "going_on=True: a rank may join between two steps"
            stages.insert(0, BeforeStep("joining", joining, lambda _: self._before_step()))
        if self._updates is not None:
            told = 'update="server": changes by the program go to the servers'
            stages.append(BeforeStep("server state", told, self._hand_over))
        return [*stages]

    def _deferred(
        self, optimizer: Optimizer, step_whole: Callable[..., Any], parameters: Sequence[Tensor]
    ) -> DeferredUpdate:
        """Return how one of the model's optimizers is driven."""
        step_of_class = optimizers.step_of_class(optimizer)
        if self._connected.recording is not None:
            step_whole = self._connected.recording.timed_update(step_whole)
            if step_of_class is not None:
                step_of_class = self._connected.recording.timed_update(step_of_class)
        return DeferredUpdate(
            optimizer,
            step_whole,
            step_of_class,
            parameters,
            is_known=optimizers.is_known(optimizer),
            may_defer=optimizers.steps_per_parameter(optimizer)
            if self._defer is None
            else self._defer,
            takeover=self._takeover,
        )

    def _make_server_updates(self) -> ServerUpdates | None:
        if self._served is None:
            return None
        return ServerUpdates(
            self._optimizer,
            self._trained,
            self._served,
            self._check_unchanged,
            is_asynchronous=self.is_asynchronous,
        )

    def _monitor(self, step: int) -> None:
        self._watch.step_begins(step - self._steps_before)

    def _compare_parameters(self, step: int) -> None:
        if self._agreement.is_due(step - 1):
            self._agreement.after_step(step - 1)

    def _hand_over(self, step: int) -> None:
        if self._server is not None and self._served is not None:
            with self._translating(f"beginning step {step}"):
                self._served.hand_over_changes(self.steps.update.spend_step)
            self._server.agree()

    def _look(self) -> None:
        """Raise if the session has failed."""
        with self._translating("waiting for other ranks"):
            self.channel.is_ready(0, 0)

    def _translating(self, doing: str) -> contextlib.AbstractContextManager[None]:
        """Turn errors of the channel into the package's own, and keep them."""
        return self._failure.translating(self._ctx.core, doing)

    def _make_server_state(self, updates: ServerUpdates) -> ServerState:
        barrier = self._barrier
        assert self._served is not None
        return ServerState(
            channel=rank_channel(self.channel, "updating on servers"),
            scope=self._scope,
            optimizer=self._optimizer,
            trained=self._trained,
            updates=updates,
            parameters=self._served,
            spend_step=self.steps.update.spend_step,
            translating=self._translating,
            asynchronous=AsyncContext(
                barrier, self.steps.update.wait_for_all, self.steps.exchange.pushes
            )
            if barrier is not None
            else None,
        )

    def _check_unchanged(self) -> None:
        """Check that the model and its optimizer still are those that were prepared.

        Raises:
            UsageError: they were changed.
        """
        self._structure.check_unchanged()
        may_take_over = self._ctx.options.update == "worker"
        for member in members_of(self._optimizer):
            check_momentum(member, self._momentum_codecs, may_take_over=may_take_over)
        if self._layout.form is not None:
            self._layout.form.check()
