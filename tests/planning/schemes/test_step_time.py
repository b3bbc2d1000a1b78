"""The model of bytes, held against hand calculation and against the engine where both know it."""

from __future__ import annotations

from typing import Any

import pytest

from gradlane.planning.planner.coordinator import Coordinator
from gradlane.planning.schemes.costs import Layer
from gradlane.planning.schemes.step_time import WHOLE, HybridStep, NodeCluster, hybrid_step
from gradlane.planning.simulation.grid import GOODPUT_SHARE
from gradlane.planning.simulation.profiles import synthetic_profile
from gradlane.planning.simulation.scenarios import Cluster, run_scenario, scenario_of
from gradlane.training.plans.settings import ClusterFacts

BYTE = 8.0
"""Bits a second of a port that carries a byte a second."""


def layer(name: str, rows: int, columns: int, ready_s: float, kind: str = "Linear") -> Layer:
    elements = rows * columns
    shapes = ((rows, columns),)
    return Layer(name, 0, kind, (f"{name}.weight",), shapes, elements, 4 * elements, 0.0, ready_s)


FIRST = layer("first", 10, 10, ready_s=30.0)
LAST = layer("last", 20, 5, ready_s=20.0)


def step(schemes: dict[str, str], nodes: int = 4, **arguments: Any) -> HybridStep:
    return hybrid_step(
        [FIRST, LAST],
        schemes,
        NodeCluster(nodes, BYTE, arguments.pop("operations_per_s", float("inf"))),
        batch_rows=2,
        compute_s=30.0,
        **arguments,
    )


def test_servers_carry_each_gradient_twice_less_the_own_part() -> None:
    # 400 bytes each: 600 bytes each way through a port; the later one waits for the port.
    made = step({"first": "ps", "last": "ps"})
    assert made.step_s == 20.0 + 600.0 + 600.0
    assert made.node_bytes == (2400.0,) * 4
    assert made.stall_share == pytest.approx(1.0 - 30.0 / 1220.0)
    assert step({"first": "ps", "last": "ps"}, order="after").step_s == 30.0 + 1200.0
    assert step({"first": "ps", "last": "ps"}, bytes_share=0.25).step_s == 20.0 + 300.0
    assert step({"first": "ps", "last": "ps"}, nodes=1).step_s == 30.0


def test_factors_go_to_every_other_worker() -> None:
    # Two rows of 20 + 5 numbers to three others: 600 bytes; two rows of 20: 480.
    made = step({"first": "sfb", "last": "sfb"})
    assert made.step_s == 20.0 + 600.0 + 480.0
    assert made.node_bytes == (2160.0,) * 4
    # Three others' two rows times 100 elements, twice: 1,200 operations a layer.
    slow = step({"first": "sfb", "last": "sfb"}, operations_per_s=120.0)
    assert slow.rebuild_s == 20.0
    assert slow.compute_s == 50.0
    assert slow.step_s == made.step_s + 10.0


def test_a_layer_on_one_server_burdens_one_node() -> None:
    made = step({"first": "ps", "last": WHOLE})
    # The owner takes 3 x 400 bytes and then gives as many; servers' 600 each way beside it.
    assert made.node_bytes[0] == 2400.0 + 1200.0
    assert made.node_bytes[1:] == (800.0 + 1200.0,) * 3
    assert made.step_s == 20.0 + 1200.0 + 1200.0 + 600.0
    # Project Adam's: 3 x 200 bytes of factors arrive, and the whole layer goes out three times.
    adam = step({"first": "ps", "last": "adam"})
    assert adam.node_bytes[0] == 600.0 + 1200.0 + 1200.0
    assert adam.node_bytes[1] == 200.0 + 400.0 + 1200.0


def test_what_has_no_factors_is_refused() -> None:
    convolution = layer("conv", 4, 4, 1.0, kind="Conv2d")
    for scheme, message in (("sfb", "has no factors"), ("tree", "unknown scheme 'tree'")):
        layers = [convolution] if scheme == "sfb" else [FIRST]
        with pytest.raises(ValueError, match=message):
            hybrid_step(
                layers,
                {"conv": scheme, "first": scheme},
                NodeCluster(2, BYTE),
                batch_rows=1,
                compute_s=1.0,
            )
    with pytest.raises(ValueError, match="unknown order"):
        step({"first": "ps", "last": "ps"}, order="never")


@pytest.mark.parametrize(
    ("model", "workers", "rate_bps", "more_most"),
    [
        ("vgg19", 4, 5e9, 0.06),
        ("vgg19", 8, 1e10, 0.03),
        ("vgg19_22k", 8, 1e10, 0.03),
        ("resnet152", 8, 2e9, 0.16),
        ("googlenet", 8, 3e8, 0.5),
    ],
)
def test_with_servers_alone_it_agrees_with_the_engine(
    model: str, workers: int, rate_bps: float, more_most: float
) -> None:
    """`wfbp` on free hosts: the engine has frames, queues and unequal flows beside the bytes.

    And it has whole slices of 2 MB: of GoogLeNet's 26 MB eight servers own unequal parts.
    """
    profile = synthetic_profile(model)
    cluster = Cluster(workers, rate_bps, strategy="wfbp", free_host=True)
    engine_s = run_scenario(scenario_of(profile, cluster))["report"]["step_s"]
    book = Coordinator(profile, ClusterFacts(workers, rate_bps))
    layers = [book.query(name) for name in book.query("layers")]
    made = hybrid_step(
        layers,
        {one.name: "ps" for one in layers},
        NodeCluster(workers, rate_bps * GOODPUT_SHARE),
        batch_rows=profile.batch_size,
        compute_s=profile.compute_s,
    )
    assert engine_s > 1.05 * profile.compute_s, "the port is to decide"
    assert made.step_s < engine_s < (1.0 + more_most) * made.step_s
