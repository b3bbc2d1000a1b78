"""Simulations of candidates: settings, and layers with schemes of their own, on one cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from gradlane.planning.planner.simulations import frames_to_simulate, predict_step_s
from gradlane.planning.schemes.layers import Schemes
from gradlane.planning.simulation.costs import MachineCosts
from gradlane.planning.simulation.profiles import Profile
from gradlane.training.plans.settings import ClusterFacts, Settings

TIE = 0.01
"""Share of a step by which something must be faster to be chosen over what is there."""
_FRAMES_PER_S = 400_000
"""Frames that one thread simulates in a second on a slow machine."""


class Candidate(NamedTuple):
    """What is simulated: settings, and layers whose scheme is not the strategy's."""

    settings: Settings
    schemes: Schemes = ()


class CandidateSimulator:
    """Simulations of one profile on one cluster, each done once, several at a time."""

    def __init__(
        self,
        profile: Profile,
        facts: ClusterFacts,
        budget_s: float,
        costs: MachineCosts | None,
        on_simulated: Callable[[], None],
    ) -> None:
        """Begin with none.

        Args:
            profile: what a step computes.
            facts: the cluster.
            budget_s: candidates that would take longer than what is left of it are left out.
            costs: constants of the cluster's machines in place of the simulator's own.
            on_simulated: called after each simulation.
        """
        self._profile = profile
        self._facts = facts
        self._deadline_s = time.monotonic() + budget_s
        self._costs = costs
        self._on_simulated = on_simulated
        self._step_s: dict[Candidate, float] = {}
        self._threads = min(4, os.cpu_count() or 1)

    @property
    def speed(self) -> float | None:
        """Operations a second of the accelerators, where the machine's constants say it."""
        return None if self._costs is None else self._costs.operations_per_s

    def step_s(self, candidate: Candidate) -> float | None:
        """Predicted step time; None if it was left out."""
        return self._step_s.get(candidate)

    def run(self, candidates: Sequence[Candidate]) -> None:
        """Simulate what was not simulated yet and fits into the time that is left."""
        new = [one for one in dict.fromkeys(candidates) if one not in self._step_s]
        with ThreadPoolExecutor(self._threads) as pool:
            for candidate, step_s in zip(new, pool.map(self._simulate, new), strict=True):
                if step_s is not None:
                    self._step_s[candidate] = step_s

    def _simulate(self, candidate: Candidate) -> float | None:
        settings, schemes = candidate
        frames = frames_to_simulate(self._profile, self._facts, settings, schemes)
        if time.monotonic() + frames / _FRAMES_PER_S > self._deadline_s:
            return None
        step_s = predict_step_s(self._profile, self._facts, settings, self._costs, schemes)
        self._on_simulated()
        return step_s
