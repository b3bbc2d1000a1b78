"""Sparse gradients: rows on the wire, torch's own for the optimizer, the same bits on all ranks."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradlane.errors import RanksDifferError, UsageError
from tests.built import needs_core
from tests.torch_versions import torch_release
from tests.training.model import sparse_programs
from tests.training.model.held_core import HeldCore
from tests.training.model.models import seeded
from tests.training.model.pool import RankPool
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import run_reference, same_bits
from tests.training.model.sparse_programs import (
    OPTIMIZERS,
    PROGRAMS,
    Mixed,
    Words,
    backward,
    loss_of,
    trains,
)

# Torch's own Adagrad warns of the invariants of sparse tensors that it makes itself.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
MODULE = "tests.training.model.sparse_programs"
DENSE = ("sgd-momentum", "sgd-decay", "adam")
"""Optimizers that are given a dense mean."""
Trained = tuple[list[Tensor], list[Tensor]]


def assert_same(found: list[Trained], expected: list[Trained]) -> None:
    """Assert the reference's bits of parameters and optimizer state on every rank."""
    for (parameters, state), (expected_parameters, expected_state) in zip(
        found, expected, strict=True
    ):
        assert same_bits(parameters, expected_parameters)
        assert same_bits(state, expected_state)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("build", ["words", "bags", "mixed"])
def test_optimizers_step_on_the_mean_as_torch_does(build: str, optimizer: str) -> None:
    if build == "mixed" and optimizer == "sparse-adam":
        pytest.skip("it takes no dense gradients")

    def body(session: Any) -> Trained:
        return trains(session, build, optimizer)

    assert_same(run_ranks(3, body), run_reference(3, body))


@pytest.mark.parametrize("given", [{}, {"defer": False}])
@pytest.mark.parametrize("optimizer", ["sparse-adam", "adagrad", "sgd-momentum"])
@pytest.mark.parametrize("program", list(PROGRAMS))
def test_loops_of_all_kinds(program: str, optimizer: str, given: dict[str, Any]) -> None:
    if optimizer in DENSE and program == "on_top_of_means":
        pytest.skip("a dense mean and a sparse gradient: as in torch, a dense one")
    if program == "clipped_by_torch" and optimizer not in DENSE and torch_release() <= (2, 11):
        pytest.skip("this torch takes no norm of sparse gradients")

    def body(session: Any) -> Trained:
        return trains(session, "words", optimizer, program, **given)

    assert_same(run_ranks(2, body), run_reference(2, body))


def test_weighted_rows_are_clipped_by_the_norm_of_weighted_means() -> None:
    """Their norm is that of the means times a factor: the same but for rounding."""

    def body(session: Any) -> Tensor:
        model = seeded(Mixed)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        session.prepare(model, optimizer)
        for step in range(sparse_programs.STEPS):
            sparse_programs.weighted_and_clipped(session, model, optimizer, step)
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([one.detach().flatten() for one in model.parameters()])

    for found, expected in zip(run_ranks(2, body), run_reference(2, body), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("build", ["bf16", "f64"])
@pytest.mark.parametrize("world_size", [1, 4])
def test_dtypes(build: str, world_size: int) -> None:
    def body(session: Any) -> Trained:
        return trains(session, build, "sparse-adam", "sometimes")

    assert_same(run_ranks(world_size, body), run_reference(world_size, body))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize(
    "program",
    [
        "sometimes",
        "twice",
        "accumulated",
        "weighted",
        "clipped",
        "scaled_and_clipped",
        "clipped_and_forgotten",
    ],
)
def test_beside_dense_parameters(program: str, optimizer: str) -> None:
    def body(session: Any) -> Trained:
        return trains(session, "mixed", optimizer, program)

    assert_same(run_ranks(3, body), run_reference(3, body))


@needs_core
def test_processes(pool: RankPool) -> None:
    """The same over real connections: the bits of the reference on all of four ranks."""
    cases = [
        ("words", "sparse-adam", "plain"),
        ("words", "sparse-adam", "sometimes"),
        ("bags", "adagrad", "accumulated"),
        ("mixed", "sgd", "sometimes"),
        ("mixed", "sgd", "clipped"),
        ("mixed", "adagrad", "scaled_and_clipped"),
        ("mixed", "adam", "weighted"),
    ]
    found = pool.run(f"{MODULE}:compare", cases=cases)
    for number, case in enumerate(cases):

        def body(session: Any, case: tuple[str, str, str] = case) -> Trained:
            return trains(session, *case)

        assert_same([of_rank[number] for of_rank in found], run_reference(4, body))


@needs_core
def test_a_port_sends_the_rows_alone(pool: RankPool) -> None:
    """200,000 x 64 with 2,048 rows a rank: 1.67 MB a step in place of 76.8 MB."""
    sparse = pool.run(f"{MODULE}:count_bytes", rows=2048, sparse=True)
    dense = pool.run(f"{MODULE}:count_bytes", rows=2048, sparse=False)
    assert {one["digest"] for one in sparse} == {dense[0]["digest"]}
    block = 16 + 2048 * (8 + 64 * 4)
    for one, other in zip(sparse, dense, strict=True):
        assert one["schemes"] == {"weight": "rows"} and other["schemes"] == {"weight": "ps"}
        assert 3 * block <= one["sent"] < 3 * block + 2000
        assert other["sent"] >= 2 * 3 / 4 * 200_000 * 64 * 4 * 0.98


@pytest.mark.usefixtures("each_gradient_alone")
def test_the_norm_waits_for_rows_and_for_no_dense_mean() -> None:
    core = HeldCore()
    may_go_on = threading.Barrier(3)
    seen: dict[int, float] = {}

    def body(session: Any) -> None:
        model = seeded(Mixed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        for step in range(3):
            backward(loss_of(model, session.rank, step))
            if step == 2:
                may_go_on.wait(20)
                may_go_on.wait(20)
            norm = session.clip_grad_norm_(0.01)
            optimizer.step()
            optimizer.zero_grad()
        seen[session.rank] = norm.item()
        may_go_on.wait(20)

    thread = threading.Thread(target=run_ranks, args=(2, body), kwargs={"core": core}, daemon=True)
    thread.start()
    may_go_on.wait(20)
    tensors = core.channels[0].tensors
    dense = {index for index in range(5) if tensors[index]["scheme"] != "gather"}
    assert len(dense) == 3
    core.held.update(dense)
    may_go_on.wait(20)
    # No dense mean is there.
    may_go_on.wait(20)
    assert seen[0] == seen[1] > 0
    core.release(*dense)
    thread.join(20)
    assert not thread.is_alive()


# ---- what `.grad` holds


def test_grad_is_the_coalesced_mean() -> None:
    def body(session: Any) -> Tensor:
        model: Any = seeded(Words)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        if session.rank == 0:
            backward(model(torch.tensor([4, 4, 1])).sum())
        else:
            backward(model(torch.tensor([9, 4])).sum())
        gradient: Tensor = model.words.weight.grad
        optimizer.step()
        return gradient

    for gradient in run_ranks(2, body):
        assert gradient.is_coalesced()
        assert gradient.indices().tolist() == [[1, 4, 9]]
        assert gradient.values()[:, 0].tolist() == [0.5, 1.5, 0.5]


def test_a_dense_gradient_of_one_rank_makes_the_mean_dense_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As one process would have it, whose gradients add up from both."""

    def body(session: Any) -> Trained:
        model: Any = seeded(Words)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        for step in range(3):
            loss = loss_of(model, session.rank, step)
            if session.rank == 1:
                loss = loss + model.words.weight.square().sum()
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return [model.words.weight.detach().clone()], []

    with caplog.at_level(logging.WARNING, logger="gradlane"):
        assert_same(run_ranks(2, body), run_reference(2, body))
    said = [one.getMessage() for one in caplog.records if "was dense on rank" in one.getMessage()]
    assert len(said) == 1 and "'words.weight' was dense on rank 1 in step 1" in said[0]


def test_a_dense_gradient_for_sparse_adam_is_refused_in_backward() -> None:
    def body(session: Any) -> None:
        model = nn.Linear(3, 2, bias=False)
        session.prepare(model, torch.optim.SparseAdam(list(model.parameters())))
        backward(model(torch.ones(1, 3)).sum())
        with pytest.raises(UsageError, match="gradient of 'weight' is not sparse by rows"):
            session.models[0].weight.grad  # noqa: B018

    run_ranks(1, body, expect_errors=True)


def test_join_counts_ranks_without_data_as_no_rows() -> None:
    batches = (2, 4)

    def body(session: Any) -> list[Tensor]:
        model: Any = seeded(Words)
        optimizer = OPTIMIZERS["sparse-adam"](model.parameters())
        session.prepare(model, optimizer)
        with session.join():
            for step in range(batches[session.rank]):
                backward(loss_of(model, session.rank, step))
                optimizer.step()
                optimizer.zero_grad()
        return [model.words.weight.detach().clone(), *sparse_programs.state_of(optimizer)]

    def alone(session: Any) -> list[Tensor]:
        model: Any = seeded(Words)
        optimizer = OPTIMIZERS["sparse-adam"](model.parameters())
        session.prepare(model, optimizer)
        for step in range(max(batches)):
            if step < batches[session.rank]:
                backward(loss_of(model, session.rank, step))
            optimizer.step()
            optimizer.zero_grad()
        return [model.words.weight.detach().clone(), *sparse_programs.state_of(optimizer)]

    for found, expected in zip(run_ranks(2, body), run_reference(2, alone), strict=True):
        assert same_bits(found, expected)


@needs_core
def test_checkpoints_hold_the_state_of_sparse_adam(pool: RankPool, tmp_path: Path) -> None:
    whole = pool.run(f"{MODULE}:resumed", ranks=2, folder="", stops_after=4)
    pool.run(f"{MODULE}:resumed", ranks=2, folder=str(tmp_path), stops_after=2)
    assert_same(pool.run(f"{MODULE}:resumed", ranks=2, folder=str(tmp_path), stops_after=4), whole)


# ---- which parameters


def schemes_with(
    model: nn.Module, optimizer: str = "sgd", world_size: int = 1, **options: Any
) -> dict[str, str]:
    def body(session: Any) -> dict[str, str]:
        session.prepare(model, OPTIMIZERS[optimizer](model.parameters()))
        found: dict[str, str] = session.monitoring.schemes
        return found

    found: list[dict[str, str]] = run_ranks(world_size, body, **options)
    return found[0]


def test_embeddings_say_that_their_gradients_are_sparse() -> None:
    found = schemes_with(Mixed())
    assert [name for name, scheme in found.items() if scheme == "rows"] == [
        "words.weight",
        "places.weight",
    ]
    tied = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 8, bias=False))
    tied[1].weight = tied[0].weight
    assert schemes_with(tied) == {"0.weight": "ps"}
    scalar = nn.ParameterList([torch.tensor(1.0)])
    assert set(schemes_with(scalar).values()) == {"ps"}
    turning = nn.Embedding(8, 4, sparse=True, dtype=torch.complex64)
    assert schemes_with(turning) == {"weight": "ps"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"update": "server"}, 'update="server"'),
        (
            {"strategy": "kvstore"},
            "servers there, and rows are not added up there",
        ),
        ({"stragglers": "drop"}, 'stragglers="drop": a dense mean is made of the ranks in time'),
    ],
)
def test_where_rows_do_not_travel_they_go_dense_and_sparse_adam_is_refused(
    options: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="gradlane"):
        assert set(schemes_with(Words(), **options).values()) == {"ps"}
    said = [one.getMessage() for one in caplog.records if "made dense" in one.getMessage()]
    assert len(said) == 1 and words in said[0] and "words.weight" in said[0]

    def body(session: Any) -> str:
        model = Words()
        with pytest.raises((ValueError, UsageError)) as caught:
            session.prepare(model, OPTIMIZERS["sparse-adam"](model.parameters()))
        return str(caught.value)

    (message,) = run_ranks(1, body, **options)
    assert words in message, message


def test_ranks_that_differ_are_told_so() -> None:
    def body(session: Any) -> None:
        model = nn.Embedding(8, 4, sparse=session.rank == 0)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    for error in run_ranks(2, body, expect_errors=True):
        assert isinstance(error, RanksDifferError) and "has scheme 'rows'" in str(error)


def test_codecs_leave_rows_alone_and_say_so() -> None:
    def body(session: Any) -> dict[str, tuple[str, str]]:
        model = Mixed()
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return {one.tensor: (one.codec, one.reason) for one in session.monitoring.codecs}

    (found,) = run_ranks(1, body, codec="qsgd:bits=8")
    assert found["words.weight"] == ("raw", "travels as rows, which are not encoded")


def test_too_many_rows_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """Each of four ranks sends all rows to all others: twice what servers send, and numbers."""

    def body(session: Any) -> None:
        model: Any = seeded(Words)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        for step in range(3):
            PROGRAMS["all_rows"](session, model, optimizer, step)
            optimizer.step()
            optimizer.zero_grad()

    with caplog.at_level(logging.WARNING, logger="gradlane"):
        run_ranks(4, body)
    said = [one.getMessage() for one in caplog.records if "travelled as rows" in one.getMessage()]
    assert len(said) == 1 and "'words.weight'" in said[0] and "sparse=False" in said[0]


# ---- nodes


@needs_core
@pytest.mark.parametrize(
    ("inner", "optimizer", "schemes"),
    [(1024, "sgd", ["rows", "ps", "ps"]), (0, "sparse-adam", ["rows"])],
)
def test_rows_travel_from_nodes_whose_other_gradients_add_up(
    pool: RankPool, inner: int, optimizer: str, schemes: list[str]
) -> None:
    found = pool.run(f"{MODULE}:on_nodes", inner=inner, optimizer_name=optimizer)
    assert [list(one["schemes"].values()) for one in found] == [schemes] * 4
    assert len({one["digest"] for one in found}) == 1
