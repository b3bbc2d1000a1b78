"""Weights are the same over any number of lanes, whatever travels, by the sockets of the core."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradlane.training.plans.settings import LEARNING_STEPS
from tests.training.model.ranks import run_ranks

RANKS, STEPS, ROWS = 3, 5, 2
PLANNED_STEPS = LEARNING_STEPS + 3


def network() -> nn.Sequential:
    """Return layers whose weights are larger than their factors; inputs (N, 48)."""
    model = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 8))
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=draw))
    return model


def trained(lanes: int, plan: str | None = None, **options: Any) -> list[Tensor]:
    """Return the weights after some steps, the last ones by the plan; the same on all ranks."""

    def body(session: Any) -> list[Tensor]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        prepared, optimizer = session.prepare(model, optimizer, plan=plan)
        for step in range(PLANNED_STEPS if plan else STEPS):
            draw = torch.Generator().manual_seed(100 * step + session.rank)
            optimizer.zero_grad()
            inputs, wanted = (torch.randn(ROWS, size, generator=draw) for size in (48, 8))
            (prepared(inputs) - wanted).square().mean().backward()
            optimizer.step()
        if plan:
            session.synchronize()
            assert session.monitoring.schemes["0.weight"] == "sfb"
        return [parameter.detach().clone() for parameter in model.parameters()]

    options = {"slice_elems": 96, "lanes": lanes, **options}
    results = run_ranks(RANKS, body, summary=False, **options)
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))
    return results[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scheme": "sfb"},
        {"scheme": "adam"},
        {"plan": "poseidon"},
        {"scheme": "sfb", "codec": "bf16"},
        {"codec": "dgc:ratio=0.1,momentum=0.9,clip=1,warmup=2"},
        {"codec": "qsgd:bits=4"},
        {"codec": "onebit"},
        {"strategy": "ring", "codec": "int8"},
        {"going_on": True},
        {"going_on": True, "codec": "topk:ratio=0.1"},
    ],
    ids=lambda it: (
        "-".join(str(each).split(":")[0] for pair in it.items() for each in pair) or "p3"
    ),
)
def test_weights_are_the_same_over_one_two_and_four_lanes(options: dict[str, Any]) -> None:
    one, two, four = (trained(lanes, **options) for lanes in (1, 2, 4))
    before = list(network().parameters())
    assert not any(torch.equal(weights, start) for weights, start in zip(one, before, strict=True))
    for other in (two, four):
        assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))
