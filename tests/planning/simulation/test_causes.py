"""What steps wait for, in clusters where that is known by construction.

Each part of the grid makes one thing slow and all else free. Bytes of one tensor cross a port in a
time that is comparable with compute, so that the baseline misses the goal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gradlane.planning.advice.advice import (
    GOAL,
    ClusterAdvice,
    advise,
    required_links,
    text_of_required_links,
)
from gradlane.planning.advice.causes import any_link_is_enough, find_cause
from gradlane.planning.simulation.costs import HOST_CONSTANTS, MachineCosts
from gradlane.planning.simulation.grid import evaluate
from gradlane.planning.simulation.profiles import synthetic_profile
from gradlane.planning.simulation.scenarios import Cluster
from tests.planning.simulation.small_profile import SMALL

FAST_BPS = 1e13
BYTE_S = 40e-9
"""Of a byte over a link of 200 Mbit/s."""


def slow_host(byte_s: float) -> MachineCosts:
    """A host that takes this long to send or receive a byte, and for nothing else."""
    own = {"send_byte_s": byte_s / 2, "receive_byte_s": byte_s / 2}
    return MachineCosts(host={**dict.fromkeys(HOST_CONSTANTS, 0.0), **own})


GRID: dict[str, dict[str, Any]] = {
    "none": {"rate_bps": FAST_BPS, "free_host": True},
    "network": {"rate_bps": 8 / BYTE_S, "free_host": True},
    "host": {"rate_bps": FAST_BPS, "costs": slow_host(BYTE_S)},
    "network and host": {"rate_bps": 8 / BYTE_S, "costs": slow_host(BYTE_S)},
    "latency": {"rate_bps": FAST_BPS, "free_host": True, "latency_s": 0.3},
    "ranks": {"rate_bps": FAST_BPS, "free_host": True, "compute_spread": 0.4, "seed": 3},
}
"""The cause, and what is slow."""
STRATEGIES = ("wfbp", "slicing", "kvstore", "deferred-pull", "p3", "ring", "poseidon")


def answer_of(cluster: Cluster) -> tuple[ClusterAdvice, list[str]]:
    """Return the advice for one cluster, and the sentence on the link that it needs."""
    rows = evaluate(SMALL, [cluster])
    (answer,) = advise(rows, lambda row: find_cause(SMALL, cluster, row))
    needs = required_links(rows, lambda row: any_link_is_enough(SMALL, cluster, GOAL))
    return answer, text_of_required_links(needs)


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cause", GRID)
def test_the_verdict_is_what_was_made_slow(cause: str, strategy: str, workers: int) -> None:
    answer, (need,) = answer_of(Cluster(workers, strategy=strategy, **GRID[cause]))
    assert answer.bottleneck == cause, answer.text
    # The last line says the same as the first.
    assert ("no link, however fast," in need) == (cause not in ("none", "network")), need
    assert ("not the network" in answer.text) == (cause in ("host", "ranks"))
    if cause == "none":
        assert answer.cause is None
        return
    assert answer.cause is not None
    waiting_s = answer.cause.waiting_s
    assert waiting_s > 0.05 * SMALL.compute_s
    if cause == "network":
        assert answer.cause.saved_by_faster_link_s > 0.8 * waiting_s
        assert answer.cause.saved_by_free_host_s == pytest.approx(0.0, abs=1e-9)
    if cause == "host":
        assert answer.cause.saved_by_free_host_s > 0.99 * waiting_s
        assert answer.cause.saved_by_faster_link_s < 0.01 * waiting_s
    if cause in ("network", "host", "network and host") and strategy != "poseidon":
        # Fewer bytes spare both.
        assert answer.cause.saved_by_fewer_bytes_s > 0.5 * waiting_s


@pytest.mark.parametrize(("slower", "cause"), [(5.0, "host"), (0.1, "network")])
@pytest.mark.parametrize("strategy", ["wfbp", "p3", "ring"])
def test_of_a_link_and_a_host_the_slower_one_is_named(
    strategy: str, slower: float, cause: str
) -> None:
    cluster = Cluster(8, 8 / BYTE_S, strategy, costs=slow_host(slower * BYTE_S))
    answer, _ = answer_of(cluster)
    assert answer.bottleneck == cause, answer.text


def test_a_port_that_is_hardly_used_is_not_the_bottleneck() -> None:
    """ResNet-50 at 400 Gbit/s, with the simulator's own host: the port is used 1 % of the time."""
    profile = synthetic_profile("resnet50", 0.05)
    clusters = [Cluster(8, 400e9, strategy) for strategy in ("wfbp", "p3")]
    rows = evaluate(profile, clusters)
    assert rows[0].tx_utilization < 0.05
    (answer,) = advise(rows, lambda row: find_cause(profile, clusters[0], row))
    assert answer.bottleneck == "host"
    (free, _) = evaluate(profile, [replace(cluster, free_host=True) for cluster in clusters])
    assert free.scaling_factor > 0.99
