"""Ranks are lost between and in exchanges, and the others finish their round."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, TCPStore

import gradlane
from gradlane.errors import SessionFailedError, UsageError
from gradlane.training.local_updates.outer_exchange import OuterExchange
from gradlane.training.model.barrier import Barrier
from gradlane.training.rendezvous.membership import MembershipChange
from tests.built import needs_core
from tests.forked_programs import PATIENCE_S, ForkedPrograms, rank_environments
from tests.training.local_updates.reference import LocalReference
from tests.training.local_updates.test_training import NAMES, adam, build, loss
from tests.training.model import ranks
from tests.training.model.models import seeded
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import same_bits, snapshot
from tests.waiting import eventually

WORLD = 4
DEAD = "the loss is not a number"
Hook = Callable[[Any, int], None]


def train(session: Any, steps: int, before: Hook) -> dict[str, Any]:
    """Train, with `before(session, step)` before each step of the optimizer, and meet."""
    number = session.rank
    model = seeded(build, 7 + number)
    optimizer = adam(model)
    session.prepare(model, optimizer)
    changes: list[tuple[int, MembershipChange]] = []
    step = 0
    session.on_membership(lambda change: changes.append((step, change)))
    states = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss(model, number, step).backward()
        before(session, step)
        optimizer.step()
        states.append(snapshot(model))
    session.synchronize()
    return {
        "states": states,
        "common": snapshot(model),
        "changes": changes,
        "place": (session.rank, session.world_size),
        "lost": session.metrics()["lost"],
    }


def dies(victim: int, fatal_step: int, heard_by: int = 0) -> Hook:
    """One rank dies before a step of its optimizer; others hear of it before another one."""

    def before(session: Any, step: int) -> None:
        if session.rank == victim and session.world_size == WORLD and step == fatal_step:
            raise ArithmeticError(DEAD)
        if step == heard_by:
            assert eventually(lambda: bool(session.metrics()["lost"]), 60.0)

    return before


def run(victim: int, body: Callable[[Any], Any], **given: Any) -> list[Any]:
    update = gradlane.Local(**given.pop("local"))
    results = run_ranks(
        WORLD,
        body,
        update=update,
        local="off",
        going_on=True,
        expect_errors=True,
        **given,
    )
    assert isinstance(results[victim], ArithmeticError), results
    left = [one for rank, one in enumerate(results) if rank != victim]
    for one in left:
        assert isinstance(one, dict), results
        assert same_bits(one["common"], left[0]["common"])
    return left


@pytest.mark.parametrize("victim", [0, 2])
def test_rounds_after_a_loss_are_of_those_that_are_left(victim: int) -> None:
    left = run(
        victim,
        lambda it: train(it, 13, dies(victim, 6, heard_by=8)),
        local={"steps": 4},
    )
    models = [seeded(build) for _ in range(WORLD)]
    optimizers = [adam(one) for one in models]
    numbers = list(range(WORLD))
    reference = LocalReference(models, optimizers, [NAMES], steps=4)
    reference.train(5, loss)
    del numbers[victim], models[victim], optimizers[victim]
    reference.train(8, lambda model, rank, step: loss(model, numbers[rank], step))
    reference.synchronize()
    for place, (model, found) in enumerate(zip(models, left, strict=True)):
        assert same_bits(found["common"], snapshot(model))
        ((step, change),) = found["changes"]
        # All know of it in the exchange after step 8.
        assert step == 8 and change.members == tuple(numbers) and change.lost == (victim,)
        assert change.rank == place and found["place"] == (place, WORLD - 1)
        assert DEAD in change.reason and found["lost"][0]["rank"] == victim


def test_an_exchange_is_finished_without_a_rank() -> None:
    """Each slice's mean is over all ranks, or over those that are left."""
    victim = 1
    left = run(
        victim,
        lambda it: train(it, 9, dies(victim, 5)),
        local={"steps": 4, "overlap_steps": 2, "outer": "average"},
    )
    after = []
    for numbers in ([0, 1, 2, 3], [0, 2, 3]):
        models = [seeded(build) for _ in numbers]
        optimizers = [adam(one) for one in models]
        reference = LocalReference(models, optimizers, [NAMES], steps=4, overlap=2, outer="average")

        def of_number(model: nn.Module, rank: int, step: int, among: Any = numbers) -> Any:
            return loss(model, among[rank], step)

        reference.train(6, of_number)
        after.append(snapshot(models[0]))
    for found in left:
        for one, with_all, with_left in zip(found["states"][5], *after, strict=True):
            assert bool(((one == with_all) | (one == with_left)).all())


@pytest.mark.parametrize("codec", [None, "qsgd:bits=8", "topk:ratio=0.1,bits=4"])
@pytest.mark.parametrize("fatal_step", [3, 6, 7])
@pytest.mark.parametrize("victim", [0, 3])
def test_all_that_are_left_have_the_same_bits(
    codec: str | None, fatal_step: int, victim: int
) -> None:
    left = run(
        victim,
        lambda it: train(it, 20, dies(victim, fatal_step, heard_by=12)),
        local={"steps": 6, "fragments": 2, "overlap_steps": 1, "mix": 0.5},
        codec=codec,
    )
    assert [found["place"][1] for found in left] == [WORLD - 1] * 3


def test_states_after_a_loss() -> None:
    def body(session: Any) -> dict[str, Any]:
        found = train(session, 9, dies(1, 2, heard_by=3))
        state = session.state_dict()
        with pytest.raises(UsageError, match="after rank 1 was lost: it needs the lost rank, too"):
            session.load_state_dict(state)
        return {**found, "state": state}

    left = run(1, body, local={"steps": 4})
    states = [found["state"] for found in left]
    assert all(one["models"][0]["world_size"] == WORLD - 1 for one in states)

    def resumed(session: Any) -> list[Tensor]:
        model = seeded(build, 7 + session.rank)
        optimizer = adam(model)
        with torch.no_grad():
            for one, value in zip(model.parameters(), left[0]["common"], strict=True):
                one.copy_(value)
        session.prepare(model, optimizer)
        session.load_state_dict(states[0])
        return snapshot(model)

    found = run_ranks(2, resumed, update=gradlane.Local(steps=4), local="off")
    assert all(same_bits(one, left[0]["common"]) for one in found)


def test_keys_are_deleted_after_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the lost rank's own few: a store outlives many sessions."""
    after_a_loss, whole = HashStore(), HashStore()
    monkeypatch.setattr(ranks, "HashStore", lambda: after_a_loss)
    run(1, lambda it: train(it, 9, dies(1, 2, heard_by=3)), local={"steps": 4})
    monkeypatch.setattr(ranks, "HashStore", lambda: whole)
    update = gradlane.Local(steps=4)
    run_ranks(
        WORLD,
        lambda it: train(it, 9, lambda *_: None),
        update=update,
        local="off",
        going_on=True,
    )
    assert after_a_loss.num_keys() - whole.num_keys() <= 5


def test_numbers_are_gathered_between_exchanges_and_when_members_change() -> None:
    """Also beside an exchange that is under way."""

    def body(session: Any) -> dict[str, Any]:
        number = session.rank
        gathered: list[list[list[int]]] = []
        session.on_membership(lambda _: gathered.append(session.gather_integers([number] * 9)))

        def before(session: Any, step: int) -> None:
            dies(2, 6, heard_by=8)(session, step)
            if step in (5, 10):
                gathered.append(session.gather_integers([number, step]))

        return {**train(session, 13, before), "gathered": gathered}

    for found in run(2, body, local={"steps": 4, "overlap_steps": 2, "mix": 0.5}):
        before, changed, after = found["gathered"]
        assert before == [[rank, 5] for rank in range(WORLD)]
        assert changed == [[rank] * 9 for rank in (0, 1, 3)]
        assert after == [[rank, 10] for rank in (0, 1, 3)]


def test_an_epoch_goes_on_with_the_rest_of_the_data() -> None:
    """The others train what the lost rank has not trained, and no sample twice."""
    samples: Any = [torch.tensor([float(at)] * 6) for at in range(96)]

    def body(session: Any) -> dict[str, Any]:
        number, trained = session.rank, by_rank[session.rank]
        sampler = gradlane.ElasticSampler(samples, batch_size=2, session=session)
        loader: Any = torch.utils.data.DataLoader(samples, batch_sampler=sampler)
        model = seeded(build, 7 + number)
        optimizer = adam(model)
        session.prepare(model, optimizer)
        for step, inputs in enumerate(sampler.track(loader), 1):
            if number == 1 and step == 6:
                raise ArithmeticError(DEAD)
            optimizer.zero_grad()
            model(inputs / 96).square().mean().backward()
            trained += [int(one) for one in inputs[:, 0]]
            optimizer.step()
        session.synchronize()
        return {"common": snapshot(model)}

    by_rank: list[list[int]] = [[] for _ in range(WORLD)]
    run(1, body, local={"steps": 2, "outer": "average"})
    of_others = [one for rank in (0, 2, 3) for one in by_rank[rank]]
    assert len(set(of_others)) == len(of_others)
    assert set(of_others) | set(by_rank[1]) == set(range(96))


def test_a_loss_is_noted_in_the_step_of_an_exchange_that_this_rank_has_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others are in it, and wait."""
    late, victim, seen = 0, 1, {}
    waits: list[int] = []
    wait = OuterExchange.wait

    def noted_wait(exchange: OuterExchange) -> Any:
        waits.append(exchange.step)
        return wait(exchange)

    monkeypatch.setattr(OuterExchange, "wait", noted_wait)

    def before(session: Any, step: int) -> None:
        if session.rank == victim and session.world_size == WORLD and step == 12:
            # The others are in the exchange after step 12.
            assert eventually(lambda: waits.count(3) == WORLD - 2, 60.0)
            raise ArithmeticError(DEAD)
        if session.rank == late and step == 12:
            assert eventually(lambda: bool(session.metrics()["lost"]), 60.0)
            seen.update(session.metrics()["lost"][0])

    left = run(victim, lambda it: train(it, 13, before), local={"steps": 4})
    assert seen["step"] == 8
    assert [found["lost"][0]["step"] for found in left] == [12] * 3


@pytest.mark.parametrize("codec", [None, "topk:ratio=0.1"])
def test_a_rank_that_is_lost_while_all_load_a_state_ends_them(
    codec: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[Barrier] = []
    all_here = Barrier.all_here

    def noted_wait(barrier: Barrier, *words: str) -> list[str]:
        waits.append(barrier)
        return all_here(barrier, *words)

    monkeypatch.setattr(Barrier, "all_here", noted_wait)

    def body(session: Any) -> None:
        train(session, 4, lambda *_: None)
        state = session.state_dict()
        if session.rank == 1:
            assert eventually(lambda: len(waits) == 2, 60.0)
            raise ArithmeticError(DEAD)
        session.load_state_dict(state)

    update = gradlane.Local(steps=4)
    options: dict[str, Any] = {"update": update, "local": "off", "going_on": True, "codec": codec}
    results = run_ranks(3, body, expect_errors=True, **options)
    for one in (results[0], results[2]):
        assert isinstance(one, SessionFailedError) and "rank 1 was lost" in str(one), results


def test_members_that_change_in_close_are_told_to_nobody() -> None:
    """No step follows, and a callback could gather nothing any more."""

    def body(session: Any) -> Any:
        model = seeded(build, 7 + session.rank)
        optimizer = adam(model)
        session.prepare(model, optimizer)
        session.on_membership(lambda _: session.gather_integers([1]))
        loss(model, session.rank, 1).backward()
        if session.rank == 1:
            raise ArithmeticError(DEAD)
        assert eventually(lambda: bool(session.metrics()["lost"]), 60.0)
        optimizer.step()
        session.close(300.0)
        return session.rank, session.world_size

    options: dict[str, Any] = {"local": "off", "going_on": True, "expect_errors": True}
    results = run_ranks(4, body, update=gradlane.Local(steps=4), **options)
    assert [results[0], *results[2:]] == [(0, 3), (1, 3), (2, 3)]


def test_numbers_are_gathered_by_all_or_none() -> None:
    def body(session: Any) -> None:
        model = seeded(build)
        optimizer = adam(model)
        session.prepare(model, optimizer)
        if session.rank == 1:
            session.gather_integers([1])
        loss(model, session.rank, 1).backward()
        optimizer.step()

    update = gradlane.Local(steps=1)
    first, second = run_ranks(
        2, body, update=update, local="off", going_on=True, expect_errors=True
    )
    assert "rank 1 calls session.gather_integers(): every rank takes the same" in str(first)
    assert "rank 0 trains a step where this rank is in session.gather_integers()" in str(second)


@needs_core
@pytest.mark.parametrize("local_size", [1, 2])
@pytest.mark.parametrize("fatal_step", [3, 4, 6])
def test_processes_are_killed(
    programs: ForkedPrograms, tmp_path: Path, fatal_step: int, local_size: int
) -> None:
    """The ranks of a node are lost as one."""
    world_size, victim = 3 * local_size, local_size
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = {
        "port": store.port,
        "folder": str(tmp_path),
        "world_size": world_size,
        "update": {"steps": 4, "fragments": 2, "overlap_steps": 1},
        "options": {"connect_timeout_s": PATIENCE_S},
        "ends": {str(victim): fatal_step},
    }
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job))
    environments = rank_environments(world_size, local_size)
    program = "tests.training.local_updates.going_rank"
    codes = programs.wait_all(programs.start_all(tmp_path, program, [str(path)], environments))
    lost = [victim // local_size == rank // local_size for rank in range(world_size)]
    errors = [(tmp_path / f"errors-{rank}").read_text() for rank in range(world_size)]
    assert [code != 0 for code in codes] == lost, errors
    left = [
        json.loads((tmp_path / f"rank-{rank}.json").read_text())
        for rank in range(world_size)
        if not lost[rank]
    ]
    assert len({one["common"] for one in left}) == 1
    assert [one["place"] for one in left] == [[at, len(left)] for at in range(len(left))]
