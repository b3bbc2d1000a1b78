"""DGC in sessions of several ranks, beside an oracle of all five techniques of its paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradlane.errors import UsageError
from tests.dgc_oracle import DgcOracle
from tests.training.model.ranks import run_ranks

RANKS, STEPS, WARMUP = 3, 36, 12
RATIO, MOMENTUM, CLIP, DECAY = 0.02, 0.9, 20.0, 0.03
SHAPES = ((30, 20), (50,), (8,), (1,))
CODEC = f"dgc:ratio={RATIO},broadcast_ratio=1,momentum={MOMENTUM},clip={CLIP},warmup={WARMUP}"


class Layers(nn.Module):
    """Tensors of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        self.layers = nn.ParameterList(torch.randn(shape, generator=draw) for shape in SHAPES)


def gradients_of(weights: Sequence[Tensor], rank: int, step: int) -> list[Tensor]:
    """Return gradients that pull weights to other values on each rank and in each step."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    # Every third is small enough not to be clipped.
    scale = 0.1 if step % 3 == 0 else 1.0
    return [scale * (one - torch.randn(one.shape, generator=draw)) for one in weights]


def rate(step: int) -> float:
    return 0.05 if step <= STEPS // 2 else 0.02


def trained_by_the_paper(
    *, decays_before_momentum: bool = True, clip: float = CLIP
) -> list[Tensor]:
    """Train without gradlane.

    Args:
        decays_before_momentum: whether weight decay goes into momentum, as SGD's does that has
            some; else the optimizer has no momentum, and adds it to what arrives.
        clip: the limit of the norm.
    """
    weights = [one.detach().clone() for one in Layers().layers]
    dgc = DgcOracle(
        [one.numel() for one in weights],
        ranks=RANKS,
        ratio=RATIO,
        momentum=MOMENTUM,
        clip=clip,
        warmup=WARMUP,
    )
    velocity = torch.zeros(1)
    for step in range(1, STEPS + 1):
        gradients = [
            [one.flatten().numpy() for one in gradients_of(weights, rank, step)]
            for rank in range(RANKS)
        ]
        decays = [DECAY * one.flatten() for one in weights]
        own = [one.numpy() if decays_before_momentum else 0.0 for one in decays]
        means = [torch.from_numpy(one) for one in dgc.step(step, gradients, own)]
        # A single value is not encoded, and the optimizer's momentum, if any, is its own.
        means[-1] += decays[-1]
        if decays_before_momentum:
            velocity = means[-1] = MOMENTUM * velocity + means[-1]
        else:
            means[:-1] = [one + decay for one, decay in zip(means[:-1], decays[:-1], strict=True)]
        for weight, mean in zip(weights, means, strict=True):
            weight -= rate(step) * mean.view(weight.shape)
    assert dgc.counts[:12] == [150] * 2 + [38] * 3 + [12] * 7, "the warm-up has four parts"
    assert set(dgc.counts[12:]) == {12}
    return weights


def train(session: Any, momentum: float, parts: int = 1, defer: bool | None = None) -> list[Tensor]:
    """Train on one rank, with gradients in as many parts."""
    model = Layers()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=rate(1), momentum=momentum, weight_decay=DECAY
    )
    session.prepare(model, optimizer, defer=defer)
    for step in range(1, STEPS + 1):
        optimizer.param_groups[0]["lr"] = rate(step)
        gradients = gradients_of([one.detach() for one in model.layers], session.rank, step)
        for part in range(parts):
            products = [(one * g).sum() for one, g in zip(model.layers, gradients, strict=True)]
            loss: Any = torch.stack(products).sum() / parts
            if part + 1 < parts:
                with session.no_sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [one.detach().clone() for one in model.parameters()]


def run(body: Any, **options: Any) -> list[Any]:
    return run_ranks(RANKS, body, summary=False, **{"codec": CODEC, **options})


@pytest.mark.parametrize("defer", [None, False])
@pytest.mark.parametrize("parts", [1, 2], ids=["once", "accumulated"])
def test_a_session_with_momentum_is_the_papers(defer: bool | None, parts: int) -> None:
    expected = trained_by_the_paper()
    for found in run(lambda session: train(session, MOMENTUM, parts, defer)):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_codec_brings_momentum_where_the_servers_have_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    codec = CODEC.replace("broadcast_ratio=1,", "")
    expected = trained_by_the_paper(decays_before_momentum=False)
    caplog.set_level("INFO", "gradlane")
    for found in run(lambda session: train(session, 0.0), codec=codec, update="server"):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    words = f"applies a momentum of {MOMENTUM:g}, and SGD has none"
    assert [one.getMessage() for one in caplog.records if words in one.getMessage()], caplog.text


@pytest.mark.parametrize("codec", ["dgc", CODEC, {"*": "dgc:momentum=0.5"}])
def test_sgd_without_momentum_does_not_train_with_that_of_the_codec(codec: Any) -> None:
    def body(session: Any) -> None:
        model = nn.Linear(30, 30)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    found = refusal(body, codec=codec)
    assert "has momentum=0, with codec 'dgc" in found
    assert "in the group" in found and "or begin with dgc:momentum=0" in found


def test_sgd_that_loses_its_momentum_while_training() -> None:
    def body(session: Any) -> None:
        model = nn.Linear(30, 30)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=MOMENTUM)
        session.prepare(model, optimizer)
        optimizer.param_groups[0]["momentum"] = 0.0
        loss: Any = model(torch.ones(1, 30)).sum()
        loss.backward()
        optimizer.step()

    assert "has momentum=0, with codec 'dgc" in refusal(body)


def test_the_oracle_tells_what_is_left_out() -> None:
    """Without clipping, or by slices, values would be others: the tests above would fail."""
    expected, unclipped = trained_by_the_paper(), trained_by_the_paper(clip=math.inf)
    assert (expected[0] - unclipped[0]).abs().max() > 0.1


def test_the_norm_is_that_of_all_tensors_over_the_root_of_ranks() -> None:
    """Also of those that are not encoded, whose means show it."""

    def body(session: Any) -> list[Tensor]:
        model: Any = nn.ParameterList([torch.zeros(4), torch.zeros(2, 2), torch.zeros(1)])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        session.prepare(model, optimizer)
        for _ in range(2):
            (3.0 * model[0].sum() + 4.0 * model[1].sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [one.detach().clone() for one in model]

    codec = {"0": "raw", "*": "dgc:ratio=1,clip=2,momentum=0"}
    for first, second, third in run(body, codec=codec):
        # The norm is 10, the limit 2 over the root of three ranks.
        torch.testing.assert_close(first, torch.full((4,), -2 * 0.6 / math.sqrt(3)))
        torch.testing.assert_close(second, torch.full((2, 2), -2 * 0.8 / math.sqrt(3)))
        assert torch.equal(third, torch.zeros(1)), "it has no gradient, and holds none up"


def refusal(body: Any, **options: Any) -> str:
    """Return what the first rank says that refuses; others may hear that it has left."""
    errors = run(body, expect_errors=True, **options)
    refusals = [error for error in errors if isinstance(error, (UsageError, ValueError))]
    return str(refusals[0])


def test_scaled_gradients_and_clipped_means_are_refused() -> None:
    def scaled(session: Any, **options: Any) -> None:
        model = Layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=MOMENTUM, **options)
        session.prepare(model, optimizer)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.stack([one.sum() for one in model.layers]).sum()).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)

    def clipped(session: Any) -> None:
        model = Layers()
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=MOMENTUM))
        torch.stack([one.sum() for one in model.layers]).sum().backward()  # type: ignore[no-untyped-call]
        session.clip_grad_norm_(1.5)

    assert "GradScaler in step 1 with codec 'dgc:" in refusal(scaled)
    assert "GradScaler in step 1 with codec 'dgc:" in refusal(lambda s: scaled(s, fused=True))
    said = refusal(clipped)
    assert "clip_grad_norm_(1.5) in step" in said and "give the codec a clip" in said


def test_clips_that_do_not_go_together_are_refused_by_name() -> None:
    def prepared(session: Any) -> None:
        model = nn.Linear(40, 40)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    two = {"weight": "dgc:clip=1", "bias": "dgc:clip=2"}
    assert "clip to different norms" in refusal(prepared, codec=two)
    said = refusal(prepared, codec={"bias": "dgc:clip=1"}, scheme="sfb")
    assert "'weight', which travels as factors" in said


def test_one_rank_alone_keeps_the_momentum_of_its_optimizer() -> None:
    """It sends nothing, so that no codec runs."""

    def body(session: Any) -> Tensor:
        model, alike = Layers(), Layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=MOMENTUM)
        plain = torch.optim.SGD(alike.parameters(), lr=0.1, momentum=MOMENTUM)
        session.prepare(model, optimizer)
        for step in range(1, 4):
            gradients = gradients_of([one.detach() for one in alike.layers], 0, 3 * step)
            for own, one in ((model, optimizer), (alike, plain)):
                products = [(w * g).sum() for w, g in zip(own.layers, gradients, strict=True)]
                torch.stack(products).sum().backward()  # type: ignore[no-untyped-call]
                one.step()
                one.zero_grad()
        differences = zip(model.parameters(), alike.parameters(), strict=True)
        return torch.stack([(w - v).detach().abs().max() for w, v in differences]).max()

    codec = "dgc:ratio=0.02"
    (difference,) = run_ranks(1, body, summary=False, codec=codec)
    assert float(difference) == 0.0
