"""The turns of collectives, without processes: any order, any rank that has nothing, any end."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradlane.errors import RendezvousError
from gradlane.training.modules.gradient_intake import is_alone
from gradlane.training.node.collective_queue import CollectiveQueue
from gradlane.training.node.device_order import CollectiveCancelledError, HostOrder
from gradlane.training.node.layout import NodeLayout
from gradlane.training.node.pending_gradient import flat_values
from tests.training.node.threaded_node import (
    Node,
    Rounds,
    RoundWork,
    ThreadGroup,
    ThreadMessenger,
    rows_of,
)
from tests.waiting import eventually, threads_named

NAMES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
}
STEPS = 3
THREAD = "gradlane-collective"
KINDS = st.lists(
    st.tuples(st.sampled_from(sorted(NAMES, key=str)), st.sampled_from([1, 7, 5000])),
    min_size=1,
    max_size=5,
)


def drawn(seed: int, kind: tuple[torch.dtype, int]) -> Tensor:
    """Return small whole numbers, whose sums are the same in any order and any dtype."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, (kind[1],), generator=draw).to(kind[0])


def run_rank(
    node: Node, rank: int, kinds: list[Any], seed: int, found: list[Any], absent: Any
) -> None:
    """Go through some steps on one rank, each in an order of its own."""
    channel = node.channels[rank]
    for step in range(1, STEPS + 1):
        order = list(range(len(kinds)))
        random.Random(seed + 100 * step + rank).shuffle(order)
        gradients: dict[int, Tensor] = {}
        channel.begin()
        for tensor in order:
            nothing = absent(step, tensor, rank)
            if nothing:
                gradient = torch.full((kinds[tensor][1],), torch.nan, dtype=kinds[tensor][0])
            else:
                gradient = drawn(seed + 1000 * step + 100 * rank + tensor, kinds[tensor])
            gradients[tensor] = gradient
            node.queues[rank].submit(tensor, step, gradient, absent=nothing)
        channel.wait()
        found[rank].append([(gradients[one], channel.absent[one]) for one in range(len(kinds))])


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 4), KINDS, st.booleans(), st.integers(0, 2**20))
def test_every_rank_gets_every_mean_in_any_order_of_submission(
    ranks: int, kinds: list[Any], shared: bool, seed: int
) -> None:
    def absent(step: int, tensor: int, rank: int) -> bool:
        whole = random.Random(seed + step * 10 + tensor).random() < 0.2
        return whole or random.Random(seed + step * 77 + tensor * 7 + rank).random() < 0.3

    examples = [drawn(0, kind) for kind in kinds]
    rows = rows_of(examples, NAMES)
    node = Node(ranks, rows, examples, leaders=ranks if shared else 1)
    found: list[Any] = [[] for _ in range(ranks)]
    programs = [
        threading.Thread(target=run_rank, args=(node, rank, kinds, seed, found, absent))
        for rank in range(ranks)
    ]
    for program in programs:
        program.start()
    for program in programs:
        program.join()
    node.stop()
    assert not node.rounds.broken
    assert all(group.has_ended for group in node.groups)
    for step in range(1, STEPS + 1):
        for tensor, kind in enumerate(kinds):
            here = [rank for rank in range(ranks) if not absent(step, tensor, rank)]
            for rank in range(ranks):
                mean, is_absent = found[rank][step - 1][tensor]
                assert is_absent == (not here)
                if here:
                    terms = [drawn(seed + 1000 * step + 100 * one + tensor, kind) for one in here]
                    wide = sum((one.double() for one in terms[1:]), terms[0].double())
                    # One rounding in f32 for halves, as in the host's memory.
                    exact = kind[0] if kind[0] is torch.float64 else torch.float32
                    assert torch.equal(mean, (wide.to(exact) / ranks).to(kind[0]))


def test_a_zero_keeps_its_sign_beside_a_rank_that_has_nothing() -> None:
    example = torch.zeros(2)
    node = Node(2, rows_of([example], NAMES), [example])
    gradients = [torch.tensor([-0.0, 3.0]), torch.empty(2)]
    for channel in node.channels:
        channel.begin()
    for rank, gradient in enumerate(gradients):
        node.queues[rank].submit(0, 1, gradient, absent=rank == 1)
    for channel in node.channels:
        channel.wait()
    node.stop()
    for gradient in gradients:
        assert gradient.signbit().tolist() == [True, False]
        assert gradient.tolist() == [0.0, 1.5]


@pytest.mark.parametrize(
    ("dtype", "terms", "mean"),
    [(torch.float16, [60_000.0, 60_000.0], 60_000.0), (torch.bfloat16, [256.0, 1.0, 1.0], 86.0)],
)
def test_halves_are_added_up_in_f32(dtype: torch.dtype, terms: list[float], mean: float) -> None:
    """Their own sums would be infinite, or rounded after each addition."""
    example = torch.zeros(1, dtype=dtype)
    node = Node(len(terms), rows_of([example], NAMES), [example])
    for channel in node.channels:
        channel.begin()
    gradients = [torch.tensor([term], dtype=dtype) for term in terms]
    for rank, gradient in enumerate(gradients):
        node.queues[rank].submit(0, 1, gradient, absent=False)
    for channel in node.channels:
        channel.wait()
    node.stop()
    for gradient in gradients:
        assert gradient.item() == torch.tensor(mean, dtype=dtype).item()


def test_memory_is_released_when_its_tensor_is_ready() -> None:
    example = torch.zeros(3)
    node = Node(2, rows_of([example], NAMES), [example])
    for channel in node.channels:
        channel.begin()
    gradients = [torch.ones(3), torch.ones(3)]
    for rank, gradient in enumerate(gradients):
        assert is_alone(gradient)
        node.queues[rank].submit(0, 1, gradient, absent=False)
        assert not is_alone(gradient)
    for channel in node.channels:
        channel.wait()
    del gradient
    assert all(is_alone(gradient) for gradient in gradients)
    for queue in node.queues:
        assert queue.nbytes == 2 * example.nbytes
    node.stop()


class Stuck(ThreadGroup):
    """A group whose collectives never end once the node is open."""

    def broadcast(self, values: Tensor, leader: int) -> Any:
        return RoundWork(self._rounds, 1_000_000)


def test_a_collective_that_never_ends_holds_up_no_end() -> None:
    example = torch.zeros(3)
    others = threads_named(THREAD)
    node = Node(2, rows_of([example], NAMES), [example], group=Stuck)
    for channel in node.channels:
        channel.begin()
    gradients = [torch.ones(3), torch.ones(3)]
    for queue, gradient in zip(node.queues, gradients, strict=True):
        queue.submit(0, 1, gradient, absent=False)
    begun_s = time.monotonic()
    for queue in node.queues:
        queue.cancel()
    node.stop()
    # A million rounds take longer.
    assert time.monotonic() - begun_s < 60
    assert threads_named(THREAD) <= others
    assert all(group.has_ended for group in node.groups)
    # What a collective may still write is kept as long as the queue is.
    del gradient
    assert not any(is_alone(gradient) for gradient in gradients)


class Breaks(ThreadGroup):
    """A group that loses a rank."""

    def broadcast(self, values: Tensor, leader: int) -> Any:
        raise RuntimeError("connection closed by peer")


@pytest.mark.parametrize("is_named", [False, True])
def test_a_broken_collective_is_a_failure_unless_a_lost_rank_is_named(
    monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    monkeypatch.setattr(
        "gradlane.training.node.collective_queue.LOSS_REPORT_S", 5.0 if is_named else 0.05
    )
    example = torch.zeros(3)
    others = threads_named(THREAD)
    node = Node(2, rows_of([example], NAMES), [example], group=Breaks)
    for channel in node.channels:
        channel.begin()
    for queue in node.queues:
        queue.submit(0, 1, torch.ones(3), absent=False)
    if is_named:
        for queue in node.queues:
            queue.cancel()
    assert eventually(lambda: threads_named(THREAD) <= others)
    for channel in node.channels:
        if is_named:
            assert channel.failure is None
        else:
            assert channel.failure is not None
            assert "in a collective of node 0: connection closed by peer" in channel.failure.message


def test_a_group_that_cannot_be_opened_is_an_error() -> None:
    def fails() -> Any:
        raise RuntimeError("no such interface")

    messenger = ThreadMessenger(NodeLayout(2, 2, 1, 0, 1), [])
    queue = CollectiveQueue(messenger, [], [torch.zeros(3)], fails)
    with pytest.raises(RendezvousError, match=r"rank 2 could not open .* no such interface"):
        queue.wait_open(10)


def test_a_rank_that_does_not_come_ends_the_wait() -> None:
    rounds = Rounds(2)
    others = threads_named(THREAD)
    messenger = ThreadMessenger(NodeLayout(1, 2, 0, 0, 1), [])
    queue = CollectiveQueue(messenger, [], [torch.zeros(3)], lambda: ThreadGroup(rounds, 0))
    with pytest.raises(RendezvousError, match=r"rank 0 waited 0\.2 s .*connect_timeout_s"):
        queue.wait_open(0.2)
    assert eventually(lambda: threads_named(THREAD) <= others)


def test_waiting_ends_with_the_session() -> None:
    order = HostOrder(lambda: True)
    with pytest.raises(CollectiveCancelledError):
        order.wait_for(RoundWork(Rounds(2), 0))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(24.0).reshape(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        torch.arange(6.0).to(torch.complex64),
        torch.arange(8.0)[2:].reshape(2, 3),
        torch.tensor(3.0),
    ],
)
def test_numbers_are_those_of_the_memory(tensor: Tensor) -> None:
    numbers = flat_values(tensor)
    pairs = 2 if tensor.is_complex() else 1
    assert numbers.shape == (pairs * tensor.numel(),)
    assert numbers.data_ptr() == tensor.data_ptr()
    numbers.fill_(1.0)
    assert torch.view_as_real(tensor).eq(1).all() if tensor.is_complex() else tensor.eq(1).all()
