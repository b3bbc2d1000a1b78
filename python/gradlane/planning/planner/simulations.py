"""Prediction of a step time by one simulation, and the cost of that simulation."""

from __future__ import annotations

import math

from gradlane.planning.planner.frame_count import frame_count
from gradlane.planning.schemes.layers import Schemes, simulated_schemes
from gradlane.planning.simulation.costs import MachineCosts
from gradlane.planning.simulation.hosts import USUAL_PROCESSORS, Host, host_with
from gradlane.planning.simulation.profiles import Profile
from gradlane.planning.simulation.scenarios import Cluster, run_scenario, scenario_of
from gradlane.training.node.rules import OFF
from gradlane.training.options.codec_options import RAW
from gradlane.training.options.strategy import SPLITTING_STRATEGIES
from gradlane.training.plans.settings import ClusterFacts, Settings, local_of_session

_WINDOW_PER_BUFFER_BYTE = 126_000 / 65_536
"""Bytes in flight for each byte of the requested send buffer: the kernel doubles it and subtracts
its overhead."""
_LATE_STEPS = 16
"""Simulated steps with a straggler rule, whose deadlines begin after five steps."""


def predict_step_s(
    profile: Profile,
    facts: ClusterFacts,
    settings: Settings,
    costs: MachineCosts | None = None,
    schemes: Schemes = (),
) -> float:
    """Simulate a cluster with some settings and return the step time, in seconds.

    Args:
        profile: what a step computes.
        facts: the cluster.
        settings: of the engine.
        costs: constants of its machines in place of the simulator's own.
        schemes: layers whose scheme is not the strategy's.

    Raises:
        ValueError: the simulator refuses the profile or the settings; the text names the field.
    """
    cluster = planned_cluster(facts, settings, costs, schemes)
    scenario = scenario_of(profile, cluster)
    scenario["frame_bytes"] = settings.frame_bytes
    scenario["update"] = facts.update
    window_bytes = round(settings.send_buffer_bytes * _WINDOW_PER_BUFFER_BYTE)
    scenario["network"]["send_buffer_bytes"] = window_bytes
    report = run_scenario(scenario)["report"]
    late = report.get("stragglers")
    return float(report["step_s"] if late is None else late["others_step_s_mean"])


def planned_cluster(
    facts: ClusterFacts,
    settings: Settings,
    costs: MachineCosts | None = None,
    schemes: Schemes = (),
) -> Cluster:
    """Return a cluster with the settings of a plan, as far as every simulation knows them.

    Args:
        facts: the cluster.
        settings: of the engine.
        costs: constants of its machines in place of the simulator's own.
        schemes: layers whose scheme is not the strategy's.
    """
    return Cluster(
        workers=facts.workers,
        rate_bps=facts.rate_bps,
        servers=facts.servers,
        serving=facts.serving,
        strategy=settings.strategy,
        latency_s=facts.latency_s,
        slice_elems=settings.slice_elems,
        codec=settings.codec or RAW,
        schemes=schemes,
        ranks_per_node=facts.ranks_per_node,
        local=local_of_session(settings, facts) or OFF,
        stragglers=facts.stragglers,
        clip=facts.clips,
        steps=_steps(facts),
        host=host_with(USUAL_PROCESSORS) if facts.lanes is None else Host(lanes=facts.lanes),
        costs=costs or MachineCosts(),
    )


def _steps(facts: ClusterFacts) -> int:
    """Return the number of simulated steps; with a straggler rule earlier steps decide lateness."""
    return _LATE_STEPS if facts.leaves_out else Cluster.steps


def frames_to_simulate(
    profile: Profile, facts: ClusterFacts, settings: Settings, schemes: Schemes = ()
) -> int:
    """Return the approximate number of frames of a simulation, which decides its cost."""
    splits = settings.strategy in SPLITTING_STRATEGIES
    split = None if splits else settings.slice_elems_in_force
    frames = 0
    factored = {
        name: scheme["block_bytes"]
        for name, scheme in simulated_schemes(profile, schemes, facts.workers).items()
        if "block_bytes" in scheme
    }
    for tensor in profile.tensors:
        if tensor.name in factored:
            # They travel to every other rank, and no result comes back.
            frames += math.ceil(frame_count(factored[tensor.name], settings.frame_bytes) / 2)
            continue
        elems = min(
            split or math.ceil(tensor.numel / facts.owners),
            max(1, tensor.numel),
        )
        slices = math.ceil(max(1, tensor.numel) / elems)
        slice_bytes = max(1.0, tensor.size_bytes / slices)
        frames += slices * frame_count(slice_bytes, settings.frame_bytes)
    return _steps(facts) * 2 * (facts.workers - 1) * frames
