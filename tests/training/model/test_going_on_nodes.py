"""Nodes whose ranks add up first are lost as one, and the other nodes go on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from tests.built import needs_core
from tests.forked_programs import ForkedPrograms
from tests.training.model.going_rank import mean_over
from tests.training.model.test_going_on_processes import (
    FATAL_STEP,
    STEPS,
    Means,
    Run,
    check_reference,
)

pytestmark = needs_core

LOCAL_SIZE = 2


class NodeMeans(Means):
    """Means over nodes of the means over their ranks."""

    def over(self, name: str, gradients: Mapping[int, Tensor]) -> Tensor:
        nodes = sorted({rank // LOCAL_SIZE for rank in gradients})
        locals_of = {
            node: [one for rank, one in sorted(gradients.items()) if rank // LOCAL_SIZE == node]
            for node in nodes
        }
        return mean_over([mean_over(locals_of[node]) for node in nodes])


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
    words = check_reference(first["states"], world_size, run.survivors, NodeMeans())
    assert words[: FATAL_STEP - 2] == ["old"] * (FATAL_STEP - 2)
    assert words[FATAL_STEP:] == ["new"] * (STEPS - FATAL_STEP)
    (change,) = first["changes"]
    node = victim // LOCAL_SIZE
    lost = [LOCAL_SIZE * node, LOCAL_SIZE * node + 1]
    assert list(change["lost"]) == lost and change["world_size"] == world_size - LOCAL_SIZE
    assert [rank for rank, _ in first["lost"]] == lost
    for rank in run.left_behind:
        assert run.codes[rank] == 1
        assert f"rank {victim} was lost" in run.errors[rank], run.errors[rank]
