"""Factors and rows of a node's ranks, which its leader collects and sends once."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from gradlane.errors import GradlaneError
from gradlane.training.node.blocks import GatheredBlocks, block_sizes, join_blocks
from gradlane.training.node.layout import NodeLayout
from gradlane.training.node.parts import cut_into_parts, node_block_most_bytes, rows_of_leader
from tests.built import needs_core
from tests.training.model.pool import RankPool

HERE = "tests.training.node.factor_programs"


class TestBlocks:
    """What a leader sends, without any connection."""

    def test_a_nodes_block_keeps_the_blocks_and_who_has_none(self) -> None:
        layout = NodeLayout(nodes=2, local_size=3, node=1, local_rank=2, leaders=1)
        given = {rank: torch.full((16 * rank,), rank, dtype=torch.uint8) for rank in range(6)}
        del given[1]
        nodes = []
        for node in range(2):
            memory = torch.zeros(node_block_most_bytes(96, 3), dtype=torch.uint8)
            own = {
                rank % 3: (block.data_ptr(), block.nbytes)
                for rank, block in given.items()
                if rank // 3 == node
            }
            nodes.append((memory, join_blocks(own, 3, memory.data_ptr())))
        blocks = GatheredBlocks([(one.data_ptr(), size) for one, size in nodes], layout)
        regions = blocks.regions()
        assert regions[1] is None and regions[5] == (0, 80)
        for rank in (0, 2, 3, 4):
            address, nbytes = regions[rank] or (0, -1)
            assert ctypes.string_at(address, nbytes) == bytes([rank]) * 16 * rank
            assert address % 16 == 0

    @pytest.mark.parametrize("sizes", [[16, 32], [-2, 32], [16, -1], []])
    def test_bytes_that_are_no_blocks_are_refused(self, sizes: list[int]) -> None:
        memory = torch.zeros(16 + 16, dtype=torch.uint8)
        memory[: 8 * len(sizes)] = torch.tensor(sizes, dtype=torch.int64).view(torch.uint8)
        nbytes = memory.nbytes if sizes else 8
        if sizes == [16, -1]:
            assert block_sizes((memory.data_ptr(), nbytes), 2) == sizes
            return
        with pytest.raises(GradlaneError, match="no blocks of its 2 ranks"):
            block_sizes((memory.data_ptr(), nbytes), 2)

    @pytest.mark.parametrize("leaders", [1, 3])
    def test_blocks_stay_whole_and_a_leader_has_room_for_its_nodes(self, leaders: int) -> None:
        rows: list[dict[str, Any]] = [
            {"name": name, "numel": 30_000, "dtype": "f32", "role": "parameter", "scheme": scheme}
            for name, scheme in (("conv", "ps"), ("fc", "gather"), ("fc2", "gather"))
        ]
        parts = cut_into_parts(rows, leaders)
        whole = [part for part in parts if part.has_blocks]
        assert [(part.tensor, part.nbytes) for part in whole] == [(1, 120_000), (2, 120_000)]
        for part in whole:
            assert [part.takes_part(step) for step in range(3)] == [False, True, True]
            sent = rows_of_leader(rows, parts, part.leader, 3)
            (row,) = [one for one in sent if one["name"] == rows[part.tensor]["name"]]
            assert 4 * row["numel"] == 3 * 120_000 + 32


@needs_core
@pytest.mark.parametrize("program", ["plain", "clipped", "missing", "accumulated"])
def test_factors_through_leaders_have_the_bits_of_single_ranks(
    pool: RankPool, program: str
) -> None:
    given: dict[str, Any] = {"program": program, "scheme": "sfb"}
    alone = pool.run(f"{HERE}:trained", local="off", **given)
    led = pool.run(f"{HERE}:trained", local="leader", **given)
    assert {rank["digest"] for rank in (*alone, *led)} == {alone[0]["digest"]}
    assert set(led[0]["schemes"].values()) == {"sfb"}


@needs_core
def test_a_nodes_factors_leave_it_once(pool: RankPool) -> None:
    """To one other node and not to both of its ranks: half the bytes, from the leader alone."""
    given: dict[str, Any] = {"program": "plain", "scheme": "sfb"}
    alone = pool.run(f"{HERE}:trained", local="off", **given)
    between = sum(
        sum(rank["peers"][other] for other in range(4) if other // 2 != number // 2)
        for number, rank in enumerate(alone)
    )
    led = pool.run(f"{HERE}:trained", local="leader", **given)
    assert [rank["sent"] > 0 for rank in led] == [True, False, True, False]
    assert sum(rank["sent"] for rank in led) < 0.6 * between


@needs_core
@pytest.mark.parametrize(
    "options",
    [
        {"local": "shared"},
        {"local": "auto"},
        {"local": "leader", "local_sums": "collective"},
        {"local": "leader", "local_size": 4},
        {"local": "leader", "strategy": "ring"},
        {"local": "leader", "codec": "qsgd:bits=8"},
    ],
)
def test_other_ways_through_a_node_give_the_same_bits(
    pool: RankPool, options: dict[str, Any]
) -> None:
    given: dict[str, Any] = {"program": "missing", "scheme": "sfb"}
    alone = pool.run(f"{HERE}:trained", local="off", **given)
    found = pool.run(f"{HERE}:trained", **given, **options)
    assert {rank["digest"] for rank in found} == {alone[0]["digest"]}


@needs_core
def test_rounded_factors_through_leaders(pool: RankPool) -> None:
    given: dict[str, Any] = {"program": "plain", "scheme": "sfb", "codec": "bf16"}
    alone = pool.run(f"{HERE}:trained", local="off", **given)
    led = pool.run(f"{HERE}:trained", local="leader", **given)
    assert {rank["digest"] for rank in (*alone, *led)} == {alone[0]["digest"]}


@needs_core
@pytest.mark.parametrize("local", ["leader", "shared", "auto"])
def test_rows_of_sparse_gradients_through_leaders(pool: RankPool, local: str) -> None:
    alone = pool.run(f"{HERE}:sparse", local="off")
    found = pool.run(f"{HERE}:sparse", local=local)
    assert {rank["digest"] for rank in (*alone, *found)} == {alone[0]["digest"]}


@needs_core
def test_poseidons_rule_in_a_session_of_nodes(pool: RankPool) -> None:
    found = pool.run(f"{HERE}:planned", local="auto")
    assert len({rank["digest"] for rank in found}) == 1
    schemes = found[0]["schemes"]
    assert schemes["again.weight"] == "sfb" and schemes["words.weight"] == "ps"
