"""`session.planning`: the plan in force, and what plans are made from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from gradlane.formats.link_report import LinkReport
from gradlane.training.plans.plan import Plan
from gradlane.training.plans.planning_wing import ChosenScheme
from gradlane.training.session.ending import SessionEnding
from gradlane.training.session.models import PreparedModels
from gradlane.training.session.world import World


class PlanningCalls:
    """Reads and measures what a plan says, and is made from."""

    def __init__(self, models: PreparedModels, world: World, ending: SessionEnding) -> None:
        """Offer the calls of a session.

        Args:
            models: follow plans.
            world: the ranks that this one is connected to.
            ending: knows whether the session is open.
        """
        self._models = models
        self._world = world
        self._ending = ending

    @property
    def plan(self) -> Plan | None:
        """The plan in force: the last given or found plan; None before."""
        return self._models.plans.plan

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
            on_phase: called with the name of the next measurement.

        Returns:
            The same report on every rank.

        Raises:
            ValueError: the window is not 0.05 to 60 seconds.
            RendezvousError: two ranks cannot reach each other; raised on every rank.
        """
        self._ending.check_open()
        self._world.ctx.membership.refuse_lost("planning.probe()")
        return self._models.measure_links(
            window_s=window_s, directions=directions, on_phase=on_phase
        )

    def query(self, *names: str, model: nn.Module | None = None) -> Any:
        """Read the coordinator's information book: what all ranks know, the same on every rank.

        No rank waits for another. After Poseidon's `Query` (Zhang et al. 2017, table 2).

        Args:
            names: `job`, `ranks`, `workers`, `servers` (ranks that own slices), `roles` and
                `addresses` (by rank: `worker`, `server` or `worker and server`; `host:port`, None
                for one that only talks to its own node), `nodes` (names of their machines),
                `strategy`, `update`, `model`, `gradient_bytes`, `layers`, `schemes` and `codecs`
                (in force, by tensor); `rate_bps` and `latency_s` once `probe()` has measured them;
                or a layer's name, which gives its `Layer`.
            model: the prepared model; None: the only one.

        Returns:
            The value of one name, or a tuple of those of several.

        Raises:
            ValueError: no name is given, or one is unknown.
            UsageError: the model is not prepared, or this rank only serves.
        """
        self._ending.check_open()
        return self._models.book(model, "planning.query()").query(*names)

    def best_scheme(
        self,
        layer: str | int,
        *,
        batch_size: int,
        rule: str = "poseidon",
        model: nn.Module | None = None,
    ) -> ChosenScheme:
        """Return the scheme that moves the fewest numbers for a layer, the same on every rank.

        No rank waits for another, and nothing changes: `prepare(plan="poseidon")` puts schemes in
        force. After Poseidon's `BestScheme` (Zhang et al. 2017, algorithm 1).

        Args:
            layer: its name, or its index in `query("layers")`.
            batch_size: vectors that a worker applies the layer to in a step: its samples, times
                words or patches where there are any. Give the same on every rank.
            rule: `poseidon`, the paper's, or `auto`, among all schemes that sessions run.
            model: the prepared model; None: the only one.

        Returns:
            `scheme`, `costs` (numbers that the busiest node sends and receives in each scheme that
            fits, the cheapest first) and `reason`.

        Raises:
            ValueError: there is no such layer or rule, or the batch is empty.
            UsageError: the model is not prepared, or this rank only serves.
        """
        self._ending.check_open()
        book = self._models.book(model, "planning.best_scheme()")
        return book.best_scheme(book.layer(layer), batch_size=batch_size, rule=rule)
