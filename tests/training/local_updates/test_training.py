"""Local updates against a plain reference: every rank's parameters, in every bit."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlane
from gradlane_papers.accuracy.exchange import EmulatedExchange
from tests.training.local_updates.reference import LocalReference
from tests.training.model.models import seeded
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import same_bits, snapshot


def build() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(),
        nn.Linear(32, 3),
    )  # fmt: skip


NAMES = [f"{layer}.{kind}" for layer in (0, 2, 4, 6) for kind in ("weight", "bias")]
TWO = [["0.weight", "0.bias", "4.weight", "4.bias"], ["2.weight", "2.bias", "6.weight", "6.bias"]]
"""Each layer joins the fragment with fewer bytes."""


def loss(model: nn.Module, rank: int, step: int) -> Any:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(5, 6, generator=generator)
    return model(inputs).square().mean()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def expected(world_size: int, fragments: Any, **given: Any) -> LocalReference:
    models = [seeded(build) for _ in range(world_size)]
    return LocalReference(models, [adam(one) for one in models], fragments, **given)


def trains(session: Any, steps: int, first: int = 1) -> list[Tensor]:
    model = seeded(build, 7 + session.rank)
    optimizer = adam(model)
    session.prepare(model, optimizer)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss(model, session.rank, step).backward()
        optimizer.step()
    return snapshot(model)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("outer", ["average", "sgd", "nesterov"])
def test_one_fragment_without_overlap(world_size: int, outer: str) -> None:
    """DiLoCo, and Local SGD."""
    reference = expected(world_size, [NAMES], steps=4, outer=outer)
    reference.train(10, loss)
    update = gradlane.Local(steps=4, outer=outer)
    found = run_ranks(world_size, lambda it: trains(it, 10), update=update, local="off")
    for rank, parameters in enumerate(found):
        assert same_bits(parameters, snapshot(reference.models[rank]))
    reference.synchronize()


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("overlap", [0, 1, 3])
@pytest.mark.parametrize("mix", [1.0, 0.5])
def test_fragments_overlap_and_mix(world_size: int, overlap: int, mix: float) -> None:
    """Streaming DiLoCo."""
    reference = expected(world_size, TWO, steps=6, overlap=overlap, mix=mix)
    reference.train(20, loss)
    update = gradlane.Local(steps=6, fragments=2, overlap_steps=overlap, mix=mix)
    found = run_ranks(world_size, lambda it: trains(it, 20), update=update, local="off")
    for rank, parameters in enumerate(found):
        assert same_bits(parameters, snapshot(reference.models[rank]))


@pytest.mark.parametrize("world_size", [2, 4])
def test_one_step_and_average_is_the_mean_of_all_parameters(world_size: int) -> None:
    """Up to the rounding of a difference and a sum; the ranks have the same bits."""
    models = [seeded(build) for _ in range(world_size)]
    optimizers = [adam(one) for one in models]
    for step in range(1, 6):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
        with torch.no_grad():
            for all_ranks in zip(*(one.parameters() for one in models), strict=True):
                mean = torch.stack([one.detach() for one in all_ranks]).mean(dim=0)
                for one in all_ranks:
                    one.copy_(mean)
    update = gradlane.Local(steps=1, outer="average")
    found = run_ranks(world_size, lambda it: trains(it, 5), update=update, local="off")
    for parameters in found:
        assert same_bits(parameters, found[0])
        for one, other in zip(parameters, models[0].parameters(), strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("given", [{}, {"fragments": 4, "overlap_steps": 1, "mix": 0.5}])
def test_synchronize_and_close_end_the_round_on_all_ranks(given: dict[str, Any]) -> None:
    reference = expected(
        3,
        [NAMES] if not given else [[f"{n}.weight", f"{n}.bias"] for n in (0, 2, 4, 6)],
        steps=4,
        overlap=given.get("overlap_steps", 0),
        mix=given.get("mix", 1.0),
    )
    reference.train(6, loss)
    reference.synchronize()
    synchronized = snapshot(reference.models[0])
    reference.step = 0
    # Steps are counted from the last common point; batches go on.
    reference.train(7, lambda model, rank, step: loss(model, rank, step + 6))
    reference.synchronize()

    def body(session: Any) -> list[list[Tensor]]:
        model = seeded(build, 7 + session.rank)
        optimizer = adam(model)
        session.prepare(model, optimizer)
        for step in range(1, 7):
            optimizer.zero_grad()
            loss(model, session.rank, step).backward()
            optimizer.step()
        session.synchronize()
        at_6 = snapshot(model)
        session.synchronize()
        assert same_bits(at_6, snapshot(model)), "nothing has moved since"
        for step in range(7, 14):
            optimizer.zero_grad()
            loss(model, session.rank, step).backward()
            optimizer.step()
        assert session.step == 13
        session.close()
        return [at_6, snapshot(model)]

    update = gradlane.Local(steps=4, **given)
    for at_6, at_13 in run_ranks(3, body, update=update, local="off"):
        assert same_bits(at_6, synchronized)
        assert same_bits(at_13, snapshot(reference.models[0]))


def test_what_is_written_without_a_step_ends_at_the_common_point(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Written alike or not: no exchange follows in which all ranks could agree on it."""
    reference = expected(2, [NAMES], steps=4)
    reference.train(4, loss)

    def body(session: Any) -> list[list[Tensor]]:
        model = seeded(build, 7 + session.rank)
        optimizer = adam(model)
        session.prepare(model, optimizer)
        for step in range(1, 5):
            optimizer.zero_grad()
            loss(model, session.rank, step).backward()
            optimizer.step()
        exchanged = snapshot(model)
        with torch.no_grad():
            model.get_parameter("2.bias").fill_(float(session.rank))
        session.synchronize()
        return [exchanged, snapshot(model)]

    found = run_ranks(2, body, update=gradlane.Local(steps=4), local="off")
    for exchanged, synchronized in found:
        assert same_bits(exchanged, snapshot(reference.models[0]))
        assert same_bits(synchronized, exchanged)
    said = [one.getMessage() for one in caplog.records if "was written" in one.getMessage()]
    assert sorted(one[:7] for one in said) == ["rank 0:", "rank 1:"]
    assert all("'2.bias' was written after its exchange" in one for one in said)


@pytest.mark.parametrize("strategy", ["slicing", "wfbp", "kvstore", "deferred-pull"])
def test_every_strategy_gives_the_same_bits(strategy: str) -> None:
    update = gradlane.Local(steps=4, fragments=2, overlap_steps=2, mix=0.5)
    reference = expected(3, TWO, steps=4, overlap=2, mix=0.5)
    reference.train(9, loss)
    found = run_ranks(3, lambda it: trains(it, 9), update=update, local="off", strategy=strategy)
    for rank, parameters in enumerate(found):
        assert same_bits(parameters, snapshot(reference.models[rank]))


@pytest.mark.parametrize("options", [{"strategy": "ring"}, {"servers": 1}, {"slice_elems": 100}])
def test_rings_and_servers_keep_the_ranks_alike(options: dict[str, Any]) -> None:
    def body(session: Any) -> list[Tensor]:
        trains(session, 9)
        session.synchronize()
        return snapshot(session.models[0])

    update = gradlane.Local(steps=4, fragments=2)
    reference = expected(3, TWO, steps=4)
    reference.train(9, loss)
    reference.synchronize()
    for parameters in run_ranks(3, body, update=update, local="off", **options):
        for one, other in zip(parameters, reference.models[0].parameters(), strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "codec", ["int8", "fp8", "qsgd:bits=8", "onebit", "topk:ratio=0.1", "bf16"]
)
def test_codecs_keep_the_ranks_alike_and_near_the_reference(codec: str) -> None:
    def body(session: Any) -> tuple[list[Tensor], float]:
        trains(session, 40)
        session.synchronize()
        return snapshot(session.models[0]), session.metrics()["codec_ratio"]

    update = gradlane.Local(steps=4, fragments=2, overlap_steps=1)
    reference = expected(2, TWO, steps=4, overlap=1)
    start = snapshot(reference.models[0])
    reference.train(40, loss)
    reference.synchronize()
    found = run_ranks(2, body, update=update, local="off", codec=codec)
    (parameters, ratio), (others, _) = found
    assert same_bits(parameters, others)
    assert ratio > (1.5 if codec == "bf16" else 2.5)
    ends = snapshot(reference.models[0])
    way = sum(float((end - begin).square().sum()) for end, begin in zip(ends, start, strict=True))
    off = sum(float((end - one).square().sum()) for end, one in zip(ends, parameters, strict=True))
    # What `topk` has not sent yet is a large part of so short a way.
    assert off < 0.5 * way or codec.startswith("topk")


def test_error_feedback_loses_nothing_for_good() -> None:
    """Differences that one rank always has arrive on average, however few values are sent."""

    def body(session: Any) -> Tensor:
        model = nn.Linear(64, 64, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        session.prepare(model, optimizer)
        start = model.weight.detach().clone()
        for _ in range(400):
            model.weight.grad = torch.full_like(model.weight, 1e-3 * (1 + session.rank))
            optimizer.step()
        session.synchronize()
        return start - model.weight.detach()

    update = gradlane.Local(steps=4, outer="average")
    for moved in run_ranks(2, body, update=update, local="off", codec="topk:ratio=0.25"):
        torch.testing.assert_close(moved.mean(), torch.tensor(400 * 1.5e-3), rtol=0.05, atol=0)


@pytest.mark.parametrize("fragments", [1, 2])
def test_samples_weigh(fragments: int) -> None:
    def samples(rank: int, step: int) -> int:
        return 1 + (rank + 2 * step) % 5

    def body(session: Any) -> list[Tensor]:
        model = seeded(build)
        optimizer = adam(model)
        session.prepare(model, optimizer)
        for step in range(1, 9):
            optimizer.zero_grad()
            session.weight(samples(session.rank, step))
            loss(model, session.rank, step).backward()
            optimizer.step()
        return snapshot(model)

    parts = [NAMES] if fragments == 1 else TWO
    reference = expected(3, parts, steps=4)
    weights: list[list[int]] = [[samples(rank, step) for step in range(1, 9)] for rank in range(3)]
    since = dict.fromkeys(NAMES, 0)

    def means(names: Any) -> Any:
        found = []
        for name in names:
            held = [sum(one[since[name] : reference.step]) for one in weights]
            own = [reference.common[name] - one.get_parameter(name) for one in reference.models]
            total = torch.stack([one * weight for one, weight in zip(own, held, strict=True)])
            found.append((name, (total.sum(dim=0) / sum(held)).detach()))
            since[name] = reference.step
        return found

    reference.means = means  # type: ignore[method-assign]
    reference.train(8, loss)
    update = gradlane.Local(steps=4, fragments=fragments)
    found = run_ranks(3, body, update=update, local="off")
    for rank, parameters in enumerate(found):
        for one, other in zip(parameters, snapshot(reference.models[rank]), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_bytes_on_the_wire_are_as_many_times_fewer() -> None:
    def body(session: Any, *, local: bool = True) -> int:
        model = seeded(lambda: nn.Sequential(nn.Linear(200, 500), nn.Linear(500, 200)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        session.exchange("all have rank 0's values")
        before = session.metrics()["tx_payload_bytes"]
        for _ in range(64):
            model(torch.ones(1, 200)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if not local:
            session.synchronize()
        session.exchange("all have what this rank has sent")
        return session.metrics()["tx_payload_bytes"] - before  # type: ignore[no-any-return]

    exact = sum(run_ranks(2, lambda it: body(it, local=False), local="off"))
    for fragments in (1, 2):
        update = gradlane.Local(steps=32, fragments=fragments)
        rare = sum(run_ranks(2, body, local="off", update=update))
        assert rare == pytest.approx(exact / 32, rel=0.02)
        coded = sum(run_ranks(2, body, local="off", update=update, codec="int8"))
        assert coded == pytest.approx(rare / 4, rel=0.1)


def test_an_exchange_is_under_way_while_its_steps_are_taken() -> None:
    """No rank waits at the turn: the other one has not come to it, and trains on."""
    met, gone_on = threading.Barrier(2), threading.Event()

    def body(session: Any) -> None:
        model = seeded(build)
        optimizer = adam(model)
        session.prepare(model, optimizer)
        for step in range(1, 5):
            if step == 2 and session.rank == 1:
                assert gone_on.wait(30), "rank 0 waits for rank 1 at its turn"
            optimizer.zero_grad()
            loss(model, session.rank, step).backward()
            optimizer.step()
            if step == 3 and session.rank == 0:
                gone_on.set()
        met.wait(30)

    run_ranks(2, body, update=gradlane.Local(steps=2, overlap_steps=2), local="off")


@dataclass
class EncodedReference(LocalReference):
    """The same where differences and their means are encoded, by codecs without an engine."""

    codec: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.exchange = EmulatedExchange(
            self.models[0], self.codec, workers=len(self.models), seed=0, small_elems=2
        )

    def means(self, names: Sequence[str]) -> list[tuple[str, Tensor]]:
        with torch.no_grad():
            own = [
                [self.common[name] - model.get_parameter(name) for name in names]
                for model in self.models
            ]
        return list(zip(names, self.exchange.average(own, self.step), strict=True))


@pytest.mark.parametrize("bits", [2, 4, 8, 32])
def test_sparse_loco_is_error_feedback_in_place_of_outer_momentum(bits: int) -> None:
    """SparseLoCo (Sarfi et al. 2025): what is not sent decays, and the mean moves the values."""
    codec = f"topk:ratio=0.1,broadcast_ratio=0.4,bits={bits},bucket=32,decay=0.95"
    models = [seeded(build) for _ in range(4)]
    reference = EncodedReference(
        models, [adam(one) for one in models], [NAMES], steps=4, outer="average", codec=codec
    )
    reference.train(12, loss)
    update = gradlane.Local(steps=4, outer="average")
    found = run_ranks(4, lambda it: trains(it, 12), update=update, local="off", codec=codec)
    for rank, parameters in enumerate(found):
        assert same_bits(parameters, snapshot(reference.models[rank]))


def test_sparse_loco_sends_a_thousandth_of_the_bytes() -> None:
    """Counted on every rank's connections, with headers and all that ranks tell each other."""

    def body(session: Any) -> float:
        model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 64))
        optimizer = adam(model)
        session.prepare(model, optimizer)
        session.exchange("all have rank 0's values")
        before = session.metrics()["tx_bytes"]
        inputs = torch.randn(4, 512, generator=torch.Generator().manual_seed(session.rank))
        for _ in range(64):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        session.exchange("all have what this rank has sent")
        return float(session.metrics()["tx_bytes"] - before) / 64

    codec = gradlane.codecs.TopK(ratio=0.02, broadcast_ratio=0.08, bits=2, bucket=4096, decay=0.95)
    update = gradlane.Local(steps=32, outer="average")
    exact = 2 * 3 / 4 * 4 * (512 * 512 + 512 + 512 * 64 + 64)
    for sent in run_ranks(4, body, update=update, local="off", codec=codec):
        assert exact / sent > 1000
