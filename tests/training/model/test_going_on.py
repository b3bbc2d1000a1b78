"""Training that goes on when ranks are lost: the same bits on all survivors."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlane
from gradlane.training.options.options import Options, keywords_of
from gradlane.training.rendezvous.membership import MembershipChange
from tests.training.model.held_core import HeldCore
from tests.training.model.ranks import run_ranks
from tests.training.model.test_going_on_processes import check_reference
from tests.waiting import eventually

LAST_STEP = 7
FATAL_STEP = 3


class DiedError(Exception):
    """A rank's end."""


class Model(nn.Module):
    """Two layers and the statistics of batch norm; inputs (N, 6)."""

    def __init__(self, reached: Callable[[str], None] = lambda moment: None) -> None:
        super().__init__()
        # Batch norm would leave a bias no gradient but what rounding makes.
        self.first = nn.Linear(6, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 2)
        # Ranks are threads, and torch's own generator is all of theirs.
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-0.4, 0.4, generator=generator)
        # The second layer's gradients have left then, and the first one's have not.
        self.norm.register_full_backward_hook(lambda *_: reached("backward"))

    def forward(self, values: Tensor) -> Tensor:
        return self.second(torch.relu(self.norm(self.first(values))))  # type: ignore[no-any-return]


def loss_of(model: nn.Module, rank: int, step: int) -> Any:
    generator = torch.Generator().manual_seed(100 * step + rank)
    loss: Any = (model(torch.randn(4, 6, generator=generator)) - 1.0).square().mean()
    return loss


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(
    session: gradlane.Session, victims: tuple[int, ...], moment: str, lost: int = 0
) -> tuple[list[list[Tensor]], list[tuple[int, MembershipChange]], list[tuple[int, int]]]:
    """Train to the last step, or die; return states, changes and ranks by step."""
    own, step = session.rank, 0

    def reached(now: str) -> None:
        if step == FATAL_STEP and now == moment and own in victims:
            raise DiedError(f"at {moment}")

    model = Model(reached)
    optimizer = optimizer_of(model)
    session.prepare(model, optimizer)
    changes: list[tuple[int, MembershipChange]] = []
    session.on_membership(lambda change: changes.append((step, change)))
    places, states = [], []
    for step in range(1, LAST_STEP + 1):
        if step > FATAL_STEP and lost:
            # A thread learns of it.
            assert eventually(lambda: len(session.metrics()["lost"]) >= lost, 20.0)
        places.append((session.rank, session.world_size))
        reached("before")
        loss = loss_of(model, own, step)
        loss.backward()
        reached("after backward")
        assert (session.rank, session.world_size) == places[-1]
        optimizer.step()
        reached("after step")
        optimizer.zero_grad()
        assert session.step == step
        states.append([value.clone() for value in model.state_dict().values()])
    session.synchronize()
    return states, changes, places


def check_states(states: list[list[Tensor]], world_size: int, survivors: list[int]) -> None:
    """Check that each mean is over all ranks or the survivors, and from some step on over these."""
    model = Model()
    training = model, optimizer_of(model)
    words = check_reference(states, world_size, survivors, training=training, loss_of=loss_of)
    assert words[: FATAL_STEP - 2] == ["old"] * (FATAL_STEP - 2)
    assert words[FATAL_STEP:] == ["new"] * (LAST_STEP - FATAL_STEP)


@pytest.mark.usefixtures("each_gradient_alone")
@pytest.mark.parametrize("moment", ["before", "backward", "after backward", "after step"])
@pytest.mark.parametrize("victims", [(0,), (2,)])
def test_survivors_equal_the_reference(
    victims: tuple[int, ...], moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    results = run_ranks(
        4, lambda one: train(one, victims, moment, 1), expect_errors=True, going_on=True
    )
    survivors = [rank for rank in range(4) if rank not in victims]
    assert all(isinstance(results[rank], DiedError) for rank in victims)
    check_states(results[survivors[0]][0], 4, survivors)
    told = None
    for rank in survivors:
        states, changes, places = results[rank]
        for mine, others in zip(states, results[survivors[0]][0], strict=True):
            assert all(map(torch.equal, mine, others))
        ((step, change),) = changes
        # Steps whose buffers went with the first rank do not count; the others do.
        first = FATAL_STEP - 1 if moment == "before" else FATAL_STEP
        gone = step - first + 1 if victims == (0,) else 0
        assert LAST_STEP - gone <= int(states[-1][5]) <= LAST_STEP
        place = survivors.index(rank)
        assert (change.rank, change.world_size, change.members) == (place, 3, tuple(survivors))
        assert (change.lost, change.joined, change.generation) == (victims, (), 1)
        assert "gave up: DiedError: at" in change.reason
        assert FATAL_STEP - 1 <= change.step <= step + 1
        told = told or (step, replace(change, rank=0))
        assert told == (step, replace(change, rank=0))
        assert places == [(rank, 4)] * step + [(place, 3)] * (LAST_STEP - step)
    lines = [record.message for record in caplog.records if "goes on without" in record.message]
    assert len(lines) == 3
    assert f"goes on without rank {victims[0]}: rank {victims[0]} was lost: it gave up" in lines[0]
    assert "3 of 4 ranks go on" in lines[0]


@pytest.mark.usefixtures("each_gradient_alone")
def test_ranks_are_lost_one_after_the_other() -> None:
    def body(session: gradlane.Session) -> Any:
        own = session.rank
        return train(session, (0, 3) if own in (0, 3) else (), "before" if own else "backward", 2)

    results = run_ranks(5, body, expect_errors=True, going_on=True)
    for rank in (1, 2, 4):
        states, changes, places = results[rank]
        assert all(map(torch.equal, states[-1], results[1][0][-1]))
        assert changes[-1][1].members == (1, 2, 4)
        assert sorted(rank for _, change in changes for rank in change.lost) == [0, 3]
        assert [change.generation for _, change in changes] in ([1, 2], [2], [1])
        assert places[-1] == ((1, 2, 4).index(rank), 3)


@pytest.mark.usefixtures("each_gradient_alone")
def test_half_of_the_ranks_asks_the_store() -> None:
    results = run_ranks(
        2, lambda one: train(one, (0,), "before", 1), expect_errors=True, going_on=True
    )
    assert isinstance(results[0], DiedError)
    states, changes, _ = results[1]
    check_states(states, 2, [1])
    assert [change.members for _, change in changes] == [(1,)]


def test_half_of_the_ranks_ends_where_the_other_half_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register = "gradlane.training.rendezvous.half_register.HalfRegister.claim"
    monkeypatch.setattr(register, lambda self, generation, value: "00")
    results = run_ranks(
        2, lambda one: train(one, (0,), "before"), expect_errors=True, going_on=True
    )
    assert "its register in the job's store holds something else" in str(results[1])


def test_a_lost_store_is_told_and_answers_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def claim(self: Any, generation: int, value: str) -> str:
        raise gradlane.RendezvousError("rank 1 lost the store")

    monkeypatch.setattr("gradlane.training.rendezvous.half_register.HalfRegister.claim", claim)
    results = run_ranks(
        2, lambda one: train(one, (0,), "before"), expect_errors=True, going_on=True
    )
    assert "the job's store, which decides which half goes on, does not answer" in str(results[1])
    assert "half of the ranks are left, and the store alone could tell" in caplog.text


def test_ranks_that_train_unlike_are_still_found() -> None:
    def body(session: gradlane.Session) -> None:
        own, model = session.rank, Model()
        optimizer = optimizer_of(model)
        session.prepare(model, optimizer)
        for step in range(1, LAST_STEP + 1):
            if own == 1 and step == FATAL_STEP:
                raise DiedError
            if own == 3 and step == FATAL_STEP + 2:
                optimizer.param_groups[0]["lr"] = 0.2
            loss_of(model, own, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        session.synchronize()

    results = run_ranks(4, body, expect_errors=True, going_on=True)
    found = [str(one) for one in results if isinstance(one, gradlane.SessionFailedError)]
    assert any("differ between ranks 0, 2 and rank 3" in text for text in found), results


# ---- gather_integers


def test_numbers_of_all_members_are_gathered() -> None:
    long = list(range(-30, 200))

    def body(session: gradlane.Session) -> list[Any]:
        model = Model()
        optimizer = optimizer_of(model)
        session.prepare(model, optimizer)
        found = [session.gather_integers([session.rank, 2**80, -1])]
        loss_of(model, session.rank, 1).backward()
        with pytest.raises(gradlane.UsageError, match="inside step 1"):
            session.gather_integers([])
        optimizer.step()
        found.append(session.gather_integers(long if session.rank == 1 else []))
        loss_of(model, session.rank, 2).backward()
        optimizer.step()
        assert session.step == 2
        return [found, [parameter.detach().clone() for parameter in model.parameters()]]

    results = run_ranks(3, body, going_on=True)
    for found, parameters in results:
        assert found == [[[rank, 2**80, -1] for rank in range(3)], [[], long, []]]
        assert all(map(torch.equal, parameters, results[0][1]))


def test_a_rank_is_lost_while_numbers_are_gathered() -> None:
    def body(session: gradlane.Session) -> Any:
        model = Model()
        session.prepare(model, optimizer_of(model))
        changes: list[Any] = []
        session.on_membership(changes.append)
        if session.rank == 0:
            raise DiedError
        found = session.gather_integers([10 * session.rank])
        assert (session.rank, session.world_size) == (changes[0].rank, 2)
        return found

    results = run_ranks(3, body, expect_errors=True, going_on=True)
    assert results[1:] == [[[10], [20]]] * 2


def test_a_rank_that_trains_while_others_gather_is_named() -> None:
    def body(session: gradlane.Session) -> None:
        model = Model()
        optimizer = optimizer_of(model)
        session.prepare(model, optimizer)
        if session.rank == 1:
            loss_of(model, 1, 1).backward()
            optimizer.step()
            session.synchronize()
        else:
            session.gather_integers([1])

    results = run_ranks(2, body, expect_errors=True, going_on=True)
    assert "rank 1 trains a step where this rank is in session.gather_integers()" in str(results[0])
    assert "rank 0 called session.gather_integers() where this rank trains" in str(results[1])


# ---- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"update": "server"}, "takes the optimizer's state"),
        ({"strategy": "kvstore"}, 'strategy="kvstore"'),
        ({"strategy": "asgd", "update": "server"}, 'strategy="asgd"'),
        ({"scheme": "sfb"}, 'scheme="sfb"'),
        ({"codec": "dgc"}, "codec 'dgc'"),
        ({"stragglers": "drop"}, 'use stragglers="wait"'),
        ({"servers": 1}, "servers=1"),
        ({"workers": 1}, "workers=1"),
        ({"check_every": 5}, "check_every=5"),
    ],
)
def test_options_that_do_not_go_on_are_refused_by_name(
    options: dict[str, Any], message: str
) -> None:
    Options.of(**keywords_of(**options))
    with pytest.raises(ValueError, match=f"going_on with .*{re.escape(message)}"):
        Options.of(**keywords_of(**options, going_on=True)).check_world(2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_ranks": 3}, "min_ranks is 3, but there are 2"),
        ({"slice_elems": 31}, "it must be 32 or more"),
        ({"local": "shared"}, 'with local="leader" one of them does'),
    ],
)
def test_options_that_do_not_fit_the_world_are_refused(
    options: dict[str, Any], message: str
) -> None:
    for error in run_ranks(2, lambda _: None, expect_errors=True, **{"going_on": True, **options}):
        assert message in str(error)


def test_sums_on_nodes_are_off() -> None:
    core = HeldCore()
    run_ranks(2, lambda one: train(one, (), ""), core=core, going_on=True)
    assert all("going_on" in channel.settings for channel in core.channels)


def test_calls_that_do_not_go_on_are_refused_by_name() -> None:
    def body(session: gradlane.Session) -> None:
        model = Model()
        optimizer = optimizer_of(model)
        with pytest.raises(gradlane.UsageError, match="no prepared models"):
            session.gather_integers([1])
        for arguments, message in (
            ({"buffers": "average"}, r'going_on with prepare\(buffers="average"'),
            ({"plan": "auto"}, r"going_on with prepare\(plan=.auto"),
        ):
            with pytest.raises((ValueError, gradlane.GradlaneError), match=message):
                session.prepare(model, optimizer, **arguments)  # type: ignore[arg-type]
        session.prepare(model, optimizer)
        second = nn.Linear(2, 2)
        with pytest.raises((ValueError, gradlane.GradlaneError), match="second model"):
            session.prepare(second, optimizer_of(second))
        for call in (
            lambda: session.weight(3),
            session.join,
            lambda: session.arrays.register("x", (1,), "f32"),
        ):
            with pytest.raises(gradlane.UsageError, match="with going_on"):
                call()

    run_ranks(2, body, going_on=True)


def test_calls_that_need_all_ranks_are_refused_after_a_loss() -> None:
    def body(session: gradlane.Session) -> None:
        model = Model()
        optimizer = optimizer_of(model)
        session.prepare(model, optimizer)
        if session.rank == 0:
            raise DiedError
        loss_of(model, session.rank, 1).backward()
        optimizer.step()
        session.synchronize()
        assert eventually(lambda: bool(session.metrics()["lost"]))
        for call in (session.planning.probe, lambda: session.exchange(1)):
            with pytest.raises(gradlane.UsageError, match="after rank 0 was lost"):
                call()
        with pytest.raises(gradlane.UsageError, match="after ranks were lost"):
            session.prepare(model, optimizer)

    results = run_ranks(3, body, expect_errors=True, going_on=True)
    assert isinstance(results[0], DiedError) and results[1:] == [None, None]


def test_a_rank_that_is_lost_while_the_others_prepare_anew_is_named() -> None:
    """They wait for it in the store, whose time limit is far longer than the news takes."""
    waiting = threading.Barrier(3)

    def body(session: gradlane.Session) -> None:
        model = Model()
        optimizer = optimizer_of(model)
        session.prepare(model, optimizer)
        if session.rank == 2:
            waiting.wait()
            raise DiedError

        def named_parameters() -> Any:
            """Let the third rank die: this one has begun."""
            waiting.wait()
            return Model.named_parameters(model)

        model.named_parameters = named_parameters  # type: ignore[method-assign, assignment]
        with pytest.raises(gradlane.SessionFailedError, match=r"DiedError.*while all ranks were"):
            session.prepare(model, optimizer)

    results = run_ranks(3, body, expect_errors=True, going_on=True, connect_timeout_s=3600.0)
    assert isinstance(results[2], DiedError) and results[:2] == [None, None]


def test_without_going_on_nothing_is_gathered_and_a_loss_ends_all() -> None:
    def body(session: gradlane.Session) -> None:
        model = Model()
        optimizer = optimizer_of(model)
        session.prepare(model, optimizer)
        with pytest.raises(gradlane.UsageError, match="going_on=True"):
            session.gather_integers([1])
        if session.rank == 0:
            raise DiedError
        loss_of(model, session.rank, 1).backward()
        optimizer.step()
        session.synchronize()

    results = run_ranks(2, body, expect_errors=True)
    assert isinstance(results[1], gradlane.PeerLostError)
