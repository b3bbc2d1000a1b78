"""The prepared models of a session, and the plans that they follow."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn
from torch.nn.parameter import is_lazy

from gradlane.errors import GradlaneError, UsageError
from gradlane.formats.link_report import LinkReport
from gradlane.training.connection import SessionContext
from gradlane.training.local_updates.local_model import LocalModel
from gradlane.training.model.buffers import MODES
from gradlane.training.model.optimizers import steps_per_parameter
from gradlane.training.model.prepared import CLOSE_TIMEOUT_S, PreparedModel
from gradlane.training.model.several_optimizers import as_one, members_of
from gradlane.training.model.validation import check_arguments
from gradlane.training.options.going_on import check_plan_goes_on
from gradlane.training.options.local_updates import Local, call_refusal
from gradlane.training.options.stragglers import check_schemes
from gradlane.training.options.strategy import PLAN_RULES, SFB
from gradlane.training.plans.active_plan import ActivePlan
from gradlane.training.plans.agreement import PlanArgument, agree_on_plan
from gradlane.training.plans.plan import Plan
from gradlane.training.plans.planning_wing import Book, measure_links, open_book
from gradlane.training.rendezvous.bounded_store import BoundedStore
from gradlane.training.session import after_close
from gradlane.training.session.joining import Joins
from gradlane.training.session.world import World
from gradlane.training.sharded.fsdp import ShardedUnit, is_sharded
from gradlane.training.sharded.model import ShardedModel, read_sharded
from gradlane.training.sharded.refusals import argument_refusal, option_refusal, refuse_call

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
        optimizer: Any = as_one(given)
        if is_sharded(model):
            self._prepare_sharded(model, optimizer, defer, buffers, plan)
            return model, given
        local = self._ctx.options.local_updates
        if local is not None:
            self._prepare_local(model, optimizer, local, defer=defer, buffers=buffers, plan=plan)
            return model, given
        if self._ctx.membership.lacks_ranks:
            # On all ranks alike, and the lost ones come to no meeting.
            raise UsageError(
                "prepare() after ranks were lost: the ranks that are left open no new connections; "
                "prepare all models before, or restart from the last checkpoint"
            )
        if self._ctx.options.rendezvous.join and not self.prepared:
            check_arguments(model, optimizer)
            self._check_buffers(buffers)
            self._check_goes_on(model, buffers, plan)
            if plan is not None:
                raise UsageError(
                    f"prepare(plan={plan!r}) of a rank that joins: it uses its session's settings; "
                    "leave plan out, or restart all ranks with the plan"
                )
            self.joins.follow(self.joins.join(model, optimizer, defer, buffers))
            return model, given
        before: PreparedModel | None = None
        unable: ValueError | GradlaneError | None = None
        sizes: dict[str, int] = {}
        try:
            check_arguments(model, optimizer)
            self._check_goes_on(model, buffers, plan)
            self._check_buffers(buffers)
            if not (plan is None or isinstance(plan, (Plan, str, os.PathLike))):
                raise UsageError(
                    f"prepare() was given plan={plan!r}: give a Plan, the path of a plan file, "
                    '"auto", "poseidon" or None'
                )
            if plan is not None and self._ctx.options.is_asynchronous:
                raise ValueError(
                    'plan= with strategy="asgd": plans choose among settings that give the same '
                    "results, and asynchronous training gives others; leave plan out"
                )
            sizes = _trained_sizes(model)
            before = self._prepared_before(model)
        except (GradlaneError, ValueError) as error:
            # The others are on their way to the meeting, and hear of it there.
            unable = error
        agreed = agree_on_plan(self._meet(), plan if unable is None else None, sizes, unable)
        rank_info = self._ctx.rank_info
        if agreed.rule and rank_info.serving:
            raise ValueError(
                f"plan={agreed.rule!r} while {rank_info.serving} ranks only serve: a session finds "
                "plans for the ranks that train alone; `gradlane plan --servers separate="
                f"{rank_info.serving}` writes one, to be given as plan="
            )
        schemes = {"poseidon": SFB} if agreed.rule == "poseidon" else {}
        if agreed.plan is not None:
            schemes = agreed.plan.schemes
        check_schemes(self._ctx.options.stragglers.rule, schemes)
        check_plan_goes_on(self._ctx.options.going_on, agreed.rule, schemes)
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
        unknown = [one for one in members_of(optimizer) if not steps_per_parameter(one)]
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
            self._check_buffers(buffers)
            why = option_refusal(ctx.options, ctx.rank_info.serving)
            why = why or argument_refusal(defer, buffers, plan)
            if why:
                raise UsageError(f"prepare() of a model that fully_shard has sharded, with {why}")
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
        """Connect the model that each rank trains by itself.

        Raises:
            UsageError: a call or an argument does not go with that.
        """
        refused = {
            "prepare(plan=...)": plan is not None,
            "prepare(defer=...)": defer is not None,
            "prepare(buffers='average')": buffers == "average",
            "prepare() of a sharded model": is_sharded(model),
            "prepare() again": self.local is not None and self.local.model is model,
            "prepare() of a second model": self.local is not None,
        }
        unable: ValueError | GradlaneError | None = None
        try:
            check_arguments(model, optimizer)
            self._check_buffers(buffers)
            for call, is_refused in refused.items():
                if is_refused:
                    raise UsageError(call_refusal(call))
        except (GradlaneError, ValueError) as error:
            # The others are on their way to the meeting, and hear of it there.
            unable = error
        agree_on_plan(self._meet(), None, {}, unable)
        self.local = LocalModel(self._ctx, self._meet, model, optimizer, local)
        for member in members_of(optimizer):
            after_close.forget(member)
        own = [name for name, _ in model.named_buffers()]
        if own and buffers != "local" and self._ctx.rank_info.world_size > 1:
            warnings.warn(
                f"buffers={buffers!r} with update=gradlane.Local(...): {own[0]!r} and all other "
                'buffers stay each rank\'s own; give buffers="local" to say that this is meant',
                UserWarning,
                stacklevel=4,
            )

    def _check_buffers(self, buffers: str) -> None:
        if buffers not in MODES:
            raise ValueError(f"unknown buffers {buffers!r}; known are {', '.join(MODES)}")
        if buffers == "average" and self._ctx.options.is_asynchronous:
            raise ValueError(
                'buffers="average" with strategy="asgd": the ranks are in different steps, and '
                'there is no mean of their buffers; give buffers="local", and exchange them where '
                "all ranks meet"
            )

    def _check_goes_on(self, model: nn.Module, buffers: str, plan: PlanArgument) -> None:
        """Check that a model can be prepared in a session that goes on when ranks are lost.

        Raises:
            UsageError: the session has another prepared model.
            ValueError: its buffers or its plan do not go with it.
        """
        ctx = self._ctx
        if not ctx.options.going_on.on:
            return
        if any(one.model is not model for one in self.prepared):
            raise UsageError(
                "prepare() of a second model with going_on: each would agree on members by "
                "itself; prepare one module that holds both, such as nn.ModuleDict"
            )
        if buffers == "average":
            raise ValueError(
                'buffers="average" with going_on: in a step in which ranks are lost, averages '
                'would be over different numbers of ranks; use "broadcast" or "local"'
            )
        rule = plan if isinstance(plan, str) and plan in PLAN_RULES else ""
        check_plan_goes_on(ctx.options.going_on, rule, {})

    def refuse_sharded(self, call: str) -> None:
        """Refuse a call for all models where some are sharded.

        Raises:
            UsageError: some are.
        """
        if self.sharded:
            refuse_call(call)

    def find(self, model: nn.Module | None, call: str) -> PreparedModel:
        """Return a prepared model.

        Args:
            model: the user's; None: the only one.
            call: what it is for, as the program has written it.

        Raises:
            UsageError: it was not prepared, or none or several were.
        """
        if self.local is not None:
            raise UsageError(call_refusal(call))
        sharded = [one for one in self.sharded if model is None or one.model is model]
        if sharded and (model is not None or not self.prepared):
            refuse_call(call)
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

    def _prepared_of(self, model: nn.Module | None) -> PreparedModel | None:
        return next((one for one in self.prepared if one.model is model), None)

    def _prepared_before(self, model: nn.Module) -> PreparedModel | None:
        """Return an earlier preparation of a model; refuse a model that shares parameters."""
        again = self._prepared_of(model)
        for other in self.prepared:
            if other is not again and other.shares_with(model):
                raise ValueError(
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
