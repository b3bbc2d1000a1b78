"""DGC under SGD with momentum, beside an oracle written from the paper (Lin et al. 2018).

Algorithm 4: `u = m u + g`, `v = v + u`, the largest `v` are sent, and both are zero there; `g` has
SGD's weight decay. The mean over ranks goes back as it is, and is taken off with the learning rate.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.model.models import seeded
from tests.training.model.ranks import run_ranks

RANKS, ELEMENTS, STEPS = 3, 400, 60
RATIO, MOMENTUM, DECAY = 0.05, 0.9, 0.02
CODEC = f"dgc:ratio={RATIO},broadcast_ratio=1,momentum={MOMENTUM},clip=0,warmup=0"


class Vector(nn.Module):
    """One tensor, whose loss pulls it to other values on each rank and in each step."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        self.values = nn.Parameter(torch.randn(ELEMENTS, generator=draw))


def gradient_of(values: Tensor, rank: int, step: int) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return values - torch.randn(ELEMENTS, generator=draw)


def rate(step: int) -> float:
    return 0.05 if step < STEPS // 2 else 0.02


def oracle() -> Tensor:
    """Train without gradlane, each rank's codec by its definition."""
    values = Vector().values.detach().clone()
    u = torch.zeros(RANKS, ELEMENTS)
    v = torch.zeros(RANKS, ELEMENTS)
    count = math.ceil(RATIO * ELEMENTS)
    for step in range(STEPS):
        sent = torch.zeros(RANKS, ELEMENTS)
        for rank in range(RANKS):
            u[rank] = MOMENTUM * u[rank] + gradient_of(values, rank, step) + DECAY * values
            v[rank] += u[rank]
            chosen = v[rank].abs().topk(count).indices
            sent[rank, chosen] = v[rank, chosen]
            u[rank, chosen] = v[rank, chosen] = 0.0
        values -= rate(step) * sent.mean(dim=0)
    return values


@pytest.mark.parametrize("defer", [None, False])
@pytest.mark.parametrize("parts", [1, 2], ids=["once", "accumulated"])
def test_momentum_is_applied_once_and_before_the_selection(defer: bool | None, parts: int) -> None:
    def body(session: Any) -> tuple[Tensor, dict[str, Any], dict[str, Any]]:
        model = Vector()
        optimizer = torch.optim.SGD(
            model.parameters(), lr=rate(0), momentum=MOMENTUM, weight_decay=DECAY
        )
        session.prepare(model, optimizer, defer=defer)
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = rate(step)
            gradient = gradient_of(model.values.detach(), session.rank, step)
            for part in range(parts):
                loss: Any = (model.values * gradient / parts).sum()
                if part + 1 < parts:
                    with session.no_sync():
                        loss.backward()
                else:
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        values = model.values.detach().clone()
        return values, optimizer.param_groups[0], optimizer.state_dict()["state"]

    found = run_ranks(RANKS, body, codec=CODEC, summary=False)
    expected = oracle()
    for values, group, state in found:
        assert torch.equal(values, found[0][0]), "ranks differ"
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-5)
        assert (group["momentum"], group["weight_decay"]) == (MOMENTUM, DECAY)
        assert all(one.get("momentum_buffer") is None for one in state.values())


def test_other_tensors_of_a_group_keep_the_momentum_of_sgd() -> None:
    """The weight is encoded; the bias goes as it is, and SGD applies its momentum."""

    def body(session: Any) -> list[Tensor]:
        # Ranks are threads that draw from one generator: `seeded` lets them take turns.
        model: Any = seeded(lambda: nn.Linear(60, 40))
        codec_free: Any = seeded(lambda: nn.Linear(60, 40))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=MOMENTUM)
        plain = torch.optim.SGD([codec_free.bias], lr=0.1, momentum=MOMENTUM)
        session.prepare(model, optimizer)
        for step in range(8):
            model(torch.full((1, 60), 0.01 * step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            codec_free.bias.grad = torch.ones(40)
            plain.step()
        return [model.bias.detach().clone(), codec_free.bias.detach()]

    codec = {"weight": CODEC, "*": "raw"}
    for bias, expected in run_ranks(2, body, codec=codec, summary=False):
        assert torch.equal(bias, expected)


@pytest.mark.parametrize("buffers", ["broadcast", "average", "local"])
def test_a_model_with_buffers_trains_under_the_codec(buffers: str) -> None:
    """The packed buffers go the same way as gradients, and belong to no parameter."""

    def body(session: Any) -> list[Tensor]:
        model: Any = seeded(
            lambda: nn.Sequential(nn.Linear(8, 50), nn.BatchNorm1d(50), nn.Linear(50, 2))
        )
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=MOMENTUM, weight_decay=DECAY
        )
        session.prepare(model, optimizer, buffers=buffers)
        for step in range(4):
            draw = torch.Generator().manual_seed(10 * step + session.rank)
            model(torch.randn(6, 8, generator=draw)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [one.detach().clone() for one in model.parameters()]

    first, second = run_ranks(2, body, codec=CODEC, summary=False)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
