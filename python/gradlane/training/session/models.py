"""The prepared models of a session, and the plans that they follow."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gradlane.errors import GradlaneError, RefusedError, UsageError
from gradlane.formats.link_report import LinkReport
from gradlane.training.connection import SessionContext
from gradlane.training.local_updates.local_model import LocalModel
from gradlane.training.local_updates.replica import connect_model
from gradlane.training.local_updates.shards import connect_shards
from gradlane.training.model.buffers import MODES
from gradlane.training.model.optimizers import (
    evaluates_closure,
    optimizer_features,
    steps_per_parameter,
)
from gradlane.training.model.prepared import CLOSE_TIMEOUT_S, PreparedModel
from gradlane.training.model.several_optimizers import as_one, members_of
from gradlane.training.model.validation import check_arguments, parameter_features
from gradlane.training.options.compatibility import CALLS, Feature, refusal
from gradlane.training.options.local_updates import Local
from gradlane.training.options.strategy import PLAN_RULES, plan_features
from gradlane.training.plans.active_plan import ActivePlan
from gradlane.training.plans.agreement import PlanArgument, agree_on_plan
from gradlane.training.plans.plan import Plan
from gradlane.training.plans.planning_wing import Book, measure_links, open_book
from gradlane.training.rendezvous.bounded_store import BoundedStore
from gradlane.training.session import after_close
from gradlane.training.session.joining import Joins
from gradlane.training.session.world import World
from gradlane.training.sharded.fsdp import ShardedUnit, is_sharded
from gradlane.training.sharded.model import ShardedModel
from gradlane.training.sharded.units import read_sharded
from gradlane.training.torch_internals import check_torch

ModelType = TypeVar("ModelType", bound=nn.Module)
OptimizerType = TypeVar("OptimizerType")


class PreparedModels:
    """Connects models to all ranks and keeps them; `Session.prepare` documents the call."""

    def __init__(
        self,
        world: World,
        store: BoundedStore,
        look: Callable[[], object],
        abort: Callable[[str], None],
    ) -> None:
        """Prepare nothing yet.

        Args:
            world: the ranks that this one is connected to.
            store: the rendezvous store.
            look: raises when a model has lost a rank.
            abort: aborts the session.
        """
        self._world = world
        self._meet = world.meet
        self.prepared: list[PreparedModel] = []
        self.sharded: list[ShardedModel] = []
        self.local: LocalModel | None = None
        """The model that each rank trains by itself, with `update=gradlane.Local(...)`."""
        self.joins = Joins(world, store, self.prepared, look)
        self._links: LinkReport | None = None
        self.plans = ActivePlan(world.ctx.options, world.meet, self.prepared, abort)

    @property
    def _ctx(self) -> SessionContext:
        return self._world.ctx

    def measure_links(
        self,
        *,
        window_s: float = 1.0,
        directions: bool = True,
        on_phase: Callable[[str], None] = lambda text: None,
    ) -> LinkReport:
        """Measure bandwidth and latency between all ranks."""
        self._links = measure_links(
            self._ctx,
            self._meet(),
            window_s=window_s,
            directions=directions,
            on_phase=on_phase,
        )
        return self._links

    def book(self, model: nn.Module | None, call: str) -> Book:
        """Return what all ranks know of their cluster and a model.

        Args:
            model: a prepared one; None: the only one.
            call: what it is for, as the program has written it.
        """
        prepared = self.find(model, call)
        return open_book(prepared, prepared.options, self._ctx.rank_info, self._links)

    def exchange(self, value: Any) -> list[Any]:
        """Exchange a JSON value with all ranks."""
        return self._meet().exchange(value)

    def prepare(
        self,
        model: ModelType,
        given: OptimizerType,
        *,
        defer: bool | None,
        buffers: str,
        plan: PlanArgument,
    ) -> tuple[ModelType, OptimizerType]:
        """Connect a model and its optimizer, or optimizers, to all ranks."""
        check_torch()
        optimizer: Any = as_one(given)
        local = self._ctx.options.local_updates
        if local is not None:
            self._prepare_local(model, optimizer, local, defer=defer, buffers=buffers, plan=plan)
            return model, given
        if is_sharded(model):
            self._prepare_sharded(model, optimizer, defer, buffers, plan)
            return model, given
        if self._ctx.membership.lacks_ranks:
            # On all ranks alike, and the lost ones come to no meeting.
            raise UsageError(
                "prepare() after ranks were lost: the ranks that are left open no new connections; "
                "prepare all models before, or restart from the last checkpoint"
            )
        if self._ctx.options.rendezvous.join and not self.prepared:
            check_arguments(model, optimizer)
            self._check_asked(model, optimizer, defer, buffers, plan)
            self.joins.follow(self.joins.join(model, optimizer, defer, buffers))
            return model, given
        before: PreparedModel | None = None
        unable: ValueError | GradlaneError | None = None
        sizes: dict[str, int] = {}
        try:
            check_arguments(model, optimizer)
            self._check_asked(model, optimizer, defer, buffers, plan)
            if not (plan is None or isinstance(plan, (Plan, str, os.PathLike))):
                raise UsageError(
                    f"prepare() was given plan={plan!r}: give a Plan, the path of a plan file, "
                    '"auto", "poseidon" or None'
                )
            sizes = _trained_sizes(model)
            before = self._prepared_before(model)
        except (GradlaneError, ValueError) as error:
            # The others are on their way to the meeting, and hear of it there.
            unable = error
        agreed = agree_on_plan(self._meet(), plan if unable is None else None, sizes, unable)
        rank_info = self._ctx.rank_info
        schemes = None if agreed.plan is None else agreed.plan.schemes
        why = refusal(plan_features(agreed.rule, schemes), self._features)
        if why:
            raise UsageError(why)
        residuals = None
        if before is not None:
            try:
                before.bring_state_home()
                residuals = before.residuals.state_dict()
                self._part_with(before)
            except GradlaneError as error:
                # The others are on their way to the next meeting, and would wait there.
                self._meet().refuse(str(error))
                raise
        ctx = self._ctx
        if agreed.plan is not None:
            options = agreed.plan.settings.applied_to(ctx.options)
            ctx = replace(ctx, options=options, schemes=agreed.plan.schemes)
            self.plans.plan = agreed.plan
        learns = agreed.rule != "" and rank_info.world_size > 1
        links = self.measure_links(directions=False) if learns else None
        prepared = PreparedModel(ctx, self._meet, model, optimizer, defer, buffers)
        if residuals is not None:
            prepared.residuals.load_state_dict(prepared.residuals.fitting(residuals))
        self.prepared.append(prepared)
        for member in members_of(optimizer):
            after_close.forget(member)
        if ctx.options.going_on.on and rank_info.world_size > 1:
            self.joins.follow(prepared)
        if links is not None:
            self.plans.learn(prepared, links, agreed.rule)
        if ctx.options.is_asynchronous and rank_info.world_size > 1 and buffers != "local":
            own = [name for name, _ in model.named_buffers()]
            if own:
                warnings.warn(
                    f'buffers={buffers!r} with strategy="asgd": the ranks are in different steps, '
                    f"so that {own[0]!r} and all other buffers stay each rank's own; give "
                    'buffers="local" to say that this is meant',
                    UserWarning,
                    stacklevel=3,
                )
        unknown = [
            one
            for one in members_of(optimizer)
            if not (steps_per_parameter(one) or evaluates_closure(one))
        ]
        if defer is None and unknown and self._ctx.options.update == "worker":
            names = dict.fromkeys(type(one).__name__ for one in unknown)
            warnings.warn(
                f"{' and '.join(names)} is not known to treat each parameter by itself, "
                "so step() waits for all gradients; pass defer=True to prepare(), or give the "
                "class an attribute steps_per_parameter = True, if it does",
                UserWarning,
                stacklevel=3,
            )
        return model, given

    def _prepare_sharded(
        self,
        model: nn.Module,
        optimizer: Any,
        defer: bool | None,
        buffers: str,
        plan: PlanArgument,
    ) -> None:
        """Connect a model that `fully_shard` has sharded within the node."""
        ctx = self._ctx
        units: list[ShardedUnit] = []
        unable: ValueError | GradlaneError | None = None
        try:
            check_arguments(model, optimizer)
            self._check_asked(model, optimizer, defer, buffers, plan)
            units = read_sharded(ctx, model, optimizer)
        except (GradlaneError, ValueError) as error:
            if ctx.options.rendezvous.join:
                # The members are at no meeting.
                raise
            unable = error
        agree_on_plan(self._meet(), None, {}, unable)
        self.sharded.append(ShardedModel(ctx, self._meet(), model, optimizer, units))
        for member in members_of(optimizer):
            after_close.forget(member)
        saved = model.state_dict().keys()
        own = [name for name, _ in model.named_buffers() if name in saved]
        if own and buffers != "local" and ctx.rank_info.world_size > 1:
            warnings.warn(
                f"buffers={buffers!r} with a model that fully_shard has sharded: FSDP leaves "
                f"{own[0]!r} and all other buffers to each rank, and so does gradlane after "
                'prepare(); give buffers="local" to say that this is meant',
                UserWarning,
                stacklevel=4,
            )

    def _prepare_local(
        self,
        model: nn.Module,
        optimizer: Any,
        local: Local,
        *,
        defer: bool | None,
        buffers: str,
        plan: PlanArgument,
    ) -> None:
        """Connect the model that each rank, or the ranks of each node, train by themselves.

        Raises:
            UsageError: a call or an argument does not go with that.
        """
        ctx = self._ctx
        units: list[ShardedUnit] = []
        unable: ValueError | GradlaneError | None = None
        try:
            check_arguments(model, optimizer)
            self._check_asked(model, optimizer, defer, buffers, plan)
            if is_sharded(model):
                units = read_sharded(ctx, model, optimizer)
        except (GradlaneError, ValueError) as error:
            # The others are on their way to the meeting, and hear of it there.
            unable = error
        agree_on_plan(self._meet(), None, {}, unable)
        scope = self._meet()
        replica = (
            connect_shards(ctx, scope, model, optimizer, local, units)
            if units
            else connect_model(ctx, scope, model, optimizer, local)
        )
        self.local = LocalModel(ctx, replica, model, optimizer, local)
        for member in members_of(optimizer):
            after_close.forget(member)
        own = [name for name, _ in model.named_buffers()]
        if own and buffers != "local" and ctx.rank_info.world_size > 1:
            warnings.warn(
                f"buffers={buffers!r} with update=gradlane.Local(...): {own[0]!r} and all other "
                'buffers stay each rank\'s own; give buffers="local" to say that this is meant',
                UserWarning,
                stacklevel=4,
            )

    @property
    def has_sharded(self) -> bool:
        """Whether `fully_shard` has sharded one of the models."""
        return bool(self.sharded) or (self.local is not None and is_sharded(self.local.model))

    @property
    def _features(self) -> dict[Feature, str]:
        """The features of the session's options that are in force."""
        found = dict(self._ctx.options.features)
        if not self._ctx.rank_info.serving:
            found.pop(Feature.SERVING, None)
        return found

    def _check_asked(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        defer: bool | None,
        buffers: str,
        plan: PlanArgument,
    ) -> None:
        """Check that what `prepare` is asked for goes together, and with the session's options.

        Raises:
            UsageError: it does not.
            ValueError: there are no such buffers.
        """
        if buffers not in MODES:
            raise RefusedError(f"unknown buffers {buffers!r}; known are {', '.join(MODES)}")
        before = [one.model for one in (*self.prepared, self.local) if one is not None]
        rule = isinstance(plan, str) and plan in PLAN_RULES
        asked = optimizer_features(optimizer) | parameter_features(model)
        asked |= {
            feature: words
            for feature, is_given, words in (
                (Feature.FSDP, is_sharded(model), Feature.FSDP.label),
                (
                    Feature.FSDP_EXACT,
                    is_sharded(model) and self._ctx.options.local_updates is None,
                    Feature.FSDP.label,
                ),
                (Feature.PLAN, plan is not None, f"prepare(plan={plan!r})"),
                (Feature.PLAN_RULE, rule, f"prepare(plan={plan!r})"),
                (Feature.DEFER, defer is not None, f"prepare(defer={defer})"),
                (Feature.DEFER_TRUE, defer, f"prepare(defer={defer})"),
                (Feature.BUFFERS, buffers == "average", f'prepare(buffers="{buffers}")'),
                (Feature.AGAIN, any(one is model for one in before), Feature.AGAIN.label),
                (Feature.SECOND, any(one is not model for one in before), Feature.SECOND.label),
            )
            if is_given
        }
        why = refusal(asked, self._features)
        if why:
            raise UsageError(why)

    def check_call(self, call: Feature, *, is_sharded: bool | None = None) -> None:
        """Check that a call of the session goes with its options and models.

        Args:
            call: the call.
            is_sharded: whether it concerns a sharded model; None: where there is one, it does.

        Raises:
            UsageError: it does not.
        """
        among = self._features
        if self.has_sharded if is_sharded is None else is_sharded:
            among[Feature.FSDP] = "a model that fully_shard has sharded"
        if len(self.prepared) > 1:
            among[Feature.SECOND] = f"{len(self.prepared)} prepared models"
        if any(one.evaluates_closure for one in self.prepared):
            among[Feature.CLOSURE] = Feature.CLOSURE.label
        why = refusal({call: call.label}, among)
        if why:
            raise UsageError(why)

    def keeping_pace(self) -> PreparedModel:
        """Return the model whose steps `keep_pace` counts.

        Raises:
            UsageError: there is not exactly one.
        """
        self.check_call(Feature.KEEP_PACE)
        if not self.prepared:
            raise UsageError("session.keep_pace() without a prepared model: call prepare() before")
        return self.prepared[0]

    def find(self, model: nn.Module | None, call: str) -> PreparedModel:
        """Return a prepared model.

        Args:
            model: the user's; None: the only one.
            call: what it is for, as the program has written it.

        Raises:
            UsageError: it was not prepared, or none or several were.
        """
        sharded = [one for one in self.sharded if model is None or one.model is model]
        meant = sharded and (model is not None or not self.prepared)
        self.check_call(CALLS[call], is_sharded=bool(meant))
        if model is None and len(self.prepared) == 1:
            return self.prepared[0]
        if model is None:
            count = len(self.prepared) or "no"
            raise UsageError(f"{call} with {count} prepared models: say which one by model=")
        prepared = self._prepared_of(model)
        if prepared is not None:
            return prepared
        raise UsageError(
            f"{call} of a model ({type(model).__name__}) that this session has not prepared: give "
            "the object that was given to session.prepare()"
        )

    def gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """Return integers of every member, by rank; a collective call between two steps."""
        if self.local is not None:
            self.check_call(Feature.GATHER_INTEGERS)
            return self.local.numbers.gather_integers(values)
        prepared = self.find(None, "gather_integers()")
        self.joins.tell_first_step()
        return prepared.steps.numbers.gather_integers(values)

    def _prepared_of(self, model: nn.Module | None) -> PreparedModel | None:
        return next((one for one in self.prepared if one.model is model), None)

    def _prepared_before(self, model: nn.Module) -> PreparedModel | None:
        """Return an earlier preparation of a model; refuse a model that shares parameters."""
        again = self._prepared_of(model)
        for other in self.prepared:
            if other is not again and other.shares_with(model):
                raise RefusedError(
                    "this model and one that is prepared already have trained parameters in "
                    "common: prepare one module that holds both, such as nn.ModuleList"
                )
        if again is not None:
            again.check_between_steps()
        return again

    def _part_with(self, prepared: PreparedModel) -> None:
        self.plans.forget(prepared)
        prepared.close(CLOSE_TIMEOUT_S)
        self.prepared.remove(prepared)


def _trained_sizes(model: nn.Module) -> dict[str, int]:
    """Return numbers of elements that are averaged, by name; complex numbers are pairs."""
    return {
        name: parameter.numel() * (2 if parameter.is_complex() else 1)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not is_lazy(parameter) and parameter.numel() > 0
    }
