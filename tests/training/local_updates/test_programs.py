"""Programs of many kinds with local updates: parameters, optimizers, devices, drawn options."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlane
from gradlane.training.local_updates.fragments import divide
from gradlane.training.model import staging
from gradlane.training.rendezvous.tensor_table import build_table
from tests.training.local_updates.reference import LocalReference
from tests.training.local_updates.test_training import (
    NAMES,
    TWO,
    adam,
    build,
    expected,
    loss,
    trains,
)
from tests.training.model import test_training
from tests.training.model.models import Awkward, CharTransformer, seeded
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import same_bits, snapshot
from tests.training.model.simulated_device import SimulatedDevice

awkward_loss: Any = test_training.awkward_loss


def fragment_names(model: nn.Module, fragments: int) -> list[list[str]]:
    trained = [entry for entry in build_table(model) if entry.trained]
    return [[trained[index].name for index in one] for one in divide(model, trained, fragments)]


def test_fragments_hold_whole_layers_interleaved() -> None:
    assert fragment_names(build(), 2) == [sorted(one, key=NAMES.index) for one in TWO]
    equal = nn.Sequential(*(nn.Linear(4, 4) for _ in range(7)))
    for number, names in enumerate(fragment_names(equal, 3)):
        layers = [int(name.partition(".")[0]) for name in names]
        assert sorted(set(layers)) == list(range(number, 7, 3))
    for model in (seeded(CharTransformer), seeded(Awkward)):
        for count in (1, 2, 3):
            held = [name for one in fragment_names(model, count) for name in one]
            names = [n for n, one in model.named_parameters() if one.requires_grad and one.numel()]
            assert sorted(held) == sorted(names)


def test_tied_frozen_unused_and_empty_parameters() -> None:
    """A parameter without a gradient stays where it is, on each rank."""

    def trained(model: nn.Module, optimizer: Any, rank: int) -> None:
        for step in range(1, 8):
            optimizer.zero_grad()
            value = awkward_loss(model, rank, step)
            if value is not None:
                value.backward()
            optimizer.step()

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        own = [one for one in model.parameters() if one.requires_grad]
        return torch.optim.SGD(own, lr=0.05, momentum=0.9)

    def body(session: Any) -> list[Tensor]:
        model = seeded(Awkward)
        optimizer = sgd(model)
        session.prepare(model, optimizer, buffers="local")
        trained(model, optimizer, session.rank)
        session.synchronize()
        return snapshot(model)

    first, second = run_ranks(2, body, local="off", update=gradlane.Local(steps=8, outer="average"))
    assert same_bits(first, second)
    models = [seeded(Awkward) for _ in range(2)]
    for rank, model in enumerate(models):
        trained(model, sgd(model), rank)
    for one, *own in zip(first, *(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, (own[0] + own[1]).detach() / 2)


def test_several_optimizers_end_a_step_together() -> None:
    def both(model: nn.Module) -> list[torch.optim.Optimizer]:
        ends = [*model[0].parameters(), *model[6].parameters()]  # type: ignore[index]
        middle = [*model[2].parameters(), *model[4].parameters()]  # type: ignore[index]
        return [torch.optim.SGD(ends, lr=0.1, momentum=0.9), torch.optim.Adam(middle, lr=0.01)]

    def body(session: Any) -> list[Tensor]:
        model = seeded(build)
        optimizers = both(model)
        session.prepare(model, optimizers)
        for step in range(1, 6):
            model.zero_grad()
            loss(model, session.rank, step).backward()
            for one in optimizers:
                one.step()
        assert session.step == 5
        return snapshot(model)

    class Together:
        def __init__(self, members: list[torch.optim.Optimizer]) -> None:
            self.members = members

        def zero_grad(self) -> None:
            for one in self.members:
                one.zero_grad()

        def step(self) -> None:
            for one in self.members:
                one.step()

    models = [seeded(build) for _ in range(2)]
    stepping: Any = [Together(both(one)) for one in models]
    reference = LocalReference(models, stepping, [NAMES], steps=2)
    reference.train(5, loss)
    found = run_ranks(2, body, local="off", update=gradlane.Local(steps=2))
    for rank, parameters in enumerate(found):
        assert same_bits(parameters, snapshot(reference.models[rank]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    def body(session: Any) -> Tensor:
        parameter = nn.Parameter(torch.full((3, 5), 1.0, dtype=dtype))
        model = nn.Module()
        model.register_parameter("weight", parameter)
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        session.prepare(model, optimizer)
        for _ in range(4):
            parameter.grad = torch.full_like(parameter, 1.0 + session.rank)
            optimizer.step()
        return parameter.detach().clone()

    for found in run_ranks(2, body, local="off", update=gradlane.Local(steps=2, outer="average")):
        torch.testing.assert_close(found, torch.full((3, 5), 1.0 - 4 * 0.15, dtype=dtype))


def test_accumulation_clipping_and_closures_are_torchs_own() -> None:
    def body(session: Any) -> list[Tensor]:
        model = seeded(build)
        optimizer = adam(model)
        session.prepare(model, optimizer)
        for step in range(1, 6):

            def closure(step: int = step) -> float:
                optimizer.zero_grad()
                with session.no_sync():
                    value = loss(model, session.rank, step) / 2
                    value.backward()
                (loss(model, session.rank, step) / 2).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                return float(value.detach())

            optimizer.step(closure)
        session.synchronize()
        assert session.step == 5
        return snapshot(model)

    first, second = run_ranks(2, body, local="off", update=gradlane.Local(steps=2))
    assert same_bits(first, second)


def test_through_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences are copied as the device gets to it, and their means come back the same way."""
    SimulatedDevice.made.clear()
    monkeypatch.setattr(staging, "CudaCopies", SimulatedDevice)
    reference = expected(2, TWO, steps=4, overlap=2, mix=0.5)
    reference.train(11, loss)
    update = gradlane.Local(steps=4, fragments=2, overlap_steps=2, mix=0.5)
    found = run_ranks(2, lambda it: trains(it, 11), local="off", update=update)
    for rank, parameters in enumerate(found):
        assert same_bits(parameters, snapshot(reference.models[rank]))
    assert SimulatedDevice.made
    for one in SimulatedDevice.made:
        one.end()


@pytest.mark.parametrize("seed", range(12))
def test_drawn_options(seed: int) -> None:
    """Rounds, fragments, overlap, mixes, points that all meet at and samples of all kinds."""
    draw = random.Random(seed)
    world_size = draw.choice([1, 2, 3, 4])
    fragments = draw.choice([1, 1, 2, 3, 4])
    steps = draw.randrange(fragments, 9)
    overlap = draw.randrange(steps // fragments + 1)
    mix = draw.choice([1.0, 0.5, 0.9])
    outer = draw.choice(["average", "sgd", "nesterov"])
    options: dict[str, Any] = {}
    if outer != "average":
        options = {"outer_lr": draw.choice([0.4, 1.0]), "outer_momentum": draw.choice([0.0, 0.8])}
    last = draw.randrange(3, 25)
    meets = draw.randrange(1, last) if draw.random() < 0.5 else last
    reference = expected(
        world_size,
        fragment_names(build(), fragments),
        steps=steps,
        overlap=overlap,
        mix=mix,
        outer=outer,
        lr=options.get("outer_lr", 0.7),
        momentum=options.get("outer_momentum", 0.9),
    )
    reference.train(meets, loss)
    if meets < last:
        reference.synchronize()
    reference.train(last - meets, lambda model, rank, step: loss(model, rank, step + meets))

    def body(session: Any) -> list[Tensor]:
        model = seeded(build, 7 + session.rank)
        optimizer = adam(model)
        session.prepare(model, optimizer)
        for step in range(1, last + 1):
            optimizer.zero_grad()
            loss(model, session.rank, step).backward()
            optimizer.step()
            if step == meets < last:
                session.synchronize()
        return snapshot(model)

    update = gradlane.Local(
        steps=steps,
        fragments=fragments,
        overlap_steps=overlap,
        mix=mix,
        outer=outer,
        **options,
    )
    strategy = draw.choice(["p3", "slicing", "wfbp", "kvstore", "deferred-pull"])
    found = run_ranks(
        world_size, body, local="off", update=update, strategy=strategy, slice_elems=200
    )
    for rank, parameters in enumerate(found):
        assert same_bits(parameters, snapshot(reference.models[rank])), (update, last, meets)


def test_metrics_count_each_ranks_own_steps() -> None:
    logged: dict[int, list[int]] = {0: [], 1: []}

    def body(session: Any) -> Any:
        session.log_to(lambda values, step: logged[session.rank].append(step), every=2)
        trains(session, 9)
        return session.metrics()

    update = gradlane.Local(steps=4, fragments=2, overlap_steps=1)
    for reading in run_ranks(2, body, local="off", update=update, dashboard="0"):
        assert reading["step"] == 9
        assert reading["steps"]["count"] >= 8
    assert logged == {0: [2, 4, 6, 8], 1: [2, 4, 6, 8]}


def test_an_optimizer_steps_on_alone_after_the_session_with_a_warning() -> None:
    def body(session: Any) -> None:
        model = seeded(build)
        optimizer = adam(model)
        session.prepare(model, optimizer)
        loss(model, session.rank, 1).backward()
        optimizer.step()
        session.close()
        before = snapshot(model)
        optimizer.step()
        assert not same_bits(before, snapshot(model))

    # Ranks are threads here, and what catches warnings does so for all of them.
    with pytest.warns(UserWarning, match="from step 1 on this rank trains alone") as caught:
        run_ranks(2, body, local="off", update=gradlane.Local(steps=4))
    assert sum("trains alone" in str(one.message) for one in caught) == 2


class Nested(torch.optim.AdamW):
    """Steps by its base class, whose hooks torch calls, too, once there was one of it."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("scheduled", ["", "before", "after"])
def test_a_step_within_a_step_counts_once(scheduled: str) -> None:
    """And schedulers, which wrap `step` as well, find it as they have left it."""

    def body(session: Any) -> list[Tensor]:
        model = seeded(build, 7 + session.rank)
        adam(model)
        optimizer = Nested(model.parameters(), lr=0.01)
        schedulers = []
        if scheduled == "before":
            schedulers.append(torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))
        session.prepare(model, optimizer)
        if scheduled == "after":
            schedulers.append(torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))
        for step in range(1, 11):
            optimizer.zero_grad()
            loss(model, session.rank, step).backward()
            optimizer.step()
            for one in schedulers:
                one.step()
        assert session.step == 10
        return snapshot(model)

    reference = expected(2, [NAMES], steps=4)
    reference.train(10, loss)
    found = run_ranks(2, body, local="off", update=gradlane.Local(steps=4))
    for rank, parameters in enumerate(found):
        assert same_bits(parameters, snapshot(reference.models[rank]))


def test_a_step_that_fails_is_none_and_the_optimizer_is_plain_again() -> None:
    def body(session: Any) -> None:
        model = seeded(build)
        optimizer = adam(model)
        session.prepare(model, optimizer)

        def fails() -> float:
            raise RuntimeError("no loss")

        with pytest.raises(RuntimeError, match="no loss"):
            optimizer.step(fails)
        assert session.step == 0
        session.close()
        assert "step" not in vars(optimizer)

    run_ranks(1, body, local="off", update=gradlane.Local(steps=4))
