"""Agreement of all ranks on the plan that rank 0 was given.

Only rank 0 needs a plan file. If another rank has one, it must be the same plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Union

from gradlane.errors import GradlaneError, RanksDifferError
from gradlane.training.options.strategy import PLAN_RULES
from gradlane.training.plans.plan import Plan, PlanError, parse_plan, read_plan
from gradlane.training.rendezvous.rendezvous import RendezvousScope

PlanArgument = Union[Plan, str, "PathLike[str]", None]
"""Argument `plan` of `prepare`: a plan, the path of a plan file, a key of `PLAN_RULES`, or None."""


@dataclass(frozen=True)
class Agreed:
    """The plan, or the rule for one, of all ranks.

    Attributes:
        plan: the given plan, or None.
        rule: for finding a plan while training, a name of `PLAN_RULES`, or empty.
    """

    plan: Plan | None
    rule: str


@dataclass(frozen=True)
class _Own:
    """This rank's argument: its label in messages, and its plan if the rank has it."""

    label: str
    plan: Plan | None = None
    refused: str = ""
    from_rank_0: bool = False


def agree_on_plan(
    scope: RendezvousScope,
    given: PlanArgument,
    sizes: Mapping[str, int],
    unable: GradlaneError | ValueError | None = None,
) -> Agreed:
    """Check that all ranks were given the same plan, and return it; a collective call.

    Args:
        scope: for this agreement alone.
        given: this rank's argument.
        sizes: the trained parameters' numbers of elements, by name.
        unable: why this rank cannot take part with any plan; sent to the others.

    Raises:
        GradlaneError, ValueError: `unable`.
        ValueError: this rank's plan cannot be read, or is for another model.
        RanksDifferError: another rank's plan is, or the plans differ; on every rank.
        RendezvousError: a rank did not appear.
    """
    own = _read(given, scope.rank_info.rank)
    first = own
    if scope.rank_info.rank == 0:
        told = {
            "label": own.label,
            "plan": own.plan.to_json() if own.plan else None,
            "refused": own.refused,
        }
        scope.put("plan", json.dumps(told))
    else:
        told = json.loads(scope.get("plan", 0))
        plan = parse_plan(json.dumps(told["plan"]), "rank 0's plan") if told["plan"] else None
        first = _Own(str(told["label"]), plan, str(told["refused"]))
    unusable = str(unable or "") or own.refused or _unfit(first, sizes)
    problem = f"rank {scope.rank_info.rank} cannot take part: {unusable}" if unusable else ""
    if not unusable and not first.refused:
        problem = _difference(first, own, scope.rank_info.rank)
    verdict = _verdict(scope, problem)
    if unable is not None:
        raise unable
    if verdict != "ok":
        raise PlanError(unusable) if unusable else RanksDifferError(verdict)
    return Agreed(first.plan, first.label if first.label in PLAN_RULES else "")


def _read(given: PlanArgument, rank: int) -> _Own:
    if given is None:
        return _Own("no plan")
    if isinstance(given, Plan):
        return _Own(f"plan {given.digest}", given)
    path = fspath(given)
    if path in PLAN_RULES:
        return _Own(path)
    if rank != 0 and not Path(path).exists():
        return _Own(f"plan {path}", from_rank_0=True)
    try:
        plan = read_plan(path)
    except PlanError as error:
        return _Own(f"plan {path}", refused=str(error))
    return _Own(f"plan {plan.digest} ({path})", plan)


def _unfit(first: _Own, sizes: Mapping[str, int]) -> str:
    """Return why rank 0's plan does not fit this rank's model; empty if it does."""
    if first.plan is not None:
        try:
            first.plan.check_fits(sizes, first.label)
        except ValueError as error:
            return str(error)
    return ""


def _difference(first: _Own, own: _Own, rank: int) -> str:
    """Return how this rank's argument differs from rank 0's; empty if it does not."""
    if own.from_rank_0 and first.plan is not None:
        return ""
    if own.plan is not None and first.plan is not None:
        same = own.plan.digest == first.plan.digest
    else:
        same = own.label == first.label
    if same:
        return ""
    return f"rank 0 was given {first.label}, rank {rank} {own.label}: give all ranks the same"


def _verdict(scope: RendezvousScope, problem: str) -> str:
    """Tell rank 0 this rank's problem, and return the first problem of any rank."""
    rank_info = scope.rank_info
    if rank_info.rank == 0:
        problems = [problem]
        for rank in range(1, rank_info.world_size):
            problems.append(scope.get(f"plan/{rank}", rank).decode())
        scope.put("plan/verdict", next((one for one in problems if one), "ok"))
    else:
        scope.put(f"plan/{rank_info.rank}", problem)
    return scope.get("plan/verdict", 0).decode()
