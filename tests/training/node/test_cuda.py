"""Sums where gradients are, on CUDA devices: what follows what, and NCCL."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gradlane.training.node.collective_queue import CollectiveQueue
from gradlane.training.node.parts import TensorPart
from tests.training.model.pool import RankPool
from tests.training.node.node_programs import LOCAL_SIZE
from tests.training.node.threaded_node import EchoChannel, Node, rows_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
HERE = "tests.training.node.node_programs"
ELEMENTS = 5_000


class DoublingChannel(EchoChannel):
    """A channel whose other nodes have what this one has."""

    def __init__(self, queue: CollectiveQueue, part: TensorPart, dtype: torch.dtype) -> None:
        super().__init__(queue, [part])
        self._dtype = dtype
        self.node_mean: Tensor | None = None

    def on_node_mean(self, part: TensorPart, step: int, pointer: int, *, absent: bool) -> None:
        memory = (ctypes.c_char * part.nbytes).from_address(pointer)
        buffer = torch.frombuffer(memory, dtype=self._dtype)
        assert buffer.is_pinned()
        self.node_mean = buffer.clone()
        buffer.mul_(2)
        super().on_node_mean(part, step, pointer, absent=absent)


def slow(seed: int) -> Tensor:
    """Return numbers that take the device a while."""
    draw = torch.Generator("cuda").manual_seed(seed)
    square = torch.randn(2048, 2048, generator=draw, device="cuda")
    for _ in range(30):
        square = torch.tanh(square @ square)
    return square.flatten()[:ELEMENTS].clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_is_read_when_it_is_computed_and_ready_when_it_is_written(
    dtype: torch.dtype,
) -> None:
    example = torch.zeros(ELEMENTS, dtype=dtype, device="cuda")
    names = {torch.float32: "f32", torch.bfloat16: "bf16"}
    node = Node(1, rows_of([example], names), [example])
    (queue,), (part,) = node.queues, node.parts
    channel = DoublingChannel(queue, part, dtype)
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for step in range(1, 4):
        channel.begin()
        with torch.cuda.stream(beside):
            gradient = slow(step).to(dtype)
            queue.submit(0, step, gradient, absent=False)
        channel.wait()
        expected = slow(step).to(dtype).cpu()
        assert channel.node_mean is not None
        assert torch.equal(channel.node_mean, expected)
        # Nothing is waited for: who hears that a tensor is ready may read it on any stream.
        assert torch.equal(gradient.cpu(), 2 * expected)
    node.stop()


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch has no NCCL")
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate": 2, "clip": 0.1}, {"local": "shared"}, {"clip_by_session": 0.1}],
)
def test_two_ranks_a_node_have_the_bits_of_sums_in_shared_memory(
    nodes: int, options: dict[str, Any]
) -> None:
    pool = RankPool(nodes * LOCAL_SIZE, start_method="spawn")
    common = {"local": "leader", "on_cuda": True, **options}
    try:
        host = pool.run(f"{HERE}:trained", **common)
        led = pool.run(f"{HERE}:trained", **common, local_sums="collective")
        chosen = pool.run(f"{HERE}:trained", **common, local_sums="auto")
    finally:
        pool.close()
    for ranks in (led, chosen):
        assert {rank["channel"]["local_sums"] for rank in ranks} == {"nccl"}
    assert len({rank["digest"] for rank in (*host, *led, *chosen)}) == 1


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch has no NCCL")
def test_a_killed_rank_leaves_no_rank_in_a_collective() -> None:
    ranks = RankPool(LOCAL_SIZE, start_method="spawn")
    try:
        arguments = {
            "victim": 1,
            "how": "kill in step",
            "local": "leader",
            "local_sums": "collective",
            "on_cuda": True,
        }
        ranks.begin(f"{HERE}:lost", LOCAL_SIZE, **arguments)
        answer = ranks.answer(0, 120.0)
        assert answer is not None
        words = answer["result"]
        assert words[0] == 1
        assert words[3] < 15
    finally:
        ranks.kill()
