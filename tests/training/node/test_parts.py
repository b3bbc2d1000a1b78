"""Parts, layouts and sums of a node, and failures in ranks of the world."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from gradlane.errors import RanksDifferError
from gradlane.training.core import load_core
from gradlane.training.node.failure import Failure, failure_in_world_ranks, mark_world_ranks
from gradlane.training.node.layout import NodeLayout, agree_on_layout
from gradlane.training.node.parts import (
    ELEMENT_BYTES,
    cut_into_parts,
    rows_of_leader,
    shared_memory_bytes,
)
from gradlane.training.node.sums import local_mean
from gradlane.training.options.options import Options
from gradlane.training.rendezvous.environment import RankInfo, find_local_size
from gradlane.training.rendezvous.rendezvous import RendezvousScope, node_name
from tests.training.rendezvous.stores import bounded

ROWS = st.lists(
    st.tuples(st.integers(1, 300_000), st.sampled_from(sorted(ELEMENT_BYTES))), min_size=1
)


@given(ROWS, st.integers(1, 5))
def test_parts_cover_every_tensor_once_and_are_balanced(
    tensors: list[tuple[int, str]], leaders: int
) -> None:
    rows: list[dict[str, Any]] = [
        {"name": f"t{number}", "numel": numel, "dtype": dtype, "role": "parameter"}
        for number, (numel, dtype) in enumerate(tensors)
    ]
    parts = cut_into_parts(rows, leaders)
    for tensor, row in enumerate(rows):
        mine = [part for part in parts if part.tensor == tensor]
        ends = [part.first_byte + part.nbytes for part in mine]
        assert [part.first_byte for part in mine] == [0, *ends[:-1]]
        assert ends[-1] == row["numel"] * ELEMENT_BYTES[row["dtype"]]
        assert all(part.first_byte % ELEMENT_BYTES[part.dtype] == 0 for part in mine)
    spans = sorted((part.offset, part.offset + part.nbytes) for part in parts)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert shared_memory_bytes(parts) == spans[-1][1]
    loads = [sum(part.nbytes for part in parts if part.leader == one) for one in range(leaders)]
    assert max(loads) - min(loads) <= len(parts) * 8 + 4096 * 8
    names = [row["name"] for one in range(leaders) for row in rows_of_leader(rows, parts, one, 3)]
    assert len(names) == len(set(names)) == len(parts)


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_local_means_are_rounded_once_for_halves(dtype: str, ranks: int) -> None:
    torch_dtype = {
        "f32": torch.float32,
        "f64": torch.float64,
        "f16": torch.float16,
        "bf16": torch.bfloat16,
    }[dtype]
    draw = torch.Generator().manual_seed(ranks)
    gradients = [torch.randn(1001, generator=draw).to(torch_dtype) for _ in range(ranks)]
    out = torch.empty(1001, dtype=torch_dtype)
    memory = [(one.data_ptr(), one.nbytes) for one in gradients]
    local_mean(dtype, memory, 3, (out.data_ptr(), out.nbytes))
    wide = [one.float() if one.itemsize == 2 else one for one in gradients]
    expected = (sum(wide[1:], wide[0]) / 3).to(torch_dtype)
    assert torch.equal(out, expected)


def agreed(launched: list[tuple[int, int]], local: str, machines: list[str]) -> list[Any]:
    """Let every rank find its layout, one after the other."""
    store = HashStore()
    scopes = [
        RendezvousScope(bounded(store, rank), RankInfo(rank, len(launched), "job", 0), 0, 1.0)
        for rank in range(len(launched))
    ]
    for rank, (local_rank, size) in enumerate(launched):
        scopes[rank].put(f"local/{rank}", json.dumps([local_rank, size, machines[rank]]))
    found: list[Any] = []
    for rank, (local_rank, size) in enumerate(launched):
        environment = {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(size)}
        try:
            found.append(agree_on_layout(Options.of(local=local), scopes[rank], environment))
        except RanksDifferError as error:
            found.append(str(error))
    return found


def test_layouts() -> None:
    here = [node_name()] * 4
    blocks = [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert agreed(blocks, "leader", here)[3] == NodeLayout(2, 2, 1, 1, 1)
    assert agreed(blocks, "shared", here)[0] == NodeLayout(2, 2, 0, 0, 2)
    assert agreed(blocks, "auto", here)[2] == NodeLayout(2, 2, 1, 0, 1)
    one_each = [(0, 1)] * 4
    assert agreed(one_each, "auto", here) == [None] * 4
    assert agreed([(rank, 4) for rank in range(4)], "auto", here) == [None] * 4
    uneven = agreed([(0, 2), (1, 2), (0, 1), (0, 1)], "leader", here)
    assert all("one of 2 ranks of its node and rank 2 one of 1" in one for one in uneven)
    assert agreed([(0, 2), (1, 2), (0, 1), (0, 1)], "auto", here) == [None] * 4


def test_local_size_from_the_launcher() -> None:
    assert find_local_size({"LOCAL_WORLD_SIZE": "4"}) == 4
    assert find_local_size({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}) == 2
    assert find_local_size({}) == 1


def test_failures_name_ranks_of_the_whole_world() -> None:
    core = load_core()
    lost = core.ChannelError("rank 1 was lost; waiting for rank 1", 3, 1)
    heard = failure_in_world_ranks(core, lost, lambda node: node * 4)
    assert heard == Failure("rank 4 was lost; waiting for rank 4", 3, 4)
    late = core.ChannelTimeout("no progress for 5 s: waiting for rank 1", 3, 1)
    heard = failure_in_world_ranks(core, late, lambda node: node * 4)
    assert heard == Failure("no progress for 5 s: waiting for node 1", 3, 4, timed_out=True)
    told = core.ChannelError(f"rank 1 gave up: {mark_world_ranks('rank 6 was lost')}", 3, 1)
    heard = failure_in_world_ranks(core, told, lambda node: node * 4)
    assert heard == Failure("node 1 gave up: rank 6 was lost", 3, 6)
    assert Failure.from_bytes(heard.to_bytes()) == heard
    # A rank that hears of it by way of another node hears who it was, not who told it.
    first = failure_in_world_ranks(
        core, core.ChannelError("rank 0 was lost", 3, 0), lambda node: node
    )
    assert first == Failure("rank 0 was lost", 3, 0)
    told = core.ChannelError(
        f"rank 1 gave up: {mark_world_ranks(first.text_for_other_nodes())}", 3, 1
    )
    heard = failure_in_world_ranks(core, told, lambda node: node * 2 + 1)
    assert heard == Failure("node 1 gave up: rank 0 was lost", 3, 0)
    assert heard.text_for_other_nodes() == heard.message
