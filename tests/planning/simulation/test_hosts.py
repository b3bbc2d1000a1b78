"""Hosts of simulated ranks: their lanes, work threads and processors."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gradlane.planning.simulation.grid import evaluate
from gradlane.planning.simulation.hosts import Host, host_with, parse_host
from gradlane.planning.simulation.profiles import Profile, ProfileTensor
from gradlane.planning.simulation.scenarios import Cluster, columns_of, scenario_of


def large_model() -> Profile:
    """Return a model of 128 MB that computes for 30 ms."""
    names = [f"layer{number}" for number in range(8)]
    tensors = [
        ProfileTensor(name, (4_000_000,), "f32", 0.01 * number / 8, 0.03 - 0.02 * number / 8)
        for number, name in enumerate(names)
    ]
    return Profile("large", 1, 0.01, 0.03, tuple(tensors))


@pytest.mark.parametrize(
    ("text", "rate_gbps", "threads"),
    [
        ("12", 10, (1, 1)),
        ("12", 25, (3, 3)),
        ("12", 100, (3, 3)),
        ("8", 100, (2, 2)),
        ("1", 100, (1, 1)),
        ("lanes=4,work=2", 1, (4, 2)),
        ("lanes=1, work=3, processors=2", 100, (1, 3)),
    ],
)
def test_threads_are_given_or_those_of_a_session(
    text: str, rate_gbps: int, threads: tuple[int, int]
) -> None:
    assert parse_host(text).threads(rate_gbps * 1e9) == threads


def test_a_host_says_what_it_is() -> None:
    said = "a lane for 10 Gbit/s, 3 at most, and as many work threads a rank"
    assert str(host_with(12)) == f"{said}, as a session takes with 12 processors"
    assert str(host_with(2)).startswith("1 lane and as many work threads a rank, as a session")
    assert str(Host(2, 3)) == "2 lanes and 3 work threads a rank"
    assert str(Host(1, 3, 2)) == "1 lane and 3 work threads a rank on 2 processors"
    for wrong in ("0", "lanes=2", "lanes=2,work=0", "lanes=2,work=2,cores=4", "two"):
        with pytest.raises(ValueError, match="lanes=2,work=3"):
            parse_host(wrong)


def test_scenarios_have_the_lanes_of_their_port() -> None:
    slow = Cluster(4, 10e9, host=host_with(12))
    fast = replace(slow, rate_bps=100e9, ranks_per_node=2, stragglers="drop")
    for cluster, lanes, processors in ((slow, 1, 12), (fast, 3, 24)):
        scenario = scenario_of(large_model(), cluster)
        found = [scenario[name] for name in ("lanes", "work_threads", "processors")]
        assert found == [lanes, lanes, processors]
    node = columns_of(replace(slow, rate_bps=100e9, ranks_per_node=2, sharded=True))
    assert node.host == Host(6, 6, 24)


def test_more_lanes_are_faster_where_the_host_is_the_limit_and_no_slower_elsewhere() -> None:
    def steps(rate_bps: float, *hosts: Host) -> list[float]:
        clusters = [Cluster(2, rate_bps, host=host) for host in hosts]
        return [row.step_s for row in evaluate(large_model(), clusters)]

    hosts = [Host(1, 1), Host(2, 2), Host(4, 4)]
    one, two, four = steps(100e9, *hosts)
    assert two < 0.65 * one and four < 0.75 * two
    one, two, four = steps(2e9, *hosts)
    assert max(two, four) < 1.03 * one
    # Eight threads on one processor do no more than one of each kind there.
    alone, crowded = steps(100e9, Host(1, 1, 1), Host(4, 4, 1))
    assert math.isclose(alone, crowded, rel_tol=0.1)
