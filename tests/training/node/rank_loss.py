"""Ranks of their own that train until one of them is killed, and what the others say of it."""

from __future__ import annotations

from typing import Any

from tests.training.model.pool import RankPool
from tests.training.node.node_programs import LOCAL_SIZE

NODES = 2


def check_that_all_name_the_lost_rank(victim: int, how: str, **options: Any) -> None:
    """Check that all hear at once who was killed: its node the rank, others at least the node.

    Args:
        victim: the rank.
        how: when it is killed, as the scenario `lost` has it.
        options: of the sessions.
    """
    ranks = RankPool(NODES * LOCAL_SIZE)
    try:
        arguments = {"victim": victim, "how": how, **options}
        ranks.begin("tests.training.node.node_programs:lost", ranks.world_size, **arguments)
        for rank in range(ranks.world_size):
            if rank == victim:
                continue
            answer = ranks.answer(rank, 60.0)
            assert answer is not None
            words = answer["result"]
            on_its_node = rank // LOCAL_SIZE == victim // LOCAL_SIZE
            assert words[0] == victim or not on_its_node
            assert words[0] // LOCAL_SIZE == victim // LOCAL_SIZE
            assert words[3] < 15
    finally:
        ranks.kill()
