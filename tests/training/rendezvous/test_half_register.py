"""Of two halves of the ranks one goes on, whatever a stranger does to the keys in the store."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from torch._C._distributed_c10d import HashStore

from gradlane.errors import RendezvousError
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.half_register import HalfRegister
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from tests.training.rendezvous.stores import bounded
from tests.waiting import eventually

SECRET = "0123456789abcdef" * 4
ROOT = "gradlane/job/0/0/halves"
PATIENCE_S = 30.0


class World:
    """The registers of four ranks in one store, and a stranger who writes it."""

    def __init__(self, secret: str | None = SECRET) -> None:
        self.store = HashStore()
        self.registers = [
            HalfRegister(
                RendezvousScope(
                    bounded(self.store, rank, secret=secret), RankInfo(rank, 4, "job", 0), 0, 5.0
                )
            )
            for rank in range(4)
        ]
        for register in self.registers:
            register.open()
        self.failures: list[tuple[int, str]] = []
        self.first = self.stored("")

    def stored(self, key: str) -> str:
        return str(self.store.get(ROOT + key).decode())

    def watch(self, rank: int, generation: int = 1) -> None:
        self.registers[rank].watch(generation, lambda reason: self.failures.append((rank, reason)))

    def close(self) -> None:
        for register in self.registers:
            register.close()


@pytest.fixture(params=[None, SECRET])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(request.param)
    yield made
    made.close()


def test_the_first_claim_stays_and_all_hear_the_same(world: World) -> None:
    assert world.registers[2].claim(1, "aa") == "aa"
    assert [one.claim(1, "bb") for one in world.registers] == ["aa"] * 4
    assert world.registers[3].claim(2, "cc") == world.registers[2].claim(2, "dd") == "cc"
    for rank in (2, 3):
        world.watch(rank)
        world.registers[rank].check()
    assert world.failures == []


def test_two_halves_that_claim_at_once_hear_the_same() -> None:
    for _ in range(20):
        registers = World().registers
        with ThreadPoolExecutor(2) as threads:
            heard = list(threads.map(lambda one: one.claim(1, str(id(one))), registers[::3]))
        assert len(set(heard)) == 1


def test_without_a_register_nobody_claims(world: World) -> None:
    assert world.registers[0].claim(1, "aa") == "aa"
    world.store.delete_key(ROOT)
    world.store.delete_key(f"{ROOT}/0")
    with pytest.raises(RendezvousError, match=r"was removed.*rank 2 cannot tell.*min_ranks"):
        world.registers[2].claim(1, "bb")


def test_an_earlier_register_put_back_does_not_hide_a_claim(world: World) -> None:
    assert world.registers[0].claim(1, "aa") == "aa"
    world.store.set(ROOT, world.first)
    # By the first half's own word.
    with pytest.raises(RendezvousError, match="has lost a claim"):
        world.registers[2].claim(1, "bb")


@pytest.mark.parametrize("what", ["removed", "put back", "own word removed", "own word put back"])
def test_a_half_that_goes_on_ends_where_its_claim_is_hidden(world: World, what: str) -> None:
    register = world.registers[0]
    register.claim(1, "aa")
    early = world.stored("/0")
    register.claim(2, "cc")
    world.watch(0, 2)
    if what == "removed":
        world.store.delete_key(ROOT)
    elif what == "put back":
        world.store.set(ROOT, world.first)
    elif what == "own word removed":
        world.store.delete_key(f"{ROOT}/0")
    else:
        world.store.set(f"{ROOT}/0", early)
    assert eventually(lambda: bool(world.failures), PATIENCE_S)
    assert "rank 0 cannot tell whether another half goes on" in world.failures[0][1]
    with pytest.raises(RendezvousError, match="restart from the last checkpoint"):
        register.check()


def test_two_halves_that_a_stranger_has_let_go_on_find_each_other_and_end(world: World) -> None:
    assert world.registers[0].claim(1, "aa") == "aa"
    word, register = world.stored("/0"), world.stored("")
    world.store.delete_key(f"{ROOT}/0")
    world.store.set(ROOT, world.first)
    assert world.registers[2].claim(1, "bb") == "bb"
    world.store.set(f"{ROOT}/0", word)
    world.store.set(ROOT, register)
    for rank in (0, 2):
        world.watch(rank)
    assert eventually(lambda: {rank for rank, _ in world.failures} == {0, 2}, PATIENCE_S)


def test_values_of_a_stranger_are_refused_where_there_is_a_secret() -> None:
    world = World()
    world.store.set(ROOT, '{"1": "bb"}')
    with pytest.raises(RendezvousError, match="not signed"):
        world.registers[0].claim(1, "aa")
    world.store.set(ROOT, world.first)
    world.store.set(f"{ROOT}/3", '{"1": "bb"}')
    with pytest.raises(RendezvousError, match="not signed"):
        world.registers[0].claim(1, "aa")


def test_a_majority_that_has_decided_looks_at_nothing(world: World) -> None:
    world.watch(0)
    world.watch(1)
    world.store.delete_key(ROOT)
    world.registers[0].check()
    assert world.failures == []


@pytest.mark.parametrize("seed", range(25))
def test_drawn_deletions_and_replays_never_let_two_halves_end_well(seed: int) -> None:
    """Between two looks of a rank the stranger may do anything that it has seen before."""
    drawn = random.Random(seed)
    world = World()
    keys = ["", *(f"/{rank}" for rank in range(4))]
    seen: dict[str, list[str]] = {key: [] for key in keys}
    values: dict[int, str] = {}

    def attack() -> None:
        for key in keys:
            if world.store.check([ROOT + key]):
                seen[key].append(world.stored(key))
        for key in keys:
            if drawn.random() < 0.5:
                world.store.delete_key(ROOT + key)
            if seen[key] and drawn.random() < 0.5:
                world.store.set(ROOT + key, drawn.choice(seen[key]))

    halves = [(0, "aa"), (2, "bb")]
    drawn.shuffle(halves)
    for rank, value in halves:
        with suppress(RendezvousError):
            values[rank] = world.registers[rank].claim(1, value)
        if values.get(rank) == value:
            world.watch(rank)
        attack()
    for rank, value in halves:
        if values.get(rank) == value:
            with suppress(RendezvousError):
                world.registers[rank].check()
                values[rank] += " ended well"
    world.close()
    assert sum(value.endswith("ended well") for value in values.values()) <= 1
