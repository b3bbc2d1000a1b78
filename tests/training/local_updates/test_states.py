"""Sessions with local updates that are stopped and go on, in mid-round and at common points."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import gradlane
from gradlane.training.core import load_core
from tests.training.local_updates.test_training import adam, build, loss
from tests.training.model.models import seeded
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import same_bits, snapshot

CORE: Any = load_core()
LAST = 13
STREAMING = gradlane.Local(steps=6, fragments=2, overlap_steps=2, mix=0.5)
DILOCO = gradlane.Local(steps=4)


def states_of(session: Any, model: Any, optimizer: Any) -> dict[str, Any]:
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "session": session.state_dict(),
    }
    return copy.deepcopy(state)


def steps(session: Any, model: Any, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last + 1):
        optimizer.zero_grad()
        loss(model, session.rank, step).backward()
        optimizer.step()


def saves(session: Any, at: int, *, synchronizes: bool = False) -> tuple[Any, list[Tensor]]:
    model = seeded(build, 7 + session.rank)
    optimizer = adam(model)
    session.prepare(model, optimizer)
    steps(session, model, optimizer, 1, at)
    if synchronizes:
        session.synchronize()
    state = states_of(session, model, optimizer)
    steps(session, model, optimizer, at + 1, LAST)
    return state, snapshot(model)


def goes_on(session: Any, state: Any, *, loads_model: bool = True) -> list[Tensor]:
    model = seeded(build, 70 + session.rank)
    optimizer = adam(model)
    session.prepare(model, optimizer)
    if loads_model:
        model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    session.load_state_dict(state["session"])
    steps(session, model, optimizer, session.step + 1, LAST)
    return snapshot(model)


@pytest.mark.parametrize("update", [DILOCO, STREAMING])
@pytest.mark.parametrize("at", [3, 4, 8, 12])
@pytest.mark.parametrize("codec", [None, "onebit"])
def test_a_world_of_the_same_size_goes_on_with_the_same_bits(
    update: gradlane.Local, at: int, codec: str | None
) -> None:
    """Before a turn, at one, with an exchange under way, and at the end of a round."""
    given: dict[str, Any] = {"core": CORE, "update": update, "codec": codec, "local": "off"}
    saved = run_ranks(2, lambda it: saves(it, at), **given)
    found = run_ranks(2, lambda it: goes_on(it, saved[it.rank][0]), **given)
    for (_, whole), rest in zip(saved, found, strict=True):
        assert same_bits(whole, rest)


def test_saving_changes_nothing() -> None:
    given: dict[str, Any] = {"core": CORE, "update": STREAMING, "local": "off"}
    saved = run_ranks(2, lambda it: saves(it, 7), **given)
    never = run_ranks(2, lambda it: saves(it, LAST), **given)
    for (_, one), (_, other) in zip(saved, never, strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("update", [DILOCO, STREAMING])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_one_ranks_state_of_a_common_point_is_enough_for_any_world(
    update: gradlane.Local, world_size: int
) -> None:
    given: dict[str, Any] = {"core": CORE, "local": "off"}
    saved = run_ranks(2, lambda it: saves(it, 7, synchronizes=True), update=update, **given)
    state = saved[0][0]
    assert same_bits(list(state["model"].values()), list(saved[1][0]["model"].values()))

    def body(session: Any) -> list[Tensor]:
        goes_on(session, state)
        session.synchronize()
        return snapshot(session.models[0])

    # Also into rounds of another length.
    for other in (update, gradlane.Local(steps=3, fragments=3)):
        found = run_ranks(world_size, body, update=other, **given)
        assert all(same_bits(one, found[0]) for one in found)


def test_a_plain_round_ends_at_a_common_point() -> None:
    given: dict[str, Any] = {"core": CORE, "update": DILOCO, "local": "off"}
    state = run_ranks(2, lambda it: saves(it, 8), **given)[0][0]
    run_ranks(3, lambda it: goes_on(it, state), **given)


@pytest.mark.parametrize(
    ("update", "at"), [(DILOCO, 6), (STREAMING, 6), (gradlane.Local(steps=4, mix=0.5), 8)]
)
def test_one_ranks_state_in_mid_round_is_refused(update: gradlane.Local, at: int) -> None:
    given: dict[str, Any] = {"core": CORE, "update": update, "local": "off"}
    saved = run_ranks(2, lambda it: saves(it, at), **given)
    words = r"in mid-round \(step \d\).*load on every rank.*session\.synchronize\(\)"
    for state, world_size in ((saved[0][0], 2), (saved[0][0], 3)):
        with pytest.raises(gradlane.GradlaneError, match=words):
            run_ranks(world_size, lambda it, one=state: goes_on(it, one), **given)


def test_what_does_not_fit_is_refused_by_name() -> None:
    given: dict[str, Any] = {"core": CORE, "local": "off"}
    saved = [one for one, _ in run_ranks(2, lambda it: saves(it, 6), update=DILOCO, **given)]
    later = [one for one, _ in run_ranks(2, lambda it: saves(it, 9), update=DILOCO, **given)]

    def refused(words: str, body: Any, **options: Any) -> None:
        with pytest.raises((gradlane.GradlaneError, ValueError), match=words):
            run_ranks(2, body, **{"update": DILOCO, **given, **options})

    refused(
        r"rank 0: the model's parameters are not those of the state; call model\.load_state_dict",
        lambda it: goes_on(it, saved[it.rank], loads_model=False),
    )
    refused(
        "ranks 0 and 1 have other common values",
        lambda it: goes_on(it, (saved[0], later[1])[it.rank]),
    )
    refused(
        "mid-round with steps=4, and the session has steps=5",
        lambda it: goes_on(it, saved[it.rank]),
        update=gradlane.Local(steps=5),
    )
    refused(
        "state of a session with update=gradlane.Local",
        lambda it: goes_on(it, saved[it.rank]),
        update="worker",
    )
    exact = [one for one, _ in run_ranks(2, lambda it: saves(it, 6), **given)]
    refused("no state of a session with update=", lambda it: goes_on(it, exact[it.rank]))


def test_local_after_exact_training() -> None:
    """Post-local SGD: one session after the other, in one process."""

    def exact(session: Any) -> Any:
        model = seeded(build)
        optimizer = adam(model)
        session.prepare(model, optimizer)
        steps(session, model, optimizer, 1, 4)
        session.close()
        return model, optimizer

    trained = run_ranks(2, exact, core=CORE, local="off")

    def local(session: Any) -> list[Tensor]:
        model, optimizer = trained[session.rank]
        session.prepare(model, optimizer)
        steps(session, model, optimizer, 5, LAST)
        session.close()
        return snapshot(model)

    first, second = run_ranks(
        2, local, core=CORE, local="off", update=gradlane.Local(outer="average")
    )
    assert same_bits(first, second)
    assert not any(torch.isnan(one).any() for one in first)
