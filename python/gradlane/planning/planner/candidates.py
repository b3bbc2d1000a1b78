"""Simulation of candidates: settings, and layers with schemes of their own, on one cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from gradlane.planning.planner.simulations import frames_to_simulate, predict_step_s
from gradlane.planning.schemes.layers import Schemes
from gradlane.planning.simulation.costs import MachineCosts
from gradlane.planning.simulation.profiles import Profile
from gradlane.planning.simulation.threads import usual_threads
from gradlane.training.plans.settings import ClusterFacts, Settings

TIE = 0.01
"""Share of a step by which a candidate must be faster than the current one to be chosen."""
_FRAMES_PER_S = 400_000
"""Frames that one thread of a slow machine simulates in a second."""


class Candidate(NamedTuple):
    """Settings to simulate, and layers whose scheme is not the strategy's."""

    settings: Settings
    schemes: Schemes = ()


class CandidateSimulator:
    """Simulates candidates of one profile on one cluster, each once, several at a time."""

    def __init__(
        self,
        profile: Profile,
        facts: ClusterFacts,
        budget_s: float,
        costs: MachineCosts | None,
        on_simulated: Callable[[], None],
    ) -> None:
        """Start without results.

        Args:
            profile: what a step computes.
            facts: of the cluster.
            budget_s: seconds in all; candidates that would exceed it are skipped.
            costs: constants of the cluster's machines; None: the simulator's own.
            on_simulated: called after each simulation.
        """
        self._profile = profile
        self._facts = facts
        self._deadline_s = time.monotonic() + budget_s
        self._costs = costs
        self._on_simulated = on_simulated
        self._step_s: dict[Candidate, float] = {}
        self._threads = usual_threads()

    @property
    def speed(self) -> float | None:
        """Operations a second of the accelerators, if the machine's constants have it."""
        return None if self._costs is None else self._costs.operations_per_s

    def step_s(self, candidate: Candidate) -> float | None:
        """Return the predicted step time; None if the candidate was skipped."""
        return self._step_s.get(candidate)

    def run(self, candidates: Sequence[Candidate]) -> None:
        """Simulate the new candidates that fit into the remaining time."""
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
