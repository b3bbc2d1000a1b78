"""Simulations for figures: each done once, two at a time, with progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradlane.planning.simulation.costs import MachineCosts
from gradlane.planning.simulation.profiles import Profile, find_profile, synthetic_profile
from gradlane.planning.simulation.scenarios import FREE_HOST, Cluster, run_scenario, scenario_of
from gradlane.planning.simulation.threads import usual_threads

FREE = MachineCosts(host=FREE_HOST)
"""A host that takes no time: what remains is the network."""
SLOW_SERVER = MachineCosts(host={**FREE_HOST, "reduce_byte_s": 1e-9})
"""One whose sums run at 1 GB/s a contribution, as of a single-threaded server of the time."""
MEASURED = MachineCosts()
"""The project's own machine, as it was measured (docs/simulator.md)."""
DRAWN = ("kvstore", "deferred-pull")
"""Strategies that draw a server for each smaller tensor."""
DRAWS = 3


@dataclass(frozen=True)
class Job:
    """One simulation: a profile's name, seconds a batch, and the cluster."""

    model: str
    cluster: Cluster
    batch_time_s: float | None = None
    interval_s: float = 0.0
    """Width of the intervals over which the use of ports is given; 0: not at all."""


class Simulations:
    """Runs jobs and remembers what came of them."""

    def __init__(
        self,
        on_simulated: Callable[[str], None] = lambda text: None,
        profile_dir: Path | None = None,
    ) -> None:
        """Begin with nothing.

        Args:
            on_simulated: called with a few words after each simulation.
            profile_dir: folder with recorded profiles, `MODEL-*.json`, used in place of those made
                from operation counts where a figure was made from such recordings.
        """
        self._on_simulated = on_simulated
        self.profile_dir = profile_dir
        self._reports: dict[str, dict[str, Any]] = {}

    def recorded(self, model: str, stem: str) -> Profile | None:
        """Return the recorded profile of a model, where a folder with it was given."""
        if self.profile_dir is None:
            return None
        path = self.profile_dir / f"{stem}.json"
        return find_profile(str(path)) if path.is_file() else None

    def run(self, jobs: Iterable[Job]) -> list[dict[str, Any]]:
        """Return the report of each job."""
        jobs = list(jobs)
        new = {repr(job): job for job in jobs if repr(job) not in self._reports}
        with ThreadPoolExecutor(usual_threads()) as pool:
            self._reports.update(zip(new, pool.map(self._simulate, new.values()), strict=True))
        return [self._reports[repr(job)] for job in jobs]

    def steps_s(self, jobs: Iterable[Job]) -> list[float]:
        """Return the step time of each job."""
        return [float(report["step_s"]) for report in self.run(jobs)]

    def profile_steps_s(
        self, jobs: Iterable[tuple[Profile, Cluster]], *, frame_bytes: int
    ) -> list[float]:
        """Return the step time of profiles on clusters; these are not remembered.

        Args:
            jobs: what is computed, and where.
            frame_bytes: payload of a frame at most.
        """

        def simulate(job: tuple[Profile, Cluster]) -> float:
            profile, cluster = job
            scenario = scenario_of(profile, cluster)
            scenario["frame_bytes"] = frame_bytes
            step_s = float(run_scenario(scenario)["report"]["step_s"])
            self._told(profile.model, cluster)
            return step_s

        with ThreadPoolExecutor(usual_threads()) as pool:
            return list(pool.map(simulate, jobs))

    def _told(self, model: str, cluster: Cluster) -> None:
        rate = cluster.rate_bps / 1e9
        self._on_simulated(f"{model}, {cluster.strategy}, {cluster.workers} at {rate:g} Gbit/s")

    def _simulate(self, job: Job) -> dict[str, Any]:
        profile = synthetic_profile(job.model, job.batch_time_s)
        scenario = scenario_of(profile, job.cluster)
        if job.interval_s:
            scenario["outputs"]["utilization_interval_s"] = job.interval_s
        report: dict[str, Any] = run_scenario(scenario)["report"]
        self._told(job.model, job.cluster)
        return report


def with_times(profile: Profile, forward_s: float, backward_s: float) -> Profile:
    """Return a profile whose forward and backward are each stretched to a time of its own."""
    before_s = profile.compute_s - profile.forward_s
    return replace(
        profile,
        forward_s=forward_s,
        compute_s=forward_s + backward_s,
        tensors=tuple(
            replace(
                tensor,
                need_s=min(tensor.need_s * forward_s / profile.forward_s, forward_s),
                ready_s=min(
                    forward_s + (tensor.ready_s - profile.forward_s) * backward_s / before_s,
                    forward_s + backward_s,
                ),
            )
            for tensor in profile.tensors
        ),
    )


def gains(
    simulations: Simulations,
    model: str,
    cluster: Cluster,
    *,
    over: str = "kvstore",
    strategies: Iterable[str] = ("p3",),
    batch_time_s: float | None = None,
) -> dict[str, float]:
    """Return by how many percent strategies have more throughput than another one."""
    names = list(strategies)
    steps = simulations.steps_s(
        Job(model, replace(cluster, strategy=name), batch_time_s) for name in names
    )
    base_s = drawn_step_s(simulations, model, replace(cluster, strategy=over), batch_time_s)
    return {
        name: 100.0 * (base_s / step_s - 1.0) for name, step_s in zip(names, steps, strict=True)
    }


def drawn_step_s(
    simulations: Simulations, model: str, cluster: Cluster, batch_time_s: float | None = None
) -> float:
    """Return the step time, the mean over draws where servers are drawn at random."""
    draws = DRAWS if cluster.strategy in DRAWN else 1
    steps = simulations.steps_s(
        Job(model, replace(cluster, seed=seed), batch_time_s) for seed in range(draws)
    )
    return sum(steps) / draws
