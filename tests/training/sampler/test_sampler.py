"""Orders, states and refusals of the sampler."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from gradlane.errors import GradlaneError, RanksDifferError, SessionFailedError, UsageError
from gradlane.training.rendezvous.membership import MembershipChange
from gradlane.training.sampler.agreement import AgreementRow
from gradlane.training.sampler.sampler import ElasticSampler
from tests.training.sampler.world import AheadLoader, World, change


class Session:
    """A session whose other ranks tell what a test says."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size
        self.step = 0
        self.callback: Callable[[MembershipChange], object] = lambda change: None
        self.tell: Callable[[AgreementRow], list[AgreementRow]] = lambda row: [row] * world_size

    def on_membership(self, callback: Callable[[MembershipChange], object]) -> object:
        self.callback = callback
        return None

    def gather_integers(self, values: list[int]) -> list[list[int]]:
        return [row.numbers() for row in self.tell(AgreementRow.of(values))]


def made(samples: int = 20, batch_size: int = 4, **settings: Any) -> ElasticSampler:
    return ElasticSampler(
        range(samples), batch_size, settings.pop("session", Session()), **settings
    )


def batches(sampler: ElasticSampler, ahead: int = 0) -> list[list[int]]:
    return list(sampler.track(AheadLoader(sampler, ahead)))


def changed(row: AgreementRow, **fields: Any) -> AgreementRow:
    return AgreementRow(**{**row.__dict__, **fields})


def test_an_epoch_has_an_order_of_its_own_and_the_same_again() -> None:
    sampler = made(seed=5)
    first, second = batches(sampler), batches(sampler)
    assert sampler.epoch == 2
    assert first != second
    for epoch in (first, second):
        assert sorted(index for batch in epoch for index in batch) == list(range(20))
    sampler.set_epoch(1)
    assert batches(sampler, ahead=3) == second
    assert batches(made(seed=6)) == second, "the seed of an epoch is seed + epoch"


def test_without_shuffling_ranks_take_turns_in_the_datasets_order() -> None:
    ranks = [made(22, 4, session=Session(rank, 2), shuffle=False) for rank in range(2)]
    first, second = map(batches, ranks)
    assert first == [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18]]
    assert second == [[4, 5, 6, 7], [12, 13, 14, 15], [19, 20, 21]]
    full = made(22, 4, session=Session(0, 2), shuffle=False, drop_last=True)
    assert batches(full) == first[:2]


def test_too_few_samples_for_a_last_step_are_spread_over_two_steps() -> None:
    ranks = [made(13, 4, session=Session(rank, 3), shuffle=False) for rank in range(3)]
    assert [list(map(len, batches(rank))) for rank in ranks] == [[3, 2], [2, 2], [2, 2]]


def test_where_ranks_are_more_than_samples_some_are_repeated() -> None:
    ranks = [made(2, 4, session=Session(rank, 3), shuffle=False) for rank in range(3)]
    assert [batches(rank) for rank in ranks] == [[[0]], [[1]], [[0]]]


def test_the_length_is_that_of_the_loop_and_follows_the_members() -> None:
    world = World(2, lambda session: made(40, 4, session=session), lambda one: AheadLoader(one, 2))
    world.begin_epoch()
    assert [len(world.samplers[name]) for name in (0, 1)] == [5, 5]
    world.train()
    world.train(lost=[1])
    left = 40 - 3 * 4
    assert len(world.samplers[0]) == 2 + left // 4
    world.train(joining=1)
    assert (len(world.samplers[0]), len(world.samplers[2])) == (6, 3)


@given(
    world_sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    batch_sizes=st.tuples(st.integers(2, 6), st.integers(2, 6)),
    samples=st.integers(4, 120),
    steps=st.integers(0, 40),
    ahead=st.integers(0, 5),
    lost=st.booleans(),
)
def test_a_state_goes_on_with_what_is_left_in_a_world_of_any_size(
    world_sizes: tuple[int, int],
    batch_sizes: tuple[int, int],
    samples: int,
    steps: int,
    ahead: int,
    lost: bool,
) -> None:
    def world(number: int) -> World:
        size, batch_size = world_sizes[number], batch_sizes[number]
        return World(
            size,
            lambda session: made(samples, batch_size, session=session),
            lambda sampler: AheadLoader(sampler, ahead),
        )

    before, after = world(0), world(1)
    before.begin_epoch()
    for step in range(steps):
        before.train(lost=[0] if lost and step == 1 and world_sizes[0] > 1 else [])
    states = {json.dumps(before.samplers[name].state_dict()) for name in before.members}
    assert len(states) == 1 and len(next(iter(states))) < 400
    state = json.loads(states.pop())
    for name in after.members:
        after.samplers[name].load_state_dict(state)
    ended = state["epoch"] == 1
    trained = Counter() if ended else before.trained
    after.begin_epoch()
    while after.train():
        pass
    total = trained + after.trained
    assert set(total) == set(range(samples))
    assert sum(total.values()) - samples < world_sizes[0] + world_sizes[1]
    assert {after.samplers[name].epoch for name in after.members} == {state["epoch"] + 1}


def test_the_batch_of_a_step_that_has_not_ended_is_left() -> None:
    session = Session()
    sampler = made(12, 4, session=session, shuffle=False)
    for _ in sampler.track(AheadLoader(sampler, 1)):
        assert sampler.state_dict()["left"] == ([[session.step * 4, 12]] if session.step else None)
        session.step += 1
    assert sampler.state_dict() == {
        "version": 1,
        "epoch": 1,
        "left": None,
        "samples": 12,
        "shuffle": False,
        "seed": 0,
    }


def test_a_loop_that_is_left_puts_back_what_was_not_trained() -> None:
    session = Session()
    sampler = made(20, 4, session=session, shuffle=False)
    for number, _ in enumerate(sampler.track(AheadLoader(sampler, 3))):
        if number == 2:
            break
        session.step += 1
    assert sampler.state_dict()["left"] == [[8, 20]]
    sampler.set_epoch(0)
    assert batches(sampler)[0] == [8, 9, 10, 11]
    sampler.set_epoch(0)
    assert len(batches(sampler)) == 5


def test_a_large_dataset_takes_no_memory_beside_its_order() -> None:
    tracemalloc.start()
    try:
        session = Session(rank=3, world_size=64)
        sampler = made(10**8, 256, session=session, shuffle=False)
        loop = sampler.track(AheadLoader(sampler, 16))
        assert next(loop) == list(range(3 * 256, 4 * 256))
        assert len(sampler) == -(-(10**8) // (64 * 256))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: made(0), "empty range"),
        (lambda: made(batch_size=0), "batch_size=0"),
        (lambda: made(seed=-1), "seed=-1"),
        (lambda: made().set_epoch(-1), r"set_epoch\(-1\)"),
        (lambda: ElasticSampler(cast(Any, Stream()), 4, Session()), "Stream, which has no length"),
    ],
)
def test_what_cannot_be_drawn_from_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


class Stream(IterableDataset[int]):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version 2, expected 1"),
        ({"samples": 21}, "samples=21, and this one has 20"),
        ({"seed": 1}, "seed=1"),
        ({"shuffle": False}, "shuffle=False"),
        ({"epoch": -1}, "epoch is -1"),
        ({"left": 7}, "no list of ranges"),
        ({"left": [[1, "x"]]}, "no list of ranges"),
        ({"left": [[0, 21]]}, "0 to 21 of 20"),
        ({"left": [[0, 5], [4, 6]]}, "some twice"),
        ({"left": [[5, 5]]}, "5 to 5"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    sampler = made()
    with pytest.raises(ValueError, match=words):
        sampler.load_state_dict({**made().state_dict(), **change})
    assert len(batches(sampler)) == 5


def test_drawing_outside_of_a_loop_is_refused() -> None:
    sampler = made()
    loader = DataLoader(TensorDataset(torch.zeros(20)), batch_sampler=sampler)
    with pytest.raises(UsageError, match=r"sampler\.track\(loader\)"):
        next(iter(loader))


def test_loaders_that_do_not_yield_the_samplers_batches_are_refused() -> None:
    sampler = made()
    with pytest.raises(UsageError, match="does not draw from this sampler"):
        list(sampler.track([]))
    with pytest.raises(UsageError, match="has not drawn"):
        list(sampler.track([[0, 1, 2, 3]]))

    class Skipping(AheadLoader):
        def __iter__(self) -> Iterator[list[int]]:
            inner = super().__iter__()
            return (next(inner) for _ in range(2))

    with pytest.raises(UsageError, match="ended with 3 batches"):
        list(sampler.track(Skipping(sampler, 5)))

    class Unordered(AheadLoader):
        in_order = False

    with pytest.raises(UsageError, match="in_order"):
        list(sampler.track(Unordered(sampler, 0)))


def test_an_epoch_cannot_be_changed_inside_of_a_loop() -> None:
    sampler = made()
    loop = sampler.track(AheadLoader(sampler, 0))
    next(loop)
    with pytest.raises(UsageError, match="inside of a track"):
        sampler.load_state_dict(made().state_dict())
    sampler.set_epoch(0)
    next(loop)
    sampler.set_epoch(3)
    with pytest.raises(UsageError, match="epoch 3 was begun"):
        next(loop)


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"settings": (21, 4, 0, 1, 0)}, RanksDifferError, "number of samples: 20 and 21"),
        ({"settings": (20, 4, 0, 1, 8)}, RanksDifferError, "seed: 0 and 8"),
        ({"epoch": 2}, RanksDifferError, "rank 0 is in epoch 0 .* rank 1 in epoch 2"),
        ({"cut": 1}, SessionFailedError, "different places of epoch 0"),
        ({"trained": 4}, SessionFailedError, "0 and 4 batches"),
        ({"has_begun": 1}, SessionFailedError, "ranks 0 and 1"),
    ],
)
def test_ranks_that_differ_are_named(
    fields: dict[str, Any], kind: type[GradlaneError], words: str
) -> None:
    session = Session(0, 2)
    session.tell = lambda row: [row, changed(row, **fields)]
    with pytest.raises(kind, match=words):
        batches(made(session=session))


def test_a_rank_that_joins_with_other_settings_is_refused_there_alone() -> None:
    member, joins = Session(0, 1), Session(1, 2)
    stays, refused = made(20, session=member), made(21, session=joins)
    told: list[AgreementRow] = []

    def tell(row: AgreementRow) -> list[AgreementRow]:
        told.append(row)
        return [row, changed(row, settings=(21, 4, 0, 1, 0), is_member=0, description="")]

    member.tell = tell
    member.callback(change(1, 0, (0, 7), (7,)))
    assert len(stays) == 3
    joins.tell = lambda row: [told[0], row]
    with pytest.raises(RanksDifferError, match="which joins, differ in their number of samples"):
        joins.callback(change(1, 1, (0, 7), (7,)))
    assert repr(refused) == "<ElasticSampler of 21 samples, batch_size=4, epoch 0, rank 1 of 2>"


def test_ranks_that_join_cannot_go_on_alone() -> None:
    session = Session()
    made(session=session)
    with pytest.raises(SessionFailedError, match="no rank that is left knows"):
        session.callback(change(1, 0, (7,), (7,)))
