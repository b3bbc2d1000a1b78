"""The part of `Session` that models come in by, and that says what they travel in."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gradlane.errors import GradlaneError, UsageError
from gradlane.formats.link_report import LinkReport
from gradlane.training.connection import SessionContext
from gradlane.training.model.buffers import MODES
from gradlane.training.model.optimizers import steps_per_parameter
from gradlane.training.model.prepared import CLOSE_TIMEOUT_S, PreparedModel
from gradlane.training.model.validation import check_arguments
from gradlane.training.options.codec_choice import CodecChoice
from gradlane.training.options.options import SFB
from gradlane.training.options.stragglers import check_schemes
from gradlane.training.plans.agreement import PlanArgument, agree_on_plan
from gradlane.training.plans.in_force import ActivePlan
from gradlane.training.plans.plan import Plan
from gradlane.training.plans.planning_wing import measure_links
from gradlane.training.rendezvous.rendezvous import RendezvousScope

if TYPE_CHECKING:
    from gradlane.training.arrays.exchange import ArrayExchange

ModelType = TypeVar("ModelType", bound=nn.Module)
OptimizerType = TypeVar("OptimizerType", bound=Optimizer)


class SessionModels:
    """The models of a session."""

    _ctx: SessionContext
    _prepared: list[PreparedModel]
    _plans: ActivePlan

    def _check_open(self) -> None:
        raise NotImplementedError

    def _meet(self) -> RendezvousScope:
        raise NotImplementedError

    def _parts(self) -> list[PreparedModel | ArrayExchange]:
        raise NotImplementedError

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

        After `backward()`, `.grad` is the averaged gradient: whatever touches one, by whichever
        reference, waits for all of them, so that `torch.nn.utils.clip_grad_norm_` and `GradScaler`
        are right, and the update then waits, too. After `step()` whatever touches a parameter waits
        for its update, and `.grad` stays until `zero_grad()`.

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
                `update="server"` nothing happens to them either. What a program changes between
                steps, it changes alike on all ranks.
            plan: settings for this model in place of the session's: a plan or the path of a plan
                file, which only rank 0 needs to have; `"auto"`: measure the links, record some
                steps of this training, simulate, and switch to what is fastest, if anything is
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
        self._check_open()
        before: PreparedModel | None = None
        unable: ValueError | GradlaneError | None = None
        sizes: dict[str, int] = {}
        try:
            check_arguments(model, optimizer)
            if buffers not in MODES:
                raise ValueError(f"unknown buffers {buffers!r}; known are {', '.join(MODES)}")
            if not (plan is None or isinstance(plan, (Plan, str, os.PathLike))):
                raise UsageError(
                    f"prepare() was given plan={plan!r}: give a Plan, the path of a plan file, "
                    '"auto", "poseidon" or None'
                )
            if plan is not None and self._ctx.options.is_asynchronous:
                raise ValueError(
                    'plan= with strategy="asgd": plans choose among settings that give the same '
                    "results; asynchronous training is none of them"
                )
            sizes = _trained_sizes(model)
            before = self._prepared_before(model)
        except (GradlaneError, ValueError) as error:
            # The others are on their way to the meeting, and hear of it there.
            unable = error
        agreed = agree_on_plan(self._meet(), plan if unable is None else None, sizes, unable)
        place = self._ctx.rank_info
        if agreed.rule and place.serving:
            raise ValueError(
                f"plan={agreed.rule!r} while {place.serving} ranks only serve: a session finds "
                "plans for the ranks that train alone; `gradlane plan --servers separate="
                f"{place.serving}` writes one, to be given as plan="
            )
        schemes = {"poseidon": SFB} if agreed.rule == "poseidon" else {}
        if agreed.plan is not None:
            schemes = agreed.plan.schemes
        check_schemes(self._ctx.options.stragglers, schemes)
        residuals = None
        if before is not None:
            try:
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
            self._plans.plan = agreed.plan
        learns = agreed.rule != "" and place.world_size > 1
        links = self.probe(directions=False) if learns else None
        deferred = steps_per_parameter(optimizer) if defer is None else defer
        prepared = PreparedModel(ctx, self._meet, model, optimizer, deferred, buffers)
        if residuals is not None:
            prepared.residuals.load_state_dict(prepared.residuals.fitting(residuals))
        self._prepared.append(prepared)
        if links is not None:
            self._plans.learn(prepared, links, agreed.rule)
        if defer is None and not deferred and self._ctx.options.update == "worker":
            warnings.warn(
                f"{type(optimizer).__name__} is not known to treat each parameter by itself, "
                "so step() waits for all gradients; pass defer=True to prepare(), or give the "
                "class an attribute steps_per_parameter = True, if it does",
                UserWarning,
                stacklevel=2,
            )
        return model, optimizer

    @property
    def codecs(self) -> list[CodecChoice]:
        """Which codec each trained tensor of the models, and each array, travels in, and why."""
        return [choice for part in self._parts() for choice in part.codecs]

    @property
    def schemes(self) -> dict[str, str]:
        """How each trained tensor of the models is aggregated: `ps`, `ring` or `sfb`, by name."""
        found: dict[str, str] = {}
        for prepared in self._prepared:
            found.update(prepared.schemes)
        return found

    @property
    def plan(self) -> Plan | None:
        """The plan in force: the last one that was given, or found; None before."""
        return self._plans.plan

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
        self._check_open()
        return measure_links(
            self._ctx,
            self._meet(),
            window_s=window_s,
            directions=directions,
            on_phase=on_phase,
        )

    def _prepared_before(self, model: nn.Module) -> PreparedModel | None:
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

    def _part_with(self, prepared: PreparedModel) -> None:
        self._plans.forget(prepared)
        prepared.close(CLOSE_TIMEOUT_S)
        self._prepared.remove(prepared)


def _trained_sizes(model: nn.Module) -> dict[str, int]:
    """Numbers of elements that are averaged, by name; complex numbers are pairs."""
    return {
        name: parameter.numel() * (2 if parameter.is_complex() else 1)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not is_lazy(parameter) and parameter.numel() > 0
    }
