"""Ranks join while others, or they themselves, are killed at drawn moments, in virtual time."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gradlane.training.rendezvous import incarnation, join_requests, rendezvous
from gradlane.training.rendezvous.deadline import SuspendAwareDeadline
from gradlane.training.rendezvous.presence import RankDeadline
from gradlane.training.session import joining
from tests.training.model.virtual_joins import Cluster, Connected, Context, Optimizer, Prepared

FIRST = int(os.environ.get("GRADLANE_JOIN_SEED", "1"))
COUNT = int(os.environ.get("GRADLANE_JOIN_SEEDS", "100"))
CANARY_SEEDS = 200
LONGEST_STEP_S = 60.0
LIMIT_S = 400.0
TRIES_MAX = 4
"""How often a rank asks that cannot be connected to."""


def run(seed: int, monkeypatch: pytest.MonkeyPatch, *, is_unreachable: bool = False) -> Cluster:
    """Run a training of one seed to its end."""
    cluster = Cluster(seed, kills=0 if is_unreachable else seed % 3)
    cluster.is_unreachable = is_unreachable
    clock = cluster.clock
    for module in (join_requests, rendezvous, incarnation):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(join_requests, "threading", clock)
    monkeypatch.setattr(SuspendAwareDeadline.__init__, "__defaults__", (clock.monotonic,))
    monkeypatch.setattr(RankDeadline.__init__, "__defaults__", (None, 0.0, clock.monotonic))
    monkeypatch.setattr(joining, "connect_to_join", cluster.connect_to_join)
    monkeypatch.setattr(joining, "PrecopyTarget", cluster.precopy_target)
    monkeypatch.setattr(joining, "attributes_of", lambda optimizer: {})

    def prepared(
        ctx: Context,
        meet: object,
        model: object,
        optimizer: Optimizer,
        defer: bool,
        buffers: str,
        *,
        connected: Connected,
        attributes: object,
        steps_before: int,
    ) -> Prepared:
        return Prepared(cluster, ctx, connected, optimizer, steps_before)

    monkeypatch.setattr(joining, "PreparedModel", prepared)
    cluster.run(LIMIT_S)
    return cluster


def check(cluster: Cluster) -> None:
    """Check that all that live train together, and that nobody has waited for long."""
    alive = [one for one in cluster.processes if not one.is_killed]
    assert not cluster.clock.failures, "\n".join(cluster.clock.failures)
    assert len(cluster.ends) == len(alive)
    assert len(set(cluster.ends)) == 1, cluster.ends
    assert len(cluster.ends[0][1]) == len(alive), cluster.ends
    assert max(one.longest_step_s for one in alive) <= LONGEST_STEP_S


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "gradlane")


@pytest.mark.slow
def test_ranks_join_whoever_is_killed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """One or two ranks join three, and up to two of all are killed; others join in their place."""
    for seed in range(FIRST, FIRST + COUNT):
        cluster = run(seed, monkeypatch)
        try:
            check(cluster)
        except AssertionError as error:
            raise AssertionError(
                f"seed {seed} (GRADLANE_JOIN_SEED={seed} GRADLANE_JOIN_SEEDS=1): {error}"
            ) from error


def test_a_rank_that_cannot_be_reached_asks_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try stops the members: it is a few, and they train on as before."""
    for seed in range(1, 4):
        cluster = run(seed, monkeypatch, is_unreachable=True)
        joiners = len(cluster.processes) - 3
        assert TRIES_MAX <= cluster.tries <= TRIES_MAX * joiners
        assert not cluster.clock.failures, "\n".join(cluster.clock.failures)
        assert [members for _, members, _ in cluster.ends] == [(0, 1, 2)] * 3


def test_a_rank_that_is_interrupted_takes_nothing_over_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its threads would go on as long as the members train, and hold its process up."""
    closed: list[str] = []

    class Request:
        def __init__(self, store: object) -> None:
            pass

        def wait_for_invitation(self, _: object, begin_precopy: Callable[[bytes], object]) -> None:
            begin_precopy(b"{}")
            raise KeyboardInterrupt

    monkeypatch.setattr(joining, "JoinRequest", Request)
    monkeypatch.setattr(joining, "PrecopyPlan", dict)
    monkeypatch.setattr(
        joining, "PrecopyTarget", lambda *_: SimpleNamespace(close=closed.append, is_ready=False)
    )
    monkeypatch.setattr(joining, "attributes_of", lambda optimizer: {})
    _, store, world, optimizer = Cluster(1).parts(0, 1)
    joins: Any = joining.Joins(world, store, [], lambda: None)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        joins.join(None, optimizer, True, "local")
    assert closed == ["KeyboardInterrupt: "]


@pytest.mark.slow
def test_members_that_do_not_agree_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary: each member believes that all others could connect."""
    gather = Prepared.gather_integers
    counts: dict[Prepared, int] = {}

    def credulous(self: Prepared, values: list[int]) -> list[list[int]]:
        found = gather(self, values)
        if not values:
            # Before they connect.
            counts[self] = len(found)
        return [values] * counts[self]

    monkeypatch.setattr(Prepared, "gather_integers", credulous)
    for seed in range(1, 1 + CANARY_SEEDS):
        cluster = run(seed, monkeypatch)
        with contextlib.suppress(AssertionError):
            check(cluster)
            continue
        return
    pytest.fail(f"{CANARY_SEEDS} seeds have not found it")
