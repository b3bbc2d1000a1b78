"""Before ranks are connected, all of them raise the same sentence about who is missing."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from gradlane.errors import GradlaneError, RendezvousError
from gradlane.training.checkpoints.manager import CheckpointManager
from gradlane.training.plans.agreement import agree_on_plan
from gradlane.training.rendezvous.bounded_store import StoreLostError
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from gradlane.training.session import models
from tests.training.model.held_core import HeldCore
from tests.training.model.ranks import run_ranks
from tests.training.rendezvous.stores import bounded


def prepare(session: Any) -> None:
    """Connect a small model."""
    model = nn.Linear(2, 2)
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.fixture
def rank_2_comes_to_the_start_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have rank 2 fail in `prepare` when it has told that it is there, and nothing else."""

    def agree(scope: RendezvousScope, *rest: Any) -> Any:
        if scope.rank_info.rank == 2:
            raise KeyError("no such file")
        return agree_on_plan(scope, *rest)

    monkeypatch.setattr(models, "agree_on_plan", agree)


@pytest.mark.usefixtures("rank_2_comes_to_the_start_alone")
@pytest.mark.parametrize("comes_to_the_start", [False, True])
def test_all_name_the_rank_that_is_missing(comes_to_the_start: bool) -> None:
    """Nobody may take rank 0 for it, which waits for the missing one as well."""

    def body(session: Any) -> None:
        if session.rank < 2:
            prepare(session)
        elif comes_to_the_start:
            with pytest.raises(KeyError):
                prepare(session)

    first, second, _ = run_ranks(3, body, expect_errors=True, connect_timeout_s=0.5)
    assert isinstance(first, RendezvousError) and isinstance(second, RendezvousError)
    assert str(second) == str(first)
    assert "rank 0 waited 0.5 s for rank 2" in str(first)


@pytest.mark.usefixtures("rank_2_comes_to_the_start_alone")
def test_a_program_that_fails_before_it_is_connected_aborts_all_at_once() -> None:
    # Far beyond what the test may take.
    errors = run_ranks(3, prepare, expect_errors=True, connect_timeout_s=300.0)
    assert isinstance(errors[2], KeyError)
    for error in errors[:2]:
        assert isinstance(error, RendezvousError)
        assert str(error) == "rank 2 gave up: KeyError: 'no such file'"


def test_a_rank_that_loses_the_store_in_prepare_aborts_through_the_channel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow = CheckpointManager.follow

    def lost(checkpoints: CheckpointManager, prepared: Any, scope: RendezvousScope) -> None:
        if scope.rank_info.rank == 1:
            raise StoreLostError("rank 1: the rendezvous store does not answer")
        follow(checkpoints, prepared, scope)

    monkeypatch.setattr(CheckpointManager, "follow", lost)

    def body(session: Any) -> None:
        model = nn.Linear(2, 2)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        session.synchronize()

    first, second = run_ranks(2, body, expect_errors=True, checkpoint_folder=tmp_path)
    assert isinstance(second, StoreLostError)
    assert "rank 1 gave up: StoreLostError" in str(first) and "store does not answer" in str(first)


def abort_unreachable(store: HashStore, rank: int, missing: int) -> str:
    """Let a rank give up on another one; returns the sentence."""
    scope = RendezvousScope(bounded(store, rank), RankInfo(rank, 4, "job", 0), 0, 5.0)
    return str(scope.abort_unreachable(missing, f"rank {rank} is not connected to rank {missing}"))


def test_two_ranks_that_miss_each_other_name_their_link() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(lambda pair: abort_unreachable(store, *pair), [(2, 1), (1, 2)]))
    assert said[0] == said[1]
    assert said[0].startswith("the link between rank 1 and rank 2 is cut")
    third = RendezvousScope(bounded(store, 3), RankInfo(3, 4, "job", 0), 0, 5.0)
    with pytest.raises(RendezvousError) as told:
        third.get("word", 0)
    assert str(told.value) == said[0]


def test_a_rank_that_reports_nothing_is_missing() -> None:
    assert abort_unreachable(HashStore(), 1, 2) == "rank 1 is not connected to rank 2"


def test_a_rank_that_is_connected_does_not_go_on_without_the_others() -> None:
    given_up: list[str] = []

    class CutOff(HeldCore):
        """Ranks 1 and 2 do not reach each other, and rank 0 reaches both."""

        def Channel(self, listener: Any, options: str, *_: Any) -> Any:  # noqa: N802
            rank = json.loads(options)["rank"]
            if rank > 0:
                raise self.ChannelTimeout(f"rank {rank} has no answer", None, 3 - rank)
            return SimpleNamespace(is_ready=lambda *_: False, abort=given_up.append)

    def body(session: Any) -> None:
        prepare(session)

    errors = run_ranks(3, body, core=CutOff(), expect_errors=True)
    assert all(isinstance(error, RendezvousError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]).startswith("the link between rank 1 and rank 2 is cut")
    assert given_up == [str(errors[0])]


@pytest.mark.parametrize("failing", [1, 2], ids=["first channel", "further channel"])
@pytest.mark.parametrize("kind", ["ChannelError", "KeyError"])
def test_a_connecting_rank_hears_that_another_ended_before_it_called(
    failing: int, kind: str
) -> None:
    """Its address is known by then, so that nobody asks the store for it any more."""
    waiting = threading.Event()

    class Ending(HeldCore):
        """Rank 1 ends before it calls rank 0, which waits for that in a channel."""

        opened = 0

        def Channel(self, listener: Any, options: str, *rest: Any) -> Any:  # noqa: N802
            if json.loads(options)["rank"] == 0:
                self.opened += 1
                if self.opened == failing:
                    waiting.set()
            elif self.channels_of_rank_1() == failing - 1:
                assert waiting.wait(30.0)
                raise {"ChannelError": self.ChannelError, "KeyError": KeyError}[kind]("no room")
            return super().Channel(listener, options, *rest)

        def channels_of_rank_1(self) -> int:
            return sum(one.rank == 1 for one in self.channels)

    def body(session: Any) -> None:
        for _ in range(failing):
            prepare(session)

    # Far beyond what the test may take.
    first, second = run_ranks(
        2, body, core=Ending(), expect_errors=True, timeout_s=15.0, connect_timeout_s=300.0
    )
    assert type(second) is (RendezvousError if kind == "ChannelError" else KeyError)
    assert isinstance(first, GradlaneError) and "no room" in str(first), first
    assert "rank 1 " in str(first)


def test_rank_0_stays_until_its_reason_was_read() -> None:
    """The store may end with its process."""
    store = HashStore()
    scopes = [
        RendezvousScope(bounded(store, rank), RankInfo(rank, 3, "job", 0), 0, 30.0)
        for rank in (0, 1)
    ]
    reading = threading.Event()

    def second() -> str:
        reading.set()
        with pytest.raises(RendezvousError) as told:
            scopes[1].get("word", 0)
        return str(told.value)

    with ThreadPoolExecutor(1) as threads:
        heard = threads.submit(second)
        assert reading.wait(30.0)
        error = scopes[0].abort("rank 2 is missing", [2])
        # What rank 1 has read it has also acknowledged.
        assert bounded(store).read(f"gradlane/{scopes[0].name}/heard/1", 1) is not None
        assert heard.result(30.0) == str(error) == "rank 2 is missing"


def test_a_connecting_rank_reads_the_reason_before_the_store_ends() -> None:
    store = HashStore()
    first, second = (
        RendezvousScope(bounded(store, rank), RankInfo(rank, 3, "job", 0), 0, 30.0)
        for rank in (0, 1)
    )
    with second.watching_for_abort():
        assert str(first.abort("rank 2 was lost", [2])) == "rank 2 was lost"
        assert bounded(store).read(f"gradlane/{first.name}/heard/1", 1) is not None
    store.set(f"gradlane/{first.name}/reason", "the store has ended")
    assert (
        str(second.abort_unreachable(2, "rank 1 is not connected to rank 2")) == "rank 2 was lost"
    )
    assert str(second.abort("rank 1 ends")) == "rank 2 was lost"
