"""The command `gradlane plan`: each choice with its reason, and the plan as a file."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from gradlane.lab.rates import format_rate
from gradlane.planner.coordinator import Coordinator
from gradlane.planner.plan import Plan
from gradlane.planner.reasons import shown
from gradlane.planner.search import number_of_candidates
from gradlane.planner.settings import ClusterFacts
from gradlane.whatif.profiles import Profile


def run_plan(profile: Profile, facts: ClusterFacts, *, budget_s: float, console: Console) -> Plan:
    """Make a plan and print each choice with its reason.

    Args:
        profile: what a step computes.
        facts: the cluster.
        budget_s: seconds that simulations may take, about.
        console: where to print.

    Raises:
        ValueError: the budget is not positive, or the simulator refuses something.
    """
    if not budget_s > 0.0:
        raise ValueError(f"budget-s is {budget_s}; give a number of seconds above 0")
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=number_of_candidates())
        plan = Coordinator(profile, facts).plan(
            budget_s=budget_s, on_simulated=lambda: progress.advance(task)
        )
    print_plan(console, plan)
    return plan


def print_plan(console: Console, plan: Plan) -> None:
    """Print a plan."""
    facts, figures = plan.facts, plan.prediction
    console.print(
        f"{plan.model}: {len(plan.tensors)} tensors, {figures['compute_s'] * 1e3:.1f} ms of "
        f"compute, {facts.workers} workers at {format_rate(facts.rate_bps)}, latency "
        f"{facts.latency_s * 1e3:g} ms",
        highlight=False,
    )
    table = Table()
    for name in ("setting", "choice", "step ms", "reason"):
        table.add_column(name, justify="right" if name == "step ms" else "left")
    for choice in plan.choices:
        table.add_row(
            choice["setting"],
            shown(choice["value"]),
            f"{choice['step_s'] * 1e3:.1f}",
            choice["reason"],
        )
    for scheme in sorted({tensor.scheme for tensor in plan.tensors}):
        here = [tensor for tensor in plan.tensors if tensor.scheme == scheme]
        slices = sum(tensor.slices for tensor in here)
        table.add_row("scheme", scheme, "", f"{len(here)} tensors in {slices} slices")
    console.print(table)
    console.print(plan.summary, highlight=False)
