"""Poseidon's systems by bytes, with the settings of the paper (section 5.1).

The model is `planning/schemes/step_time.py`: ports that carry table 1's bytes, and nothing else
that takes time.
"""

from __future__ import annotations

from functools import cache

from gradlane.planning.planner.coordinator import Coordinator
from gradlane.planning.schemes.layers import operations_per_s
from gradlane.planning.schemes.step_time import WHOLE, HybridStep, NodeCluster, hybrid_step
from gradlane.planning.simulation.grid import GOODPUT_SHARE
from gradlane.planning.simulation.profiles import Profile, synthetic_profile
from gradlane.training.plans.settings import ClusterFacts
from gradlane_papers.reproduction.comparison import Curve, first_above, given, published_of

BATCHES = {"googlenet": 128, "inception_v3": 32, "vgg19": 32, "vgg19_22k": 32, "resnet152": 32}
NODES = (1, 2, 4, 8, 16, 32)
SCHEDULES = {
    # What each system does: schemes by a rule, and when it begins to send.
    "ps": ("ps", "after"),
    "wfbp": ("ps", "ready"),
    "poseidon": ("poseidon", "ready"),
    "adam": ("adam", "ready"),
    "tf": ("whole", "ready"),
}


def seconds(model: str, engine: str) -> float:
    """Return the batch time on one Titan X."""
    batch = BATCHES[model]
    if model == "resnet152":
        # Not in the paper: as fast an accelerator as for Inception-V3, by operations.
        known = synthetic_profile("inception_v3")
        asked = synthetic_profile("resnet152")
        assert known.flops is not None and asked.flops is not None
        return seconds("inception_v3", engine) * asked.flops / known.flops
    return float(batch / given(f"poseidon_{model}_{engine}"))


@cache
def profile_of(model: str, engine: str) -> Profile:
    """Return what a model computes with the batch time of an engine's single node."""
    return synthetic_profile(model, seconds(model, engine))


@cache
def step(
    model: str, engine: str, nodes: int, rate_gbps: float, system: str, share: float
) -> HybridStep:
    """Return a step of a system.

    Args:
        model: one of `BATCHES`.
        engine: `caffe` or `tf`, whose single node decides the batch time.
        nodes: each with one accelerator, worker and server.
        rate_gbps: of every port.
        system: one of `SCHEDULES`.
        share: of the port's goodput that the transport uses.
    """
    profile = profile_of(model, engine)
    book = Coordinator(profile, ClusterFacts(nodes, rate_gbps * 1e9), rule="poseidon")
    layers = [book.query(name) for name in book.query("layers")]
    rule, order = SCHEDULES[system]
    schemes = {}
    for layer in layers:
        scheme = rule
        if rule == "poseidon":
            scheme = book.best_scheme(layer.name).scheme
        elif rule == "adam":
            scheme = "adam" if layer.matrix else "ps"
        elif rule == "whole":
            scheme = WHOLE
        schemes[layer.name] = scheme
    return hybrid_step(
        layers,
        schemes,
        NodeCluster(nodes, rate_gbps * 1e9 * GOODPUT_SHARE * share, operations_per_s(profile)),
        batch_rows=profile.batch_size,
        compute_s=profile.compute_s,
        order=order,
    )


def speedup(
    model: str, engine: str, nodes: int, rate_gbps: float, system: str, share: float = 1.0
) -> float:
    """Return throughput over that of one node."""
    made = step(model, engine, nodes, rate_gbps, system, share)
    return nodes * profile_of(model, engine).compute_s / made.step_s


def share_for(
    model: str, engine: str, nodes: int, rate_gbps: float, system: str, wanted: float
) -> float:
    """Return the share of the port with which a system gives a speed-up."""
    return first_above(
        lambda share: speedup(model, engine, nodes, rate_gbps, system, share), wanted, 0.05, 1.0
    )


@cache
def fitted_share() -> float:
    """Return the share of 40 Gbit/s with which WFBP gives the published 21.5x."""
    wanted = published_of("poseidon:fig5")["vgg19_22k_wfbp"].value
    assert wanted is not None
    return share_for("vgg19_22k", "caffe", 32, 40, "wfbp", wanted)


def curves_of(models: tuple[str, ...], engine: str, rate_gbps: float = 40) -> list[Curve]:
    """Return the lines of a picture: both systems on every number of nodes."""
    return [
        Curve(
            f"{model} by {system}, {rate_gbps} GbE, by bytes, {text}",
            "nodes",
            "speed-up",
            tuple(
                (nodes, speedup(model, engine, nodes, rate_gbps, system, share)) for nodes in NODES
            ),
        )
        for model in models
        for system in ("wfbp", "poseidon")
        for share, text in ((1.0, "full ports"), (fitted_share(), "fitted share"))
    ]
