"""Local updates of sharded models: nodes train by themselves, and exchange shard by shard."""

from __future__ import annotations

import itertools

import pytest

from tests.built import needs_core
from tests.forked_programs import ForkedPrograms
from tests.training.sharded.fsdp2 import needs_fsdp2
from tests.training.sharded.test_bits import run

pytestmark = [needs_core, needs_fsdp2]
PROGRAM = "tests.training.sharded.local_programs"
ROUNDS = ["diloco", "streaming", "frozen", "empty_shards"]
OTHERS = ["coded", "coded_states", "columns_part", "states", "differ", "fewer"]
"""`states` last of those that save: what it saves is gone on from."""


@pytest.fixture(scope="module")
def found(
    programs: ForkedPrograms, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    """What each rank of two nodes has found, by scenario: all share processes."""
    folder = tmp_path_factory.mktemp("local")
    results = run(programs, folder, [*ROUNDS, *OTHERS], program=PROGRAM)
    results["other_nodes"] = run(programs, folder, ["other_nodes"], nodes=1, program=PROGRAM)[
        "other_nodes"
    ]
    return results


@pytest.mark.parametrize("scenario", ROUNDS)
def test_shards_have_the_bits_of_rounds_in_torch_alone(
    found: dict[str, list[str]], scenario: str
) -> None:
    """In mid-round, where all meet after a forward, on the way, and after the end."""
    points = [[one.split() for one in line.split(" | ")] for line in found[scenario]]
    assert [[same for same, _ in ranks] for ranks in points] == [["same"] * 4] * 4
    sums = [[checksum for _, checksum in ranks] for ranks in points]
    for point in (1, 3):
        # A shard is the same on both nodes, and another one than its neighbour.
        assert sums[0][point] == sums[2][point] != sums[1][point] == sums[3][point]


def test_nodes_differ_in_mid_round(found: dict[str, list[str]]) -> None:
    first, second = (found["diloco"][rank].split(" | ")[0] for rank in (0, 2))
    assert first != second


def test_the_largest_values_in_two_bits(found: dict[str, list[str]]) -> None:
    lines = [line.split(" | ") for line in found["coded"]]
    assert [fewer for _, fewer in lines] == ["fewer"] * 4
    assert lines[0] == lines[2] != lines[1] == lines[3]


@pytest.mark.parametrize("scenario", ["states", "coded_states"])
def test_sessions_go_on_from_states(found: dict[str, list[str]], scenario: str) -> None:
    lines = [line.split(" | ") for line in found[scenario]]
    assert [line[:2] for line in lines] == [["same", "same"]] * 4
    ends = [line[2] for line in lines]
    assert ends[0] == ends[2] != ends[1] == ends[3]


def test_states_of_others_are_refused_on_all_ranks(found: dict[str, list[str]]) -> None:
    for line in found["states"]:
        *_, neighbour, node = line.split(" | ")
        assert "on rank 0, which holds shard 0 of 2, was given shard 1 of 2" in neighbour
        assert "on rank 2: the model's parameters are not those of the state" in node


def test_a_column_that_parts_leaves_what_others_have_not_read(found: dict[str, list[str]]) -> None:
    """And the last rank deletes it."""
    assert found["columns_part"] == ["0"] * 4


def test_any_number_of_nodes_goes_on_from_a_common_point(found: dict[str, list[str]]) -> None:
    assert found["other_nodes"] == ["steps 9 to 16"] * 2


def test_ranks_of_the_world_are_named(found: dict[str, list[str]]) -> None:
    turn, call = "exchanges a fragment whose turn it is after its step 4", "calls session"
    for rank, line in enumerate(found["differ"]):
        assert turn in line and call in line
        assert {f"rank {rank % 2} ", f"rank {rank % 2 + 2} "} <= set(_ranks(line)), line


def test_steps_of_nodes_are_counted_where_all_meet(found: dict[str, list[str]]) -> None:
    call = "calls session.synchronize() after its step"
    for rank, line in enumerate(found["fewer"]):
        first, second = rank % 2, rank % 2 + 2
        assert line == f"rank {first} {call} 5, and rank {second} {call} 4"


def _ranks(line: str) -> list[str]:
    words = line.split()
    return [f"rank {after} " for word, after in itertools.pairwise(words) if word == "rank"]
