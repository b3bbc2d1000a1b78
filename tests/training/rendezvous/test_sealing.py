"""With a user's secret all connections are sealed; with `seal=False` or without one none is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.training.model.held_core import HeldCore
from tests.training.model.ranks import run_ranks

SECRET = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize(
    ("options", "is_sealed"),
    [
        ({"secret": SECRET}, True),
        ({"secret": SECRET, "seal": False}, False),
        # The secret that rank 0 leaves in the store is known to whoever can read the store.
        ({}, False),
    ],
)
def test_the_users_secret_decides(options: dict[str, Any], is_sealed: bool) -> None:
    core = HeldCore()

    def body(session: Any) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(300, 200)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        for _ in range(2):
            model(torch.full((1, 300), float(session.rank + 1))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.synchronize()
        return model.weight.detach().clone()

    first, second = run_ranks(2, body, core=core, local="off", **options)
    assert torch.equal(first, second)
    assert [one.settings["seal"] for one in core.channels] == [is_sealed, is_sealed]
    # Both ranks compare the same addresses, in the order of ranks.
    known = [one.settings["published"] for one in core.channels]
    assert known[0] == known[1] and len(set(known[0])) == 2
