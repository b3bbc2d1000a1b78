"""The reference that everything else is held against keeps its own promises."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.training.model.models import SmallCnn, seeded
from tests.training.model.reference import run_reference, same_bits, snapshot


def test_prepare_gives_every_rank_the_values_of_rank_0() -> None:
    def body(session: Any) -> list[Tensor]:
        model = seeded(SmallCnn, seed=session.rank)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return snapshot(model)

    expected = snapshot(seeded(SmallCnn, seed=0))
    assert all(same_bits(values, expected) for values in run_reference(3, body))


def test_no_rank_trains_before_all_have_built() -> None:
    """Recomputation in backward sets the generator that the other rank draws its weights from."""
    built: set[int] = set()

    def body(session: Any) -> set[int]:
        model = seeded(SmallCnn)
        built.add(session.rank)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return set(built)

    assert run_reference(3, body) == [{0, 1, 2}] * 3
