"""The command `gradlane plan`: each choice with its reason, and the plan as a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from gradlane.planning.advice.ways import find_ways
from gradlane.planning.planner.coordinator import Coordinator
from gradlane.planning.planner.reasons import format_value
from gradlane.planning.planner.search import candidate_count
from gradlane.planning.planner.simulations import planned_cluster
from gradlane.planning.schemes.costs import SCHEMES
from gradlane.planning.simulation.costs import MachineCosts
from gradlane.planning.simulation.grid import simulate
from gradlane.planning.simulation.profiles import Profile
from gradlane.report.console import print_written
from gradlane.training.monitoring.summary import WORTH_A_MOVE, beside_ddp
from gradlane.training.options.codec_choice import (
    check_codecs,
    codec_rules,
    rules_text,
    unused_codec_option,
)
from gradlane.training.options.codec_options import RAW
from gradlane.training.plans.plan import Plan
from gradlane.training.plans.settings import ClusterFacts, Settings


def run_plan(
    profile: Profile,
    facts: ClusterFacts,
    *,
    budget_s: float,
    console: Console,
    rule: str = "auto",
    costs: MachineCosts | None = None,
    codec: str = RAW,
    any_rounding: bool = False,
    fewer: Sequence[str] = (),
    path: Path | None = None,
) -> Plan:
    """Make a plan, save it, and print each choice with its reason.

    Args:
        profile: what a step computes.
        facts: the cluster.
        budget_s: seconds that simulations may take, about.
        console: where to print.
        rule: how schemes are chosen, a key of `PLAN_RULES`.
        costs: constants of the cluster's machines; None: the simulator's own.
        codec: one that may be used, as for `gradlane.init`.
        any_rounding: whether schemes may be chosen that add up in another order than that of the
            ranks: rings, factors.
        fewer: of `ways.KINDS`: what may change what is learned where exact training is not enough.
            The plan itself does not change.
        path: where the plan goes, or None.

    Raises:
        ValueError: the codec is unknown, the budget is not positive, the rule is unknown, or the
            simulator refuses something.
    """
    if not budget_s > 0.0:
        raise ValueError(f"budget-s is {budget_s}; give a number of seconds above 0")
    rules = codec_rules(codec)
    check_codecs(rules)
    # With a codec no plan changes between servers and a ring.
    unused = unused_codec_option(rules, has_ring=False, encodes_means=facts.update == "worker")
    if unused:
        raise ValueError(unused)
    if any_rounding and rule != "auto":
        raise ValueError(
            f"any-rounding has no effect with plan {rule}, whose rule says the scheme of each "
            "layer: leave it out, or use plan auto"
        )
    if fewer and facts.update != "worker":
        raise ValueError(
            f"fewer has no effect with update={facts.update}, whose servers send parameters: leave "
            "one of both out"
        )
    base = Settings() if rules == RAW else Settings(codec=rules_text(rules))
    coordinator = Coordinator(
        profile, facts, base=base, rule=rule, costs=costs, any_rounding=any_rounding
    )
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn())
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as progress:
        task = progress.add_task("", total=candidate_count())
        plan = coordinator.plan(budget_s=budget_s, on_simulated=lambda: progress.advance(task))
    if path is not None:
        plan.save(path)
    print_plan(console, plan)
    if rule != "auto":
        print_schemes(console, coordinator)
    if rules != RAW:
        print_codecs(console, plan)
    console.print(answer_of(plan.prediction, plan.summary), highlight=False)
    if fewer:
        console.print(way_of(profile, plan, fewer, costs), highlight=False)
    print_written(console, path)
    return plan


def way_of(
    profile: Profile, plan: Plan, fewer: Sequence[str], costs: MachineCosts | None = None
) -> str:
    """Return the smallest change that is enough on a plan's cluster, in words.

    Args:
        profile: what a step computes.
        plan: for exact training it counts without its codec.
        fewer: of `ways.KINDS`: what may change what is learned.
        costs: constants of the cluster's machines; None: the simulator's own.
    """
    exact = planned_cluster(plan.facts, replace(plan.settings, codec=None), costs)
    (found,) = find_ways(
        [exact], [simulate(profile, exact)[0]], fewer, lambda one: simulate(profile, one)[0]
    )
    return found.text


def answer_of(prediction: Mapping[str, Any], summary: str) -> str:
    """Return what a plan gives, behind the advice to stay with DDP where that is as fast."""
    ddp_s, step_s = prediction.get("ddp_step_s"), prediction.get("step_s")
    if ddp_s is None or step_s is None:
        return summary
    if ddp_s >= WORTH_A_MOVE * step_s:
        return f"{summary} {beside_ddp(ddp_s, step_s)}."
    return (
        f"For speed alone stay with DDP: it would take {ddp_s * 1e3:.1f} ms a step with its best "
        f"bucket size, this plan {step_s * 1e3:.1f} ms. Among gradlane's own settings: {summary}"
    )


def print_schemes(console: Console, coordinator: Coordinator) -> None:
    """Print the scheme of every layer that has factors, and what each scheme would cost."""
    table = Table()
    for name in ("layer", "scheme", *(f"{scheme} (millions)" for scheme in SCHEMES)):
        table.add_column(name, justify="left" if name in ("layer", "scheme") else "right")
    for name in coordinator.query("layers"):
        choice = coordinator.best_scheme(name)
        if len(choice.costs) == 1:
            continue
        costs = {cost.scheme: f"{cost.node_floats / 1e6:.2f}" for cost in choice.costs}
        table.add_row(name, choice.scheme, *(costs.get(scheme, "") for scheme in SCHEMES))
    if table.row_count:
        console.print(table)


def print_codecs(console: Console, plan: Plan) -> None:
    """Print which tensor travels in which codec, and why."""
    table = Table()
    for name in ("tensor", "elements", "codec", "reason"):
        table.add_column(name, justify="right" if name == "elements" else "left")
    for tensor in plan.tensors:
        reason = tensor.reason.rpartition("codec: ")[2]
        table.add_row(tensor.name, f"{tensor.numel:,}", tensor.codec, reason)
    console.print(table)


def print_plan(console: Console, plan: Plan) -> None:
    """Print a plan."""
    facts, figures = plan.facts, plan.prediction
    console.print(
        f"{plan.model}: {len(plan.tensors)} tensors, {figures['compute_s'] * 1e3:.1f} ms of "
        f"compute, {facts.where}, latency "
        f"{facts.latency_s * 1e3:g} ms",
        highlight=False,
    )
    table = Table()
    # Encoded steps are other steps: each kind has a column of its own.
    steps = [_steps_ms(choice) for choice in plan.choices]
    codecs = list(dict.fromkeys(codec for by_codec in steps for codec in by_codec))
    columns = ["step ms" if codec == RAW else f"in {codec}" for codec in codecs]
    for name in ("setting", "choice", *columns, "reason"):
        table.add_column(name, justify="right" if name in columns else "left")
    for choice, by_codec in zip(plan.choices, steps, strict=True):
        table.add_row(
            choice["setting"],
            format_value(choice["value"]),
            *(by_codec.get(codec, "") for codec in codecs),
            choice["reason"],
        )
    for scheme in sorted({tensor.scheme for tensor in plan.tensors}):
        here = [tensor for tensor in plan.tensors if tensor.scheme == scheme]
        slices = sum(tensor.slices for tensor in here)
        empty = ("" for _ in codecs)
        table.add_row("scheme", scheme, *empty, f"tensors: {len(here)}, slices: {slices}")
    console.print(table)


def _steps_ms(choice: Mapping[str, Any]) -> dict[str, str]:
    """Return the steps of a choice by their codec: of the choice of one, those of both."""
    steps_s = {choice["codec"]: choice["step_s"]}
    if choice["setting"] == "codec":
        steps_s = {one["value"]: one["step_s"] for one in choice["tried"]}
    return {codec: f"{step_s * 1e3:.1f}" for codec, step_s in steps_s.items()}
