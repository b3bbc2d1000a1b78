"""What a session keeps where steps go on without late ranks: nothing is lost, nothing counts twice.

Two ranks, one of which is left out of every step: then a mean is one rank's contribution, and all
that was ever given is in the parameters, in residuals or carried on, whoever was late.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import gradlane
from gradlane.errors import GradlaneError
from gradlane.planning.planner import plan_while_training
from tests.built import needs_core
from tests.forked_programs import ForkedPrograms
from tests.planning.planner.session_programs import OTHER, Decided
from tests.training.checkpoints.kills import check_kills
from tests.training.checkpoints.training import train
from tests.training.model.ranks import run_ranks

pytestmark = needs_core

LR = 0.5
SHAPE = (40, 30)


def given(rank: int, step: int) -> Tensor:
    """A rank's gradient of a step."""
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 * step + rank))


def give(
    session: gradlane.Session,
    model: nn.Linear,
    optimizer: torch.optim.Optimizer,
    steps: range,
    pause_s: Callable[[], float],
) -> list[int]:
    """Train with the given gradients; the steps that this rank took part in."""
    gave = []
    for step in session.keep_pace(steps):
        time.sleep(pause_s())
        (model.weight * given(session.rank, step)).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        gave.append(step)
    session.synchronize()
    return gave


def follow(session: gradlane.Session, last: int, sleeps: float = 0.004) -> dict[str, Any]:
    """Go on from the last checkpoint to a step; say what was given, and what is left."""
    model = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
    begun = session.restore()
    after_restore = session.state_dict()["models"][0]
    chance = random.Random(session.rank)
    steps = range(begun + 1, last + 1)
    gave = give(session, model, optimizer, steps, lambda: sleeps * chance.random())
    return {
        "begun": begun,
        "gave": gave,
        "after_restore": after_restore,
        "state": session.state_dict()["models"][0],
        "weight": model.weight.detach().clone(),
        "left_out": [row["left_out_steps"] for row in session.metrics()["left_out"]],
    }


def run(folder: Path, world_size: int, last: int, **options: Any) -> list[dict[str, Any]]:
    settings = {
        "stragglers": "backup=1",
        "late": "carry",
        "codec": {"*": "onebit"},
        "servers": 1,
        "slice_elems": 500,
        "checkpoint_folder": folder,
        "checkpoint_every": 5,
        "summary": False,
        **options,
    }
    return run_ranks(world_size, lambda session: follow(session, last), **settings)


def owed(results: list[dict[str, Any]], when: str) -> Tensor:
    """All that is still to count, of all ranks."""
    states = [result[when] for result in results]
    total = torch.zeros(SHAPE, dtype=torch.float64)
    for state in states:
        total += state["worker_residual"]["weight"].double()
        if "weight" in state["carried"]:
            total += state["carried"]["weight"].double()
    owner: Tensor = states[0]["owner_residual"]["weight"]
    return total + owner.double()


def test_all_that_was_given_is_applied_kept_or_carried_also_over_a_restart(tmp_path: Path) -> None:
    first = run(tmp_path, 2, 18)
    second = run(tmp_path, 2, 31)
    for results in (first, second):
        assert torch.equal(results[0]["weight"], results[1]["weight"])
        assert all(result["left_out"] == results[0]["left_out"] for result in results)
    assert [result["begun"] for result in second] == [15, 15]
    total = torch.zeros(SHAPE, dtype=torch.float64)
    for rank in range(2):
        # What was given after the checkpoint went with the ranks that stopped.
        steps = [step for step in first[rank]["gave"] if step <= 15] + second[rank]["gave"]
        total += sum((given(rank, step).double() for step in steps), torch.zeros(SHAPE))
    applied = -second[0]["weight"].double() / LR
    assert torch.allclose(applied + owed(second, "state"), total, atol=1e-3)
    assert owed(second, "state").abs().max() > 0.1, "one bit a value loses much"


def test_a_larger_world_starts_with_the_mean_of_what_was_kept_and_carried(tmp_path: Path) -> None:
    run(tmp_path, 2, 10)
    more = run(tmp_path, 3, 20, checkpoint_every=1000)
    assert [result["begun"] for result in more] == [10] * 3
    means = more[0]["after_restore"]
    for result in more:
        kept = result["after_restore"]
        for own, mean in (("worker_residual", "mean_worker_residual"), ("carried", "mean_carried")):
            assert torch.allclose(kept[own]["weight"], means[mean]["weight"], atol=1e-6)
        assert torch.equal(result["weight"], more[0]["weight"])
    assert means["mean_carried"]["weight"].abs().max() > 0.1, "one rank is always late"


def test_late_gradients_that_are_lost_leave_nothing_in_a_checkpoint(tmp_path: Path) -> None:
    results = run(tmp_path, 2, 12, late="discard", codec="raw", check_every=4)
    assert torch.equal(results[0]["weight"], results[1]["weight"])
    for result in results:
        assert result["state"]["carried"] == result["state"]["mean_carried"] == {}
    again = run(tmp_path, 2, 11, late="discard", codec="raw")
    assert [result["begun"] for result in again] == [10, 10]


def test_a_world_of_one_has_nobody_to_leave_out(tmp_path: Path) -> None:
    (alone,) = run(tmp_path, 1, 6)
    assert alone["gave"] == [1, 2, 3, 4, 5, 6] and alone["left_out"] == []
    expected = -LR * sum((given(0, step) for step in range(1, 7)), torch.zeros(SHAPE))
    assert torch.allclose(alone["weight"], expected, atol=1e-5)


def test_what_only_some_ranks_do_together_is_told_to_all() -> None:
    def body(session: gradlane.Session) -> None:
        model = nn.Linear(3, 2)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
        for step in range(3):
            if step == 1 and session.rank == 1:
                session.state_dict()
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.synchronize()

    errors = run_ranks(
        2,
        body,
        expect_errors=True,
        stragglers="drop",
        late="carry",
        summary=False,
    )
    for error in errors:
        assert isinstance(error, GradlaneError), error
    words = " ".join(str(error) for error in errors)
    assert "gathers all ranks" in words and "after the same one" in words, words


def test_ranks_killed_at_random_moments_go_on_with_what_they_carried(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    options = {"update": "worker", "stragglers": "backup=1", "late": "carry", "codec": "onebit"}
    check_kills(programs, tmp_path / "checkpoints", 2, options)


def test_buffers_of_a_checkpoint_are_one_ranks(tmp_path: Path) -> None:
    """A rank that a step went on without has others: a checkpoint must not mix them."""

    def statistics_of(session: gradlane.Session) -> Tensor:
        buffers = dict(session.models[0].named_buffers())
        return torch.cat([buffers["norm.running_mean"], buffers["norm.running_var"]])

    def seen(session: gradlane.Session) -> Tensor:
        train(session, 3)
        return statistics_of(session)

    options: dict[str, Any] = {
        "stragglers": "backup=1",
        "checkpoint_folder": tmp_path,
        "checkpoint_every": 3,
    }
    own = run_ranks(2, seen, summary=False, **options)

    def restored(session: gradlane.Session) -> Tensor:
        train(session, 0)
        return statistics_of(session)

    for found in run_ranks(2, restored, summary=False, **options):
        assert torch.equal(found, own[0])


def test_a_plan_is_put_into_force_in_the_middle_of_a_training(tmp_path: Path) -> None:
    """What is carried, and what encoding has lost, goes along to the new connection."""

    def body(session: gradlane.Session) -> dict[str, Any]:
        model = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        model, optimizer = session.prepare(model, optimizer, plan="auto")
        gave = give(session, model, optimizer, range(1, 21), lambda: 0.003 * session.rank)
        return {
            "gave": gave,
            "state": session.state_dict()["models"][0],
            "weight": model.weight.detach().clone(),
            "plan": session.planning.plan,
        }

    with mock.patch.object(plan_while_training, "Coordinator", Decided):
        results = run_ranks(
            2,
            body,
            stragglers="backup=1",
            late="carry",
            codec={"*": "onebit"},
            servers=1,
            summary=False,
        )
    total = torch.zeros(SHAPE, dtype=torch.float64)
    for rank, result in enumerate(results):
        assert result["plan"].settings == OTHER
        assert torch.equal(result["weight"], results[0]["weight"])
        total += sum((given(rank, step).double() for step in result["gave"]), torch.zeros(SHAPE))
    applied = -results[0]["weight"].double() / LR
    assert torch.allclose(applied + owed(results, "state"), total, atol=1e-3)
