"""Variants of simulated clusters, which tell what their steps wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from gradlane.planning.simulation.grid import SimulatedRow, simulate
from gradlane.planning.simulation.profiles import Profile
from gradlane.planning.simulation.scenarios import Cluster, has_many_ranks
from gradlane.planning.simulation.threads import in_threads


@dataclass(frozen=True)
class Variant:
    """A cluster, and how many times smaller the gradients are that it exchanges."""

    cluster: Cluster
    smaller: float = 1.0


class Variants:
    """Simulates variants of clusters, each once, and several at a time."""

    def __init__(
        self,
        profile: Profile,
        threads: int = 1,
        on_simulated: Callable[[], None] = lambda: None,
    ) -> None:
        """Start without any.

        Args:
            profile: of a step.
            threads: simulations at a time.
            on_simulated: called after each.
        """
        self._profile = profile
        self._threads = threads
        self._on_simulated = on_simulated
        self._rows: dict[str, SimulatedRow] = {}

    def simulate(self, variants: Iterable[Variant]) -> list[SimulatedRow]:
        """Return the row of each variant; those that are not known yet are simulated."""
        keyed = [(repr(variant), variant) for variant in variants]
        missing = {key: variant for key, variant in keyed if key not in self._rows}
        for key, row in zip(
            missing, in_threads(self._row, list(missing.values()), self._threads), strict=True
        ):
            self._rows[key] = row
            self._on_simulated()
        return [self._rows[key] for key, _ in keyed]

    def saved_s(self, row: SimulatedRow, variant: Variant) -> float:
        """Return by how many seconds the step of a variant is shorter than that of a row."""
        (changed,) = self.simulate([variant])
        if has_many_ranks(variant.cluster):
            return row.first_step_s - changed.first_step_s
        return row.step_s - changed.step_s

    def _row(self, variant: Variant) -> SimulatedRow:
        profile, cluster = self._profile, variant.cluster
        if variant.smaller != 1.0:
            tensors = tuple(
                replace(tensor, shape=(max(1, int(tensor.numel / variant.smaller)),))
                for tensor in profile.tensors
            )
            profile = replace(profile, tensors=tensors)
        if has_many_ranks(cluster):
            cluster = replace(cluster, steps=1)
        return simulate(profile, cluster)[0]
