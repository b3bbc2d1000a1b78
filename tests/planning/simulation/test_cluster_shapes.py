"""The ranks of a cluster are refused alike in plans, in simulations and in the lab."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gradlane.lab.runs.options import LabOptions
from gradlane.lab.runs.strategy import parse_strategies
from gradlane.planning.simulation.scenarios import Cluster, nodes_refusal
from gradlane.training.options.cluster_shape import ClusterShape
from gradlane.training.plans.settings import ClusterFacts


def in_the_lab(**shape: Any) -> LabOptions:
    return LabOptions(workload="resnet50", strategies=parse_strategies("p3"), **shape)


def in_a_plan(**shape: Any) -> ClusterFacts:
    return ClusterFacts(rate_bps=1e9, **shape)


@pytest.mark.parametrize("describe", [in_the_lab, in_a_plan])
@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"servers": 5}, "servers is 5; use 1 to 4, the ranks"),
        ({"ranks_per_node": 3}, "4 workers do not fill nodes of 3"),
        ({"ranks_per_node": 0}, "4 workers do not fill nodes of 0"),
        (
            {"ranks_per_node": 2, "serving": 1},
            "1 ranks that only serve with ranks-per-node 2: each of them is on a node",
        ),
        ({"servers": 2, "serving": 1}, "the ranks that only serve own all"),
    ],
)
def test_ranks_that_cannot_be_are_refused_in_the_same_words(
    describe: Callable[..., Any], shape: dict[str, int], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        describe(workers=4, **shape)


def test_the_same_ranks_are_as_many_nodes_everywhere() -> None:
    for shape in ({"ranks_per_node": 2}, {"servers": 3}, {"serving": 2}):
        whole = ClusterShape(4, **shape)
        lab, facts = in_the_lab(workers=4, **shape), in_a_plan(workers=4, **shape)
        cluster = Cluster(4, 1e9, **shape)  # type: ignore[arg-type]
        assert lab.nodes == cluster.machines == whole.machines
        assert lab.ranks == whole.ranks and facts.owners == cluster.owners == whole.owners
    assert (
        nodes_refusal(Cluster(4, 1e9, ranks_per_node=3))
        == ClusterShape(4, ranks_per_node=3).unfilled
    )
