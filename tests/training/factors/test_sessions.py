"""Sessions that send factors, over real connections between real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradlane.planning.profiler.recorder import Recorder
from tests.built import needs_core
from tests.training.factors import rank_programs
from tests.training.model.held_core import HeldCore
from tests.training.model.pool import RankPool
from tests.training.model.ranks import run_ranks

pytestmark = needs_core
MODULE = "tests.training.factors.rank_programs"
CLASSIFIER = ("plain", "clipped", "accumulated", "only_accumulated", "twice", "autocast")
CLASSIFIER_MORE = (
    "checkpointed",
    "sometimes",
    "asked",
    "zeroed_in_place",
    "scaled",
    "forgotten",
    "changing",
)


class TestInOneProcess:
    """What is handed over, and when."""

    def test_blocks_leave_in_backward_once_their_number_is_known(self) -> None:
        core = HeldCore()

        def body(session: Any) -> list[tuple[Any, ...]]:
            model = rank_programs.seeded(rank_programs.Classifier)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            session.prepare(model, optimizer)
            for step in range(2):
                rank_programs.backward(rank_programs.loss_of(model, session.rank, step))
                given = [one[1:] for one in core.calls if one[0] == session.rank and len(one) == 4]
                optimizer.step()
                optimizer.zero_grad()
            return given

        for calls in run_ranks(2, body, core=core, scheme="sfb"):
            in_backward = [(call, tensor) for call, step, tensor in calls if step == 2]
            # Last to first, the layer that is used twice as one block; nothing of the unused one.
            blocks = [tensor for call, tensor in in_backward if call == "block_ready"]
            assert blocks == [5, 4, 2]
            first = [(call, step) for call, step, tensor in calls if tensor == 7]
            assert first[-1] == ("block_absent", 1)

    @pytest.mark.parametrize("codec", ["bf16", "onebit:bucket=tensor"])
    def test_codecs_that_round_each_value_are_those_of_factors(self, codec: str) -> None:
        def trained(session: Any) -> tuple[list[torch.Tensor], dict[str, str]]:
            model = models.pop()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            session.prepare(model, optimizer)
            for step in range(3):
                rank_programs.backward(rank_programs.loss_of(model, session.rank, step))
                optimizer.step()
                optimizer.zero_grad()
            values = [one.detach().clone() for one in model.parameters()]
            return values, {
                one.tensor: one.reason for one in session.monitoring.codecs if one.codec == "raw"
            }

        # torch's generator is one for all threads.
        models = [rank_programs.seeded(rank_programs.Classifier) for _ in range(4)]
        plain = run_ranks(2, trained, scheme="sfb")
        pattern = {"first.weight": codec, "*": "raw"}
        coded = run_ranks(2, trained, scheme="sfb", codec=pattern)
        (values, reasons), (same, _) = coded
        assert all(torch.equal(one, other) for one, other in zip(values, same, strict=True))
        off = max((one - other).abs().max() for one, other in zip(values, plain[0][0], strict=True))
        if codec == "bf16":
            assert reasons["first.weight"] == "travels as factors, in bf16"
            assert 1e-7 < off < 2e-3
        else:
            assert "of other samples in each step" in reasons["first.weight"]
            assert off == 0.0


def test_rows_of_factors_are_recorded_as_seen() -> None:
    model = rank_programs.seeded(rank_programs.Words)
    recorder = Recorder(model)
    recorder.attach()
    recorder.begin_step()
    rank_programs.backward(rank_programs.loss_of(model, rank=0, step=0, rows=3))
    recorder.end_step()
    recorder.detach()
    rows = {tensor.name: tensor.rows for tensor in recorder.profile("words").tensors}
    # Three sentences of six words.
    assert rows["inner.weight"] == 18
    assert rows["inner.bias"] is None
    assert rows["places.weight"] is None


def check(results: list[Any], most_off: float = 1e-5) -> None:
    for found in zip(*results, strict=True):
        case = found[0]["case"]
        assert len({tuple(one["digests"]) for one in found}) == 1, case
        assert any(found[0]["moved"]), case
        # The same sum of the same factors, made once for all ranks.
        assert all(one["answered"] == one["digests"] for one in found), case
        wide = "bf16" in case or "autocast" in case
        for one in found:
            assert one["off"] <= (0.02 if wide else most_off), (case, one["off"])


@pytest.mark.parametrize(
    ("ranks", "programs"), [(2, CLASSIFIER), (3, CLASSIFIER_MORE), (4, ("plain", "twice"))]
)
def test_factors_give_what_servers_give(
    pool: RankPool, ranks: int, programs: tuple[str, ...]
) -> None:
    cases = [("classifier", program) for program in programs]
    check(pool.run(f"{MODULE}:compare", ranks=ranks, cases=cases))


def test_tied_embeddings_and_other_dtypes(pool: RankPool) -> None:
    cases = [("words", one) for one in ("plain", "accumulated", "clipped", "autocast")]
    cases += [("bf16", "plain"), ("f64", "plain"), ("f64", "forgotten")]
    check(pool.run(f"{MODULE}:compare", ranks=3, cases=cases))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_layers_give_what_servers_give(pool: RankPool, ranks: int) -> None:
    seeds = [ranks * 100 + number for number in range(8)]
    check(pool.run(f"{MODULE}:drawn", ranks=ranks, seeds=seeds))


def test_one_rank_alone(pool: RankPool) -> None:
    check(pool.run(f"{MODULE}:compare", ranks=1, cases=[("classifier", "plain")]))


def test_factors_leave_in_place_of_the_gradient(pool: RankPool) -> None:
    """Bytes are those of the factors, and nobody computes the gradient in backward."""
    rows, ranks = 2, 3
    factors = pool.run(f"{MODULE}:wide", ranks=ranks, rows=rows, scheme="sfb")
    servers = pool.run(f"{MODULE}:wide", ranks=ranks, rows=rows, scheme="ps")
    assert len({one["digest"] for one in factors}) == 1
    assert [one["computed"] for one in factors] == [0] * ranks
    assert [one["computed"] for one in servers] == [5] * ranks
    # The last layer's factors are no fewer numbers than its gradient, which is sent then.
    first, last = 4 * rows * (256 + 512), 4 * 3 * 512
    expected = (ranks - 1) * (first + min(last, 4 * rows * (512 + 3)))
    for one, other in zip(factors, servers, strict=True):
        assert expected <= one["sent"] <= expected + 6000
        assert other["sent"] > 10 * one["sent"]


def test_one_owner_gets_the_factors_and_sends_the_whole_gradient(pool: RankPool) -> None:
    """What each rank sends is what it owns, and factors of what it does not own."""
    rows, ranks = 2, 3
    found = pool.run(f"{MODULE}:wide", ranks=ranks, rows=rows, scheme="adam")
    factors = pool.run(f"{MODULE}:wide", ranks=ranks, rows=rows, scheme="sfb")
    assert {one["digest"] for one in found} == {factors[0]["digest"]}
    assert [one["computed"] for one in found] == [0] * ranks
    assert found[0]["schemes"] == {
        "first.weight": "adam",
        "first.bias": "ps",
        "last.weight": "adam",
        "last.bias": "ps",
    }
    # The larger one is rank 0's, the smaller one rank 1's; rank 2 owns neither.
    owned = {0: 4 * 256 * 512, 1: 4 * 3 * 512}
    sends = {0: 4 * rows * (256 + 512), 1: min(4 * 3 * 512, 4 * rows * (512 + 3))}
    for rank, one in enumerate(found):
        expected = (ranks - 1) * owned.get(rank, 0)
        expected += sum(sends[owner] for owner in sends if owner != rank)
        assert expected <= one["sent"] <= expected + 6000, rank


def test_an_owner_answers_while_its_program_is_elsewhere(pool: RankPool) -> None:
    first, *others = pool.run(f"{MODULE}:elsewhere", ranks=3)
    assert len(first) == 3
    assert others == [first, first]


def test_a_rank_with_many_rows_sends_its_gradient(pool: RankPool) -> None:
    found = pool.run(f"{MODULE}:wide", ranks=2, rows=400, scheme="sfb")
    assert len({one["digest"] for one in found}) == 1
    whole = 4 * (256 * 512 + 3 * 512)
    for one in found:
        assert whole <= one["sent"] <= whole + 6000


def test_poseidons_rule_in_a_session(pool: RankPool) -> None:
    """The same plan everywhere: factors where they are fewer numbers, with the batch as seen."""
    found = pool.run(f"{MODULE}:wide", ranks=2, rows=8, scheme="ps", plan="poseidon")
    assert len({one["digest"] for one in found}) == 1
    assert found[0]["plan"] == found[1]["plan"]
    for one in found:
        assert one["schemes"] == {
            "first.weight": "sfb",
            "first.bias": "ps",
            "last.weight": "ps",
            "last.bias": "ps",
        }
        assert one["plan"]["digest"]
        assert one["sent"] < 4 * 256 * 512 / 4


def test_a_plan_with_factors_is_in_force(pool: RankPool) -> None:
    found = pool.run(f"{MODULE}:train", ranks=2, model_name="classifier", scheme="sfb")
    assert {name for name, one in found[0]["schemes"].items() if one == "sfb"} == {
        f"{layer}.weight" for layer in ("first", "again", "last", "unused")
    }
    coded = pool.run(
        f"{MODULE}:train", ranks=2, model_name="classifier", scheme="sfb", codec="qsgd:bits=8"
    )
    codec, reason = coded[0]["codecs"]["first.weight"]
    assert codec == "raw"
    assert "factors" in reason
    assert coded[0]["digests"] == coded[1]["digests"]


@pytest.mark.parametrize("scheme", ["sfb", "adam"])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("server", 'scheme="{scheme}" with update="server"'),
        ("pull", 'strategy="kvstore": workers pull from servers there'),
        ("differ", "scheme='{scheme}'"),
        ("plan", "'features.weight' by scheme '{scheme}', but it has no factors: no nn.Linear"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(
    pool: RankPool, how: str, words: str, scheme: str
) -> None:
    for error in pool.run(f"{MODULE}:refused", ranks=2, how=how, scheme=scheme):
        assert words.format(scheme=scheme) in error


@pytest.mark.parametrize("scheme", ["sfb", "adam"])
def test_bytes_that_are_no_factors_fail_the_session_by_name(pool: RankPool, scheme: str) -> None:
    for rank, errors in enumerate(pool.run(f"{MODULE}:hostile", ranks=3, scheme=scheme)):
        assert len(errors) == 2
        assert errors[0] == errors[1]
        assert "rank 1 sent" in errors[0], (rank, errors)
        assert ".weight'" in errors[0]


@pytest.mark.parametrize("scheme", ["sfb", "adam"])
def test_uneven_data_new_connections_and_checkpoints(pool: RankPool, scheme: str) -> None:
    factors = pool.run(f"{MODULE}:uneven", ranks=3, scheme=scheme)
    servers = pool.run(f"{MODULE}:uneven", ranks=3, scheme="ps")
    assert len({one["digest"] for one in factors}) == 1
    assert all(one["same"] for one in factors)
    for one, other in zip(factors[0]["values"], servers[0]["values"], strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
