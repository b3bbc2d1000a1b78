"""Nodes whose ranks add up first are lost as one, and the other nodes go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from torch import Tensor

import gradlane
from gradlane.training.rendezvous.deadline import SuspendAwareDeadline
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.join_requests import JoinRequest, JoinRequests, join_keys
from gradlane.training.rendezvous.membership import Membership
from tests.built import needs_core
from tests.forked_programs import ForkedPrograms
from tests.training.model.going_rank import mean_over
from tests.training.model.test_going_on_processes import (
    FATAL_STEP,
    STEPS,
    Bf16Means,
    Means,
    Run,
    check_reference,
)
from tests.training.model.test_going_on_residuals import HeldBack
from tests.training.rendezvous.stores import bounded

pytestmark = needs_core

LOCAL_SIZE = 2


class NodeMeans(Means):
    """Means over nodes of the means over their ranks."""

    def __init__(self, over_nodes: Means) -> None:
        """Make the means over nodes as they are made over ranks elsewhere."""
        self._over_nodes = over_nodes

    def over(self, name: str, gradients: Mapping[int, Tensor]) -> Tensor:
        of_node: dict[int, list[Tensor]] = {}
        for rank, gradient in sorted(gradients.items()):
            of_node.setdefault(rank // LOCAL_SIZE, []).append(gradient)
        means = {node: mean_over(gradients) for node, gradients in of_node.items()}
        return self._over_nodes.over(name, means)

    def take(self, name: str, ranks: Sequence[int]) -> None:
        self._over_nodes.take(name, sorted({rank // LOCAL_SIZE for rank in ranks}))


@pytest.mark.parametrize(
    ("nodes", "victim", "moment"),
    [
        (3, 1, "backward"),
        (3, 2, "after backward"),
        (3, 5, "forward"),
        (2, 0, "backward"),
        (2, 3, "after backward"),
    ],
)
def test_a_rank_is_lost_with_its_node(
    programs: ForkedPrograms, tmp_path: Path, nodes: int, victim: int, moment: str
) -> None:
    world_size = LOCAL_SIZE * nodes
    ends = {victim: ("sigkill", FATAL_STEP, moment)}
    run = Run(programs, tmp_path, world_size, ends, local_size=LOCAL_SIZE)
    run.check_alike()
    first = run.results[run.survivors[0]]
    words = check_reference(first["states"], world_size, run.survivors, NodeMeans(Means()))
    assert words[: FATAL_STEP - 2] == ["old"] * (FATAL_STEP - 2)
    assert words[FATAL_STEP:] == ["new"] * (STEPS - FATAL_STEP)
    (change,) = first["changes"]
    node = victim // LOCAL_SIZE
    lost = [LOCAL_SIZE * node, LOCAL_SIZE * node + 1]
    assert list(change["lost"]) == lost and change["world_size"] == world_size - LOCAL_SIZE
    assert [rank for rank, _ in first["lost"]] == lost
    assert "this node" not in change["reason"]
    for rank in run.left_behind:
        assert run.codes[rank] == 1
        assert f"rank {victim} was lost" in run.errors[rank], run.errors[rank]
        assert "all ranks of this node end" in run.errors[rank]


@pytest.mark.parametrize("codec", ["bf16", "onebit", "topk:ratio=0.05"])
def test_a_node_encodes_its_mean_once(programs: ForkedPrograms, tmp_path: Path, codec: str) -> None:
    victim = 2
    ends = {victim: ("sigkill", FATAL_STEP, "backward")}
    run = Run(
        programs, tmp_path, 6, ends, local_size=LOCAL_SIZE, asks=[STEPS], codec={"*.weight": codec}
    )
    run.check_alike()
    first = run.results[run.survivors[0]]
    if codec == "bf16":
        check_reference(first["states"], 6, run.survivors, NodeMeans(Bf16Means()))
        return
    held_back = HeldBack(first["codecs"], first["owners"], 3, [victim // LOCAL_SIZE])
    check_reference(first["states"], 6, run.survivors, NodeMeans(held_back))
    for rank in run.survivors:
        held_back.check(run.results[rank]["asked"][0], rank // LOCAL_SIZE, [0, 2])


def test_no_rank_can_join_where_ranks_of_a_node_add_up_first() -> None:
    keys = join_keys(bounded(), "job")
    requests = JoinRequests(keys, Membership(RankInfo(0, 4, "job", restart=0)))
    requests.refusal = "2 ranks of a node add up first"
    requests.start()
    try:
        with pytest.raises(gradlane.UsageError, match="cannot join: 2 ranks of a node"):
            JoinRequest(keys).wait_for_invitation(
                SuspendAwareDeadline(60.0), lambda _: pytest.fail("a plan")
            )
    finally:
        requests.close()
