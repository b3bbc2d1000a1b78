"""Asynchronous training: what nobody waits for, what is right all the same, and what is refused."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import gradlane
from gradlane.training.core import load_core
from gradlane.training.options.options import keywords_of
from tests.training.model.models import seeded
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import same_bits, snapshot


def run_apart(world_size: int, body: Any, **options: Any) -> list[Any]:
    """Run ranks as threads on the real core."""
    core = cast(Any, load_core())
    return run_ranks(world_size, body, core=core, strategy="asgd", update="server", **options)


class Network(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 4))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(16, 8, generator=generator)
    target = x[:, :4] * 2.0 - 1.0
    return nn.functional.mse_loss(model(x), target)


RULES: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.003),
}


@pytest.mark.parametrize("name", list(RULES))
def test_one_rank_alone_gets_the_bits_of_updates_on_the_server(name: str) -> None:
    def body(session: Any) -> tuple[list[Tensor], Any]:
        model = seeded(Network)
        optimizer = RULES[name](model.parameters())
        session.prepare(model, optimizer)
        for step in range(1, 9):
            loss_of(model, 0, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        session.synchronize()
        return snapshot(model), optimizer.state_dict()["state"]

    core = cast(Any, load_core())
    ((alone, state),) = run_apart(1, body)
    ((exact, exact_state),) = run_ranks(1, body, core=core, update="server")
    assert same_bits(alone, exact)
    assert state.keys() == exact_state.keys()
    for index, values in exact_state.items():
        for key, value in values.items():
            assert torch.equal(state[index][key], value), (index, key)


def test_one_rank_alone_is_plain_sgd() -> None:
    """As in `docs/optimizers.md`: torch's own kernel fuses the two operations and rounds once."""

    def body(session: Any) -> list[Tensor]:
        model = seeded(Network)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        session.prepare(model, optimizer)
        plain = seeded(Network)
        for step in range(1, 9):
            loss_of(model, 0, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            loss_of(plain, 0, step).backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                for parameter in plain.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad * torch.tensor(0.05))
                    parameter.grad = None
        session.synchronize()
        assert same_bits(snapshot(model), snapshot(plain))
        return snapshot(model)

    run_apart(1, body)


def test_ranks_run_as_many_steps_as_they_like_and_end_alike() -> None:
    steps = [30, 7, 18]

    def body(session: Any) -> tuple[list[Tensor], list[float], Any]:
        model = seeded(Network)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        session.prepare(model, optimizer)
        losses = []
        for step in range(1, steps[session.rank] + 1):
            loss = loss_of(model, session.rank, step)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        session.synchronize()
        return snapshot(model), losses, session.monitoring.staleness()

    results = run_apart(3, body, slice_elems=500)
    for parameters, _, _ in results[1:]:
        assert same_bits(parameters, results[0][0])
    assert results[0][1][-1] < 0.7 * results[0][1][0]
    pushes = [sum(told[2][rank]["pushes"] for told in results) for rank in range(3)]
    slices = pushes[0] // 30
    # Every push of every rank was applied, once.
    assert pushes == [slices * count for count in steps]
    for _, _, told in results:
        for reading in told:
            histogram = reading["histogram"]
            assert sum(histogram) == reading["pushes"]
            assert reading["max"] == len(histogram) - 1
            total = sum(staleness * count for staleness, count in enumerate(histogram))
            assert reading["mean"] == pytest.approx(total / reading["pushes"])


def test_a_slow_rank_holds_nobody_up_and_nobody_loses_its_gradients() -> None:
    gate = threading.Event()
    done = threading.Barrier(3, timeout=30.0)

    def body(session: Any) -> tuple[int, list[Tensor], Any]:
        model = seeded(Network)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        slow = session.rank == 2
        for step in range(1, 2 + 1 if slow else 25 + 1):
            loss_of(model, session.rank, step).backward()  # type: ignore[no-untyped-call]
            if slow and step == 2:
                # In the middle of its step it waits until the others have done all of theirs.
                assert gate.wait(30.0)
            optimizer.step()
            optimizer.zero_grad()
            model(torch.zeros(1, 8))
        if not slow:
            gate.set()
        done.wait()
        session.synchronize()
        return step, snapshot(model), session.monitoring.staleness()

    results = run_apart(3, body)
    assert [steps for steps, _, _ in results] == [25, 25, 2]
    assert all(same_bits(parameters, results[0][1]) for _, parameters, _ in results)
    # One whole pass of the others, twice 24 updates or so, lies between the slow rank's two pushes.
    stale = max(reading["max"] for _, _, told in results for reading in told)
    assert stale >= 1


def test_adam_counts_every_rank_s_pushes_and_its_state_goes_out_and_comes_in() -> None:
    def body(session: Any) -> tuple[Any, Any, list[Tensor]]:
        model = seeded(Network)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
        session.prepare(model, optimizer)

        def train(count: int) -> None:
            for step in range(count):
                loss_of(model, session.rank, step).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()

        train(3 + 2 * session.rank)
        first = optimizer.state_dict()
        optimizer.load_state_dict(first)
        train(1)
        second = optimizer.state_dict()
        session.synchronize()
        return first, second, snapshot(model)

    results = run_apart(2, body, slice_elems=700)
    for first, second, parameters in results:
        for index in range(4):
            assert first["state"][index]["step"] == 8.0
            assert second["state"][index]["step"] == 10.0
            assert torch.isfinite(second["state"][index]["exp_avg_sq"]).all()
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(second["state"][index][key], results[0][1]["state"][index][key])
        assert same_bits(parameters, results[0][2])


CODECS = {
    "bf16": 0.05,
    "int8": 0.05,
    "qsgd:bits=4": 0.05,
    "onebit:bucket=64": 0.05,
    "topk:ratio=0.05": 0.05,
    "dgc:ratio=0.05,momentum=0": 0.05,
    # With momentum steps are up to ten times as long.
    "dgc:ratio=0.05,momentum=0.9,clip=2": 0.005,
}
"""Codecs, and the learning rate for each."""


def train_encoded(codec: str, lr: float) -> tuple[float, float, int]:
    """Train three ranks; return the first loss, the last one, and bytes that all have sent."""

    def body(session: Any) -> tuple[float, float, int]:
        model = seeded(Network)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        session.prepare(model, optimizer)
        first = float(loss_of(model, 7, 0).detach())
        for step in range(60):
            loss_of(model, session.rank, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        session.synchronize()
        last = float(loss_of(model, 7, 0).detach())
        state = session.state_dict()
        session.load_state_dict(state)
        return first, last, sum(peer["tx_bytes"] for peer in session.metrics()["peers"])

    results = run_apart(3, body, codec=codec, slice_elems=700, summary=False)
    assert len({last for _, last, _ in results}) == 1, "all have the same in the end"
    return results[0][0], results[0][1], sum(sent for _, _, sent in results)


def test_encoded_pushes_learn_as_raw_ones_do_in_fewer_bytes() -> None:
    """Every codec; replies are parameters and travel as they are: half of the bytes stay."""
    first, plain, raw_bytes = train_encoded("raw", 0.05)
    assert plain < 0.02 * first
    for codec, lr in CODECS.items():
        _, last, sent = train_encoded(codec, lr)
        assert last < 0.04 * first, f"{codec}: {first} to {last}, and {plain} without"
        assert sent < (0.8 if codec == "bf16" else 0.68) * raw_bytes, codec


def test_a_rank_that_gives_up_is_named_by_those_that_wait_for_all() -> None:
    def body(session: Any) -> None:
        model = seeded(Network)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        loss_of(model, session.rank, 1).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if session.rank == 1:
            time.sleep(0.2)
            raise ArithmeticError("the loss is not a number")
        session.synchronize()

    (waited, _) = run_apart(2, body, expect_errors=True)
    assert isinstance(waited, gradlane.GradlaneError)
    assert "rank 1" in str(waited) and "the loss is not a number" in str(waited)


def test_ranks_that_call_different_things_are_told_so() -> None:
    def body(session: Any) -> None:
        model = seeded(Network)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        if session.rank == 0:
            session.synchronize()

    errors = run_apart(2, body, expect_errors=True)
    assert any(
        isinstance(error, gradlane.RanksDifferError) and "session.synchronize()" in str(error)
        for error in errors
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"strategy": "asgd"}, 'use update="server"'),
        ({"strategy": "asgd", "update": "server", "check_every": 3}, "parameters differ"),
    ],
)
def test_options_that_do_not_go_with_it_are_refused(options: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        gradlane.init(**keywords_of(rank=0, world_size=1, **options))


def test_calls_that_do_not_go_with_it_are_refused() -> None:
    def body(session: Any) -> None:
        model = seeded(Network)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with pytest.raises(gradlane.UsageError, match="the same results"):
            session.prepare(model, optimizer, plan="auto")
        session.prepare(model, optimizer)
        with pytest.raises(gradlane.UsageError, match="different numbers of steps"):
            session.join().__enter__()
        loss_of(model, 0, 1).backward()  # type: ignore[no-untyped-call]
        with pytest.raises(gradlane.UsageError, match=r"after optimizer.step\(\)"):
            session.synchronize()
        optimizer.step()

    run_apart(1, body)
