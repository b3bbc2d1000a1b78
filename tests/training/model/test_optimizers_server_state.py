"""Optimizer state that lives on the servers: saved, loaded, resumed, moved to another layout."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

import gradlane
from gradlane.training.core import rank_channel
from gradlane.training.model.lazy_state import plain_state
from gradlane.training.options.options import keywords_of
from tests.built import needs_core
from tests.training.model.models import Attention, Awkward, seeded
from tests.training.model.pool import FirstRanks, RankPool
from tests.training.model.prepared_models import seen_prepared
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import same_bits, snapshot, train_reference
from tests.training.model.test_training import awkward_loss, batch

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "sgd-plain": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, weight_decay=0.1),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
}
CLOSE: Any = {"rtol": 1e-5, "atol": 1e-6}
"""Of torch's kernels, which fuse operations that the servers round one by one."""


def run_steps(
    session: Any, model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int
) -> None:
    for step in range(first, last + 1):
        awkward_loss(model, session.rank, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Assert that two optimizer state dictionaries are equal in every bit."""
    assert one["state"].keys() == other["state"].keys()
    for key, mine in one["state"].items():
        theirs = other["state"][key]
        assert mine.keys() == theirs.keys(), key
        for name in mine:
            assert same_bits([torch.as_tensor(mine[name])], [torch.as_tensor(theirs[name])])
            assert mine[name].stride() == theirs[name].stride(), name


def through_a_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_the_state_is_that_of_training_alone(name: str) -> None:
    """Also that of parameters which had a gradient in some steps only, or never."""
    make_optimizer = OPTIMIZERS[name]
    kept: list[torch.optim.Optimizer] = []

    def keep(model: nn.Module) -> torch.optim.Optimizer:
        kept.append(make_optimizer(model))
        return kept[-1]

    train_reference(2, 6, lambda: seeded(Awkward), keep, awkward_loss)

    def body(session: Any) -> dict[str, Any]:
        model = seeded(Awkward)
        optimizer = make_optimizer(model)
        session.prepare(model, optimizer)
        assert optimizer.state_dict()["state"] == {}
        run_steps(session, model, optimizer, 1, 6)
        assert len(plain_state(optimizer)) == 0, "nothing is kept twice"
        with pytest.raises(gradlane.UsageError, match="the state is on the servers"):
            len(optimizer.state)
        state = copy.deepcopy(optimizer.state_dict())
        assert len(plain_state(optimizer)) == 0
        return state

    first, second = run_ranks(2, body, update="server")
    same_state(first, second)
    torch.testing.assert_close(first["state"], kept[0].state_dict()["state"], **CLOSE)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_resumed_runs_equal_uninterrupted_ones(name: str) -> None:
    make_optimizer = OPTIMIZERS[name]

    def whole(session: Any) -> list[Tensor]:
        model = seeded(Awkward)
        optimizer = make_optimizer(model)
        session.prepare(model, optimizer)
        run_steps(session, model, optimizer, 1, 5)
        # Saving changes nothing.
        optimizer.state_dict()
        run_steps(session, model, optimizer, 6, 9)
        return snapshot(model)

    def first_half(session: Any) -> Any:
        model = seeded(Awkward)
        optimizer = make_optimizer(model)
        session.prepare(model, optimizer)
        run_steps(session, model, optimizer, 1, 5)
        return through_a_file({"m": model.state_dict(), "o": optimizer.state_dict()})

    def second_half(session: Any, saved: Any, after_prepare: bool) -> list[Tensor]:
        model = seeded(Awkward, seed=1)
        optimizer = make_optimizer(model)
        model.load_state_dict(saved["m"])
        if not after_prepare:
            optimizer.load_state_dict(saved["o"])
        session.prepare(model, optimizer)
        if after_prepare:
            run_steps(session, model, optimizer, 1, 2)
            model.load_state_dict(saved["m"])
            optimizer.load_state_dict(saved["o"])
        same_state(optimizer.state_dict(), saved["o"])
        run_steps(session, model, optimizer, 6, 9)
        return snapshot(model)

    saved = run_ranks(2, first_half, update="server")[0]
    expected = run_ranks(2, whole, update="server")[0]
    alone = train_reference(2, 9, lambda: seeded(Awkward), make_optimizer, awkward_loss)
    torch.testing.assert_close(expected, snapshot(alone[0]), **CLOSE)
    for update in ("server", "worker"):
        for after_prepare in (False, True):

            def resumed(session: Any, after: bool = after_prepare) -> list[Tensor]:
                return second_half(session, copy.deepcopy(saved), after)

            for parameters in run_ranks(2, resumed, update=update):
                assert update == "worker" or same_bits(parameters, expected), after_prepare
                torch.testing.assert_close(parameters, expected, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_state_of_short_floats_stays_exact(dtype: torch.dtype) -> None:
    """It is f32 on the servers and in the checkpoint, though torch rounds it when it loads it."""

    def body(session: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        model = seeded(Attention).to(dtype)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        state = {
            index: {
                "step": torch.tensor(3.0),
                "exp_avg": torch.randn(parameter.shape, generator=generator),
                "exp_avg_sq": torch.rand(parameter.shape, generator=generator),
            }
            for generator in [torch.Generator().manual_seed(5)]
            for index, parameter in enumerate(model.parameters())
        }
        loaded = {**optimizer.state_dict(), "state": state}
        optimizer.load_state_dict(loaded)
        found = copy.deepcopy(optimizer.state_dict())
        model(batch((2, 5, 8), session.rank, 1).to(dtype)).square().mean().backward()
        optimizer.step()
        return loaded, found

    for loaded, found in run_ranks(2, body, update="server"):
        for index, state in found["state"].items():
            for name in ("exp_avg", "exp_avg_sq"):
                assert same_bits([state[name]], [loaded["state"][index][name]])


def test_a_checkpoint_of_another_optimizer_or_model_is_refused() -> None:
    def body(session: Any) -> None:
        model = nn.Linear(3, 2)
        other = nn.Linear(3, 2)
        sgd = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
        adam = torch.optim.Adam(other.parameters())
        other(torch.ones(1, 3)).sum().backward()
        sgd.step()
        adam.step()
        optimizer = torch.optim.Adam(model.parameters())
        session.prepare(model, optimizer)
        incomplete = copy.deepcopy(adam.state_dict())
        del incomplete["state"][0]["exp_avg_sq"]
        with pytest.raises(ValueError, match=r"'weight' has \['exp_avg', 'step'\] after 1 steps"):
            optimizer.load_state_dict(incomplete)
        misfit = copy.deepcopy(adam.state_dict())
        misfit["state"][1]["exp_avg"] = torch.zeros(5)
        with pytest.raises(ValueError, match=r"exp_avg of 'bias' has shape \(5,\)"):
            optimizer.load_state_dict(misfit)
        # A refused one changes nothing.
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert optimizer.state_dict()["state"][0]["step"] == 1.0
        unprepared = nn.Linear(3, 2)
        with_state = torch.optim.Adam(unprepared.parameters())
        with_state.load_state_dict(incomplete)
        with pytest.raises(ValueError, match=r"'weight' has \['exp_avg', 'step'\] after 1 steps"):
            session.prepare(unprepared, with_state)

    run_ranks(1, body, update="server")


def test_ranks_that_load_different_states_are_told() -> None:
    def body(session: Any) -> None:
        model = seeded(Awkward)
        optimizer = torch.optim.Adam(model.parameters())
        session.prepare(model, optimizer)
        run_steps(session, model, optimizer, 1, 2)
        state = copy.deepcopy(optimizer.state_dict())
        if session.rank == 1:
            state["state"][0]["exp_avg"].view(-1)[0] += 1.0
        optimizer.load_state_dict(state)
        run_steps(session, model, optimizer, 3, 3)

    errors = run_ranks(2, body, update="server", expect_errors=True)
    assert any(isinstance(error, gradlane.RanksDifferError) for error in errors)
    assert "have loaded different optimizer states" in "".join(map(str, errors))


def test_ranks_that_prepare_with_different_states_are_told() -> None:
    def body(session: Any) -> None:
        model = seeded(Awkward)
        optimizer = torch.optim.Adam(model.parameters())
        if session.rank == 1:
            awkward_loss(model, 0, 1).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(gradlane.RanksDifferError, match="optimizer_state"):
            session.prepare(model, optimizer)

    run_ranks(2, body, update="server")


@pytest.mark.parametrize("call", ["state_dict", "load_state_dict"])
def test_a_collective_call_on_one_rank_only_is_named(call: str) -> None:
    def body(session: Any) -> None:
        model = seeded(Awkward)
        optimizer = torch.optim.Adam(model.parameters())
        session.prepare(model, optimizer)
        run_steps(session, model, optimizer, 1, 2)
        if session.rank == 0 and call == "load_state_dict":
            optimizer.load_state_dict({**optimizer_state, "state": {}})
        elif session.rank == 0:
            optimizer.state_dict()
        run_steps(session, model, optimizer, 3, 4)

    optimizer_state = torch.optim.Adam(seeded(Awkward).parameters()).state_dict()
    errors = run_ranks(2, body, update="server", progress_timeout_s=1.0, expect_errors=True)
    assert isinstance(errors[0], gradlane.SessionFailedError)
    assert f'{call}() with update="server" is a collective call, which rank 1' in str(errors[0])
    assert isinstance(errors[1], gradlane.SessionFailedError)


def test_an_optimizer_whose_state_stayed_behind_does_not_go_on() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    saved: list[Any] = []

    def body(session: Any) -> None:
        session.prepare(model, optimizer)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        saved.append(optimizer.state_dict())

    run_ranks(1, body, update="server")
    model(torch.ones(1, 3)).sum().backward()
    for call in (optimizer.state_dict, optimizer.step):
        with pytest.raises(gradlane.UsageError, match="on the servers of a session that is closed"):
            call()
    optimizer.load_state_dict(saved[0])
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 2.0


def test_frozen_parameters_keep_their_state_at_home() -> None:
    def body(session: Any) -> dict[str, Any]:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.weight.requires_grad_(False)
        session.prepare(model, optimizer)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return copy.deepcopy(optimizer.state_dict())

    (state,) = run_ranks(1, body, update="server")
    assert [state["state"][index]["step"].item() for index in (0, 1)] == [1.0, 2.0]


@pytest.fixture
def pool(pool: RankPool) -> FirstRanks:
    return FirstRanks(pool, 3)


@needs_core
@pytest.mark.parametrize(
    ("model_name", "kind"),
    [("cnn", "AdamW"), ("cnn", "SGD"), ("awkward", "Adam"), ("bf16", "Adam"), ("f16", "SGD")],
)
def test_processes_resume_in_any_layout(
    pool: FirstRanks, tmp_path: Path, model_name: str, kind: str
) -> None:
    file = str(tmp_path / "checkpoint.pt")
    common: dict[str, Any] = {"model_name": model_name, "kind": kind, "update": "server"}
    # Two equal gradients have themselves as their mean: one rank and two then give the same bits.
    same: dict[str, Any] = {**common, "same_batches": model_name != "awkward"}
    # Before prepare(), torch rounds the state of short floats to theirs.
    late = {"load_late": model_name in ("bf16", "f16", "awkward")}
    whole = pool.run("server_checkpoint", ranks=2, first=1, last=7, **same)
    assert len({(one["model"], one["state"]) for one in whole}) == 1
    assert whole[0]["step"] == 7, "steps that gather state do not count"
    first = pool.run(
        "server_checkpoint",
        ranks=2,
        first=1,
        last=4,
        save=file,
        killed=True,
        slice_elems=50,
        **same,
    )
    layouts: list[tuple[int, dict[str, Any]]] = [
        (2, {"slice_elems": 7}),
        (2, {"strategy": "kvstore", "seed": 3}),
        (2, {"strategy": "deferred-pull"}),
        (3, {"slice_elems": 1000, "work_threads": 0}),
    ]
    layouts += [(1, {})] if same["same_batches"] else []
    for ranks, options in layouts:
        resumed = pool.run(
            "server_checkpoint", ranks=ranks, first=5, last=7, load=file, **late, **same, **options
        )
        for one in resumed:
            assert one["loaded"] == one["again"] == first[0]["state"], options
            if ranks < 3:
                assert (one["model"], one["state"]) == (whole[0]["model"], whole[0]["state"])
        assert len({(one["model"], one["state"]) for one in resumed}) == 1


@needs_core
def test_processes_gather_slices_of_many_frames(pool: FirstRanks, tmp_path: Path) -> None:
    file = str(tmp_path / "checkpoint.pt")
    common: dict[str, Any] = {"model_name": "wide", "kind": "AdamW", "update": "server"}
    whole = pool.run("server_checkpoint", ranks=2, first=1, last=4, **common)
    first = pool.run("server_checkpoint", ranks=2, first=1, last=2, save=file, **common)
    second = pool.run(
        "server_checkpoint", ranks=2, first=3, last=4, load=file, slice_elems=200_000, **common
    )
    for one in second:
        assert one["again"] == first[0]["state"]
        assert (one["model"], one["state"]) == (whole[0]["model"], whole[0]["state"])


@needs_core
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_processes_go_over_between_workers_and_servers(
    pool: FirstRanks, tmp_path: Path, kind: str
) -> None:
    """The state that goes over is the same to the last bit; kernels may differ in theirs."""
    file = str(tmp_path / "checkpoint.pt")
    common: dict[str, Any] = {"ranks": 3, "model_name": "cnn", "kind": kind}
    for saved, loaded in (("worker", "server"), ("server", "worker")):
        before = pool.run("server_checkpoint", first=1, last=3, save=file, update=saved, **common)
        after = pool.run("server_checkpoint", first=4, last=5, load=file, update=loaded, **common)
        for one in after:
            assert one["again"] == before[0]["state"]
        assert len({(one["model"], one["state"]) for one in after}) == 1


@needs_core
@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ('[{"kind": "adagrad", "tensors": [0]}]', "unknown variant `adagrad`"),
        ('[{"kind": "sgd", "tensors": [0], "lr": -1}]', "sgd option lr is -1"),
        ('[{"kind": "sgd", "tensors": [7], "lr": 1}]', "tensor"),
        ('[{"kind": "sgd", "tensors": [0], "lr": 1, "amsgrad": true}]', "unknown field `amsgrad`"),
        (
            '[{"kind": "adam", "tensors": [0], "steps": [], "lr": 1, "beta1": 0.9, "beta2": 0.9, '
            '"eps": 0}]',
            "not as many steps as tensors",
        ),
        (
            '[{"kind": "adam", "tensors": [0], "steps": [0], "lr": 1, "beta1": 1, "beta2": 0.9, '
            '"eps": 0}]',
            'settings of tensor "weight": adam option beta1 is 1',
        ),
    ],
)
def test_the_core_refuses_rows_that_make_no_sense(rows: str, words: str) -> None:
    with gradlane.init(
        update="server",
        rendezvous=gradlane.Rendezvous(
            store=HashStore(), rank=0, world_size=1, job=f"rows-{words}"
        ),
    ) as session:
        model = nn.Linear(3, 2)
        with seen_prepared() as prepared_of:
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        channel = rank_channel(prepared_of(model).channel, "updating on servers")
        with pytest.raises(ValueError, match=words):
            channel.set_optimizer(1, rows)
        values = torch.zeros(3)
        with pytest.raises(ValueError, match="is no state of an optimizer"):
            channel.load_state(0, "exp", values.data_ptr(), 6)
        with pytest.raises(ValueError, match="has 3 elements, the tensor 6"):
            channel.load_state(0, "exp_avg", values.data_ptr(), 3)


def exact_adam(parameter: Any, gradients: list[Any], options: dict[str, Any]) -> tuple[Any, ...]:
    """Torch's single-tensor Adam in numpy, which fuses nothing and takes right square roots."""
    single = np.float32
    beta1, beta2 = options["betas"]
    mean, square = np.zeros_like(parameter), np.zeros_like(parameter)
    for step, gradient in enumerate(gradients, 1):
        if options["decoupled_weight_decay"]:
            parameter = parameter * single(1 - options["lr"] * options["weight_decay"])
        else:
            gradient = gradient + parameter * single(options["weight_decay"])
        weight = single(1 - beta1)
        if weight < 0.5:
            mean = mean + weight * (gradient - mean)
        else:
            mean = gradient - (gradient - mean) * (single(1) - weight)
        square = square * single(beta2) + (single(1 - beta2) * gradient) * gradient
        correction = single((1 - beta2 ** float(step)) ** 0.5)
        rate = single(-(options["lr"] / (1 - beta1 ** float(step))))
        parameter = parameter + (rate * mean) / (
            np.sqrt(square) / correction + single(options["eps"])
        )
    return parameter, mean, square


@needs_core
@pytest.mark.parametrize(
    ("kind", "betas"), [("Adam", (0.9, 0.999)), ("Adam", (0.3, 0.9)), ("AdamW", (0.85, 0.99))]
)
def test_the_servers_follow_torchs_formula_to_the_last_bit(
    kind: str, betas: tuple[float, float]
) -> None:
    class PendingGradient(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(1)
            self.held = nn.Parameter(torch.randn(1003, generator=generator))

    model = PendingGradient()
    start = model.held.detach().numpy().copy()
    optimizer = getattr(torch.optim, kind)(
        model.parameters(), lr=0.0123456789, weight_decay=0.1, betas=betas
    )
    options = {"decoupled_weight_decay": kind == "AdamW", **optimizer.param_groups[0]}
    gradients = [batch((1003,), 0, step) * 10.0**-step for step in range(5)]
    settings: dict[str, Any] = {"rank": 0, "world_size": 1, "job": f"exact-{kind}-{betas}"}
    with gradlane.init(
        **keywords_of(store=HashStore(), update="server", slice_elems=100, **settings)
    ) as session:
        session.prepare(model, optimizer)
        for gradient in gradients:
            (model.held * gradient).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()["state"][0]
        found = [model.held.detach(), state["exp_avg"], state["exp_avg_sq"]]
    expected = exact_adam(start, [one.numpy() for one in gradients], options)
    assert state["step"] == 5.0
    assert same_bits(found, [torch.from_numpy(one) for one in expected])
