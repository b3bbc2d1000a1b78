"""A session's own plan: some steps are recorded, rank 0 simulates, and all ranks switch together.

The recording subtracts waits for other ranks, so training goes on as usual. All ranks count the
same steps and decide after the same one.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gradlane.errors import GradlaneError, RefusedError
from gradlane.formats.link_report import LinkReport
from gradlane.formats.profile import Profile, ProfileError
from gradlane.formats.rates import format_rate
from gradlane.formats.untrusted import escaped
from gradlane.planning.planner.coordinator import Coordinator
from gradlane.planning.planner.reasons import format_value
from gradlane.planning.profiler.recorder import Recorder
from gradlane.training.factors.factored_weights import layers_by_weight
from gradlane.training.model.prepared import PreparedModel
from gradlane.training.node.layout import agree_on_layout
from gradlane.training.node.rules import AUTO, with_local
from gradlane.training.options.options import Options
from gradlane.training.options.strategy import ROWS, LocalSums
from gradlane.training.plans.plan import Plan, parse_plan
from gradlane.training.plans.settings import LEARNING_STEPS, ClusterFacts, Settings
from gradlane.training.rendezvous.environment import own_processors
from gradlane.training.rendezvous.rendezvous import RendezvousScope

BUDGET_S = 8.0
"""Approximate longest pause of training for the simulations, in seconds."""

_log = logging.getLogger("gradlane")


class PlanLearning:
    """Records one model's first steps and decides its plan."""

    def __init__(
        self,
        learner: PreparedModel,
        links: LinkReport,
        options: Options,
        open_scope: Callable[[], RendezvousScope],
        on_plan: Callable[[Plan], None],
        rule: str = "auto",
    ) -> None:
        """Start to record.

        Args:
            learner: the connected model.
            links: measured between the ranks.
            options: of its connection.
            open_scope: opens a rendezvous scope.
            on_plan: called with the plan, between two steps, on all ranks after the same one.
            rule: for choosing schemes, a key of `PLAN_RULES`.
        """
        self._learner = learner
        self._links = links
        self._options = options
        self._open_scope = open_scope
        self._on_plan = on_plan
        self._rule = rule
        self._recorder: Recorder | None = None
        self._obstacle = ""
        self._is_recording = False
        self._has_ended = False
        try:
            self._recorder = Recorder(learner.model)
            self._recorder.attach()
        except ValueError as error:
            self._obstacle = str(error)

    def after_step(self) -> None:
        """Record the end of a training step, and decide after the last recorded one.

        Raises:
            GradlaneError: a rank was lost, or could not switch.
        """
        steps = self._learner.steps
        if self._has_ended or steps.phases.failure.error is not None:
            return
        if self._recorder is not None:
            if self._is_recording:
                self._recorder.end_step()
            self._recorder.begin_step()
            self._is_recording = True
        # Inside join() ranks may be out of data, and inside no_sync() no gradients were sent.
        if steps.step >= LEARNING_STEPS and not steps.in_join and not steps.phases.accumulates:
            self.stop()
            self._on_plan(self._decide())

    def stop(self) -> None:
        """Stop recording."""
        self._has_ended = True
        if self._recorder is not None:
            self._recorder.detach()

    def _decide(self) -> Plan:
        scope = self._open_scope()
        rank_info = scope.rank_info
        profile = self._profile()
        ranks_per_node = _ranks_per_node(self._options, scope)
        scope.put(f"compute/{rank_info.rank}", json.dumps(profile.compute_s if profile else None))
        if rank_info.rank != 0:
            return parse_plan(scope.get("decided", 0).decode(), "rank 0's plan")
        times_s = [
            json.loads(scope.get(f"compute/{rank}", rank)) for rank in range(rank_info.world_size)
        ]
        plan = self._plan(
            profile, max((one for one in times_s if one), default=0.0), ranks_per_node
        )
        scope.put("decided", json.dumps(plan.to_json()))
        log_plan(plan)
        return plan

    def _profile(self) -> Profile | None:
        if self._recorder is None:
            return None
        try:
            return self._recorder.profile(type(self._learner.model).__name__)
        except (ProfileError, RuntimeError) as error:
            self._obstacle = str(error)
            return None

    def _plan(self, profile: Profile | None, slowest_s: float, ranks_per_node: int) -> Plan:
        """Make the plan, on rank 0; without a usable profile the settings stay as they are."""
        base = Settings.of(self._options)
        if ranks_per_node == 1:
            base = replace(base, local=None)
        _, lanes = self._options.network.thread_counts(
            own_processors(os.environ), self._links.rate_bps
        )
        try:
            facts = ClusterFacts(
                workers=self._links.workers,
                rate_bps=self._links.rate_bps,
                latency_s=self._links.latency_s,
                update=self._options.update_place,
                servers=self._options.servers,
                ranks_per_node=ranks_per_node,
                stragglers=self._options.stragglers.rule,
                clips=bool(self._learner.steps.stages.clipping.norms),
                lanes=lanes,
            )
            if profile is not None and profile.compute_s > 0.0:
                # Every step waits for the slowest rank.
                profile = profile.scaled(max(1.0, slowest_s / profile.compute_s))
                coordinator = Coordinator(
                    self._with_available_factors(profile),
                    facts,
                    base=base,
                    source="probed",
                    rule=self._rule,
                    any_rounding=not self._options.strategy.exact_order,
                )
                return self._keep_given_factors(coordinator.plan(budget_s=BUDGET_S))
        except (ValueError, RuntimeError) as error:
            if isinstance(error, GradlaneError) and not isinstance(error, RefusedError):
                raise
            self._obstacle = str(error)
        # An error may have several lines; the texts of a plan are printable.
        obstacle = escaped(self._obstacle or "no step was recorded")
        reason = f"The settings stay as they are: {obstacle}."
        unknown: dict[str, Any] = {}
        facts = ClusterFacts(
            self._links.workers,
            self._links.rate_bps,
            update=self._options.update_place,
            servers=self._options.servers,
            stragglers=self._options.stragglers.rule,
        )
        name = type(self._learner.model).__name__
        return Plan(name, facts, "probed", base, prediction=unknown, summary=reason)

    def _with_available_factors(self, profile: Profile) -> Profile:
        """Remove the layers of tensors whose gradient this model cannot provide as factors."""
        layers = layers_by_weight(self._learner.model)
        weights = dict(self._learner.model.named_parameters())
        tensors = tuple(
            tensor if id(weights.get(tensor.name)) in layers else replace(tensor, layer=None)
            for tensor in profile.tensors
        )
        return replace(profile, tensors=tensors)

    def _keep_given_factors(self, plan: Plan) -> Plan:
        """Keep the session's own factors if the plan may not change any bit."""
        if not (self._options.strategy.factors and self._options.strategy.exact_order):
            return plan
        given = self._learner.schemes
        reason = "as the session says: what adds up in another order is another result"
        kept = tuple(
            replace(tensor, scheme=given[tensor.name], reason=f"{given[tensor.name]}: {reason}")
            if given[tensor.name] != ROWS
            else tensor
            for tensor in plan.tensors
        )
        return replace(plan, tensors=kept)


def _ranks_per_node(options: Options, scope: RendezvousScope) -> int:
    """Return the number of ranks on each of several nodes; a collective call.

    It is 1 if nodes differ, there is a single node, or the options exclude sums on nodes: each rank
    is then planned for as if it had a port of its own.
    """
    wanted = with_local(replace(options, local=LocalSums(AUTO)))
    layout = agree_on_layout(wanted, scope, os.environ) if wanted.local.mode == AUTO else None
    return 1 if layout is None else layout.local_size


def log_plan(plan: Plan) -> None:
    """Log the measurements and each choice with its reason to the logger `gradlane`."""
    _log.info(
        "plan: %d ranks, %s in both directions at once, %.3g ms one way",
        plan.facts.workers,
        format_rate(plan.facts.rate_bps),
        plan.facts.latency_s * 1e3,
    )
    for choice in plan.choices:
        _log.info(
            "plan: %s %s: %s", choice["setting"], format_value(choice["value"]), choice["reason"]
        )
    _log.info("plan: %s", plan.summary)
