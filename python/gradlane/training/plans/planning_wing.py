"""The only way from training to planning: imported late, for `plan="auto"` and the calls of
`session.planning`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

from gradlane.formats.link_report import LinkReport
from gradlane.training.connection import SessionContext
from gradlane.training.model.prepared import PreparedModel
from gradlane.training.options.options import Options
from gradlane.training.plans.plan import Plan
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.rendezvous import RendezvousScope


class PlanSearch(Protocol):
    """Records a model's first steps and finds a plan for it."""

    def after_step(self) -> None:
        """Record the end of a training step."""

    def stop(self) -> None:
        """Stop recording."""


class ChosenScheme(Protocol):
    """The chosen scheme of one layer; see `gradlane.planning.planner.information_book`."""

    @property
    def scheme(self) -> str:
        """The cheapest one that the rule allows."""

    @property
    def costs(self) -> tuple[Any, ...]:
        """Of each scheme that fits, the cheapest first: `scheme` and `node_floats`."""

    @property
    def reason(self) -> str:
        """The reason in words."""


class Book(Protocol):
    """Facts of the cluster and a model that all ranks know."""

    def query(self, *names: str) -> Any:
        """Read entries."""

    def layer(self, layer: str | int) -> Any:
        """Return a layer by its name or its index."""

    def best_scheme(self, layer: Any, *, batch_size: int, rule: str) -> ChosenScheme:
        """Choose the scheme that moves the fewest numbers for a layer."""


def open_book(
    prepared: PreparedModel, options: Options, rank_info: RankInfo, links: LinkReport | None
) -> Book:
    """Return the book of a model; see `gradlane.planning.planner.information_book`."""
    module: Any = importlib.import_module("gradlane.planning.planner.information_book")
    book: Book = module.session_book(prepared, options, rank_info, links)
    return book


def measure_links(
    ctx: SessionContext,
    scope: RendezvousScope,
    *,
    window_s: float,
    directions: bool,
    on_phase: Callable[[str], None],
) -> LinkReport:
    """Measure bandwidth and latency between all ranks; see `gradlane.planning.probe.links`."""
    links: Any = importlib.import_module("gradlane.planning.probe.links")
    report: LinkReport = links.probe(
        ctx, scope, window_s=window_s, directions=directions, on_phase=on_phase
    )
    return report


def start_plan_search(
    prepared: PreparedModel,
    links: LinkReport,
    options: Options,
    meet: Callable[[], RendezvousScope],
    on_plan: Callable[[Plan], None],
    rule: str,
) -> PlanSearch:
    """Start to record a model; see `gradlane.planning.planner.plan_while_training`."""
    learning: Any = importlib.import_module("gradlane.planning.planner.plan_while_training")
    search: PlanSearch = learning.PlanLearning(prepared, links, options, meet, on_plan, rule)
    return search
