"""What steps wait for, in clusters where that is known by construction.

Each part of the grid makes one thing slow and all else free. What is slow takes a time that is
comparable with compute, so that the baseline misses the goal.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from gradlane.planning.advice.advice import (
    ClusterAdvice,
    RequiredLink,
    advise,
    required_links,
    text_of_required_links,
    workers_on_nodes,
)
from gradlane.planning.advice.causes import GOAL, find_cause, limit_beyond_link
from gradlane.planning.advice.variants import Variants
from gradlane.planning.simulation.costs import HOST_CONSTANTS, MachineCosts
from gradlane.planning.simulation.grid import SimulatedRow, clusters_of, evaluate
from gradlane.planning.simulation.lists import Grid
from gradlane.planning.simulation.profiles import Profile, synthetic_profile
from gradlane.planning.simulation.scenarios import DDP, RING_FUSED, Cluster
from tests.planning.simulation.small_profile import SMALL

FAST_BPS = 1e13
BYTE_S = 40e-9
"""Of a byte over a link of 200 Mbit/s."""
NO_GRADIENTS = replace(
    SMALL, tensors=tuple(replace(tensor, shape=(1,)) for tensor in SMALL.tensors)
)
"""The same compute, without gradients to speak of."""


def costs(**slow: float) -> MachineCosts:
    """A host that takes time for these constants, and for nothing else."""
    return MachineCosts(host={**dict.fromkeys(HOST_CONSTANTS, 0.0), **slow})


def slow_host(byte_s: float) -> MachineCosts:
    """A host that takes this long to send or receive a byte."""
    return costs(send_byte_s=byte_s / 2, receive_byte_s=byte_s / 2)


GRID: dict[str, list[dict[str, Any]]] = {
    # Compute is the limit: nothing is slow, or there is nothing to send over what is.
    "none": [
        {"rate_bps": FAST_BPS, "free_host": True},
        {"rate_bps": 1e11, "free_host": True},
        {"rate_bps": 8 / BYTE_S, "costs": slow_host(BYTE_S), "profile": NO_GRADIENTS},
    ],
    # The slower, the more: the rate of the port.
    "network": [
        {"rate_bps": 8 / BYTE_S, "free_host": True},
        {"rate_bps": 2 / BYTE_S, "free_host": True},
        {"rate_bps": 16 / BYTE_S, "costs": slow_host(BYTE_S), "compression": 0.1},
    ],
    # Bytes through the I/O thread, frames through it, sums, and a wake-up for each.
    "host": [
        {"rate_bps": FAST_BPS, "costs": slow_host(BYTE_S)},
        {"rate_bps": FAST_BPS, "costs": costs(send_frame_s=0.06, receive_frame_s=0.06)},
        {"rate_bps": 1e11, "costs": costs(reduce_byte_s=10 * BYTE_S)},
        {"rate_bps": FAST_BPS, "costs": costs(work_s=0.3, wake_s=0.1)},
    ],
    # Bytes are the limit: each of the two takes as long for them, one behind the other.
    "network and host": [
        {"rate_bps": 8 / BYTE_S, "costs": slow_host(BYTE_S)},
        {"rate_bps": 2 / BYTE_S, "costs": slow_host(4 * BYTE_S)},
    ],
    "latency": [
        {"rate_bps": FAST_BPS, "free_host": True, "latency_s": 0.3},
        {"rate_bps": 1e11, "costs": costs(), "latency_s": 1.0},
    ],
    "ranks": [
        {"rate_bps": FAST_BPS, "free_host": True, "compute_spread": 0.4, "seed": 3},
        {"rate_bps": 1e11, "free_host": True, "compute_spread": 0.8, "seed": 4},
    ],
}
"""The cause, and what is slow."""
CELLS = [
    pytest.param(cause, slow, id=f"{cause} {number}")
    for cause, several in GRID.items()
    for number, slow in enumerate(several)
]
STRATEGIES = ("wfbp", "slicing", "kvstore", "deferred-pull", "p3", "ring", "poseidon")


def verdict(
    profile: Profile, clusters: list[Cluster]
) -> tuple[list[ClusterAdvice], list[RequiredLink]]:
    """Return the advice for clusters, and the links that they need, as the command finds them."""
    rows = evaluate(profile, clusters)
    cluster_of = {id(row): cluster for row, cluster in zip(rows, clusters, strict=True)}
    variants = Variants(profile)
    needs = required_links(rows, lambda row: limit_beyond_link(variants, cluster_of[id(row)]))
    answers = advise(
        rows,
        needs,
        lambda row, link_is_enough: find_cause(
            variants, cluster_of[id(row)], row, link_is_enough=link_is_enough
        ),
    )
    assert_no_contradiction(rows, answers, needs)
    return answers, needs


def assert_no_contradiction(
    rows: list[SimulatedRow], answers: list[ClusterAdvice], needs: list[RequiredLink]
) -> None:
    """The last line says the same as the first, and both the same as the table."""
    (last,) = text_of_required_links(needs)
    for answer in answers:
        (need,) = [need for need in needs if need.strategy == answer.baseline]
        denies = "not the network" in answer.text or "not the rate of the link" in answer.text
        if answer.bottleneck not in ("none", "network", "network and host"):
            assert not need.any_link, (answer.text, last)
        if need.any_link:
            assert not denies, (answer.text, last)
            assert "network" in answer.bottleneck or answer.bottleneck == "none", answer.text
        if answer.bottleneck == "host":
            assert need.limit_beyond == "host", (answer.text, last)
    for row in rows:
        (need,) = [need for need in needs if need.strategy == row.strategy]
        assert need.any_link or row.scaling_factor < GOAL, (row, last)
    no_link = "no link, however fast," in last
    assert no_link == any(not need.any_link for need in needs), last


@pytest.mark.parametrize("workers", [3, 8])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("cause", "slow"), CELLS)
def test_the_verdict_is_what_was_made_slow(
    cause: str, slow: dict[str, Any], strategy: str, workers: int
) -> None:
    settings = dict(slow)
    profile = settings.pop("profile", SMALL)
    ((answer,), (need,)) = verdict(profile, [Cluster(workers, strategy=strategy, **settings)])
    assert answer.bottleneck == cause, answer.text
    if cause == "none":
        assert answer.cause is None
        return
    assert answer.cause is not None
    waiting_s = answer.cause.waiting_s
    assert waiting_s > 0.05 * profile.compute_s
    assert answer.cause.saved_together_s > 0.5 * waiting_s
    if cause in ("host", "latency", "ranks"):
        assert need.limit_beyond == cause
    if cause == "host":
        assert answer.cause.saved_by_free_host_s > 0.99 * waiting_s
        assert answer.cause.saved_by_faster_link_s < 0.02 * waiting_s
    if cause == "network":
        assert answer.cause.saved_by_faster_link_s > 0.7 * waiting_s
    if cause == "network and host" and strategy != "poseidon":
        # Fewer bytes spare both.
        assert answer.cause.saved_by_fewer_bytes_s > 0.5 * waiting_s


@pytest.mark.parametrize(("slower", "cause"), [(5.0, "host"), (0.1, "network")])
@pytest.mark.parametrize("strategy", ["wfbp", "p3", "ring"])
def test_of_a_link_and_a_host_the_slower_one_is_named(
    strategy: str, slower: float, cause: str
) -> None:
    cluster = Cluster(8, 8 / BYTE_S, strategy, costs=slow_host(slower * BYTE_S))
    ((answer,), _) = verdict(SMALL, [cluster])
    assert answer.bottleneck == cause, answer.text


def test_what_is_said_beside_the_numbers_is_what_was_named() -> None:
    cluster = Cluster(8, FAST_BPS, "p3", free_host=True, latency_s=0.3)
    ((answer,), needs) = verdict(SMALL, [cluster])
    assert "a free host together and no latency." in answer.text
    assert text_of_required_links(needs) == [
        "8 workers: no link, however fast, reaches 95 % with p3, where then the latency is the "
        "limit."
    ]


@pytest.mark.parametrize("seed", range(60))
def test_no_line_contradicts_another_whatever_is_slow(seed: int) -> None:
    """Links, hosts, latencies and ranks at random, near the edge of the goal as well."""
    rng = random.Random(seed)
    base = Cluster(
        1,
        0.0,
        costs=slow_host(BYTE_S * 10 ** rng.uniform(-2, 0.5)),
        latency_s=rng.choice([0.0, 0.01, 0.1]),
        compute_spread=rng.choice([0.0, 0.03, 0.2]),
    )
    clusters = clusters_of(
        Grid(
            workers=[rng.choice([2, 4, 8])],
            rates_bps=sorted(8 / BYTE_S * 10 ** rng.uniform(-0.5, 2.5) for _ in range(3)),
            strategies=rng.sample([*STRATEGIES, DDP], 2),
        ),
        base,
    )
    answers, _ = verdict(SMALL, clusters)
    assert len(answers) == 3


def test_a_port_that_is_hardly_used_is_not_the_bottleneck() -> None:
    """ResNet-50 at 400 Gbit/s, with the simulator's own host: the port is used 1 % of the time."""
    profile = synthetic_profile("resnet50", 0.05)
    clusters = [Cluster(8, 400e9, strategy) for strategy in ("wfbp", "p3")]
    rows = evaluate(profile, clusters)
    assert rows[0].tx_utilization < 0.05
    ((answer,), _) = verdict(profile, clusters)
    assert answer.bottleneck == "host"
    (free, _) = evaluate(profile, [replace(cluster, free_host=True) for cluster in clusters])
    assert free.scaling_factor > 0.99


@pytest.mark.parametrize("strategy", ["wfbp", RING_FUSED])
def test_fewer_bytes_are_explained_over_any_link(strategy: str) -> None:
    """A formula multiplies the rate by the compression; an unlimited link stays within limits."""
    cluster = Cluster(workers=4, rate_bps=1e7, strategy=strategy, compression=8.0)
    (row,) = evaluate(SMALL, [cluster])
    cause = find_cause(Variants(SMALL), cluster, row, link_is_enough=False)
    assert cause.bottleneck == "network"
    assert cause.saved_together_s == pytest.approx(cause.waiting_s, rel=0.01)
    assert (
        limit_beyond_link(Variants(SMALL), replace(cluster, free_host=strategy != RING_FUSED))
        == "none"
    )


def test_one_worker_is_one() -> None:
    assert workers_on_nodes(1, 1) == "1 worker" and workers_on_nodes(2, 1) == "2 workers"
