"""Four ranks on two nodes, in real processes: a node's ranks add up their differences first."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.built import needs_core
from tests.training.local_updates.test_training import NAMES, TWO, expected, loss
from tests.training.model.pool import RankPool

pytestmark = needs_core
PROGRAM = "tests.training.local_updates.rank_programs:trained"


@pytest.mark.parametrize("local", ["leader", "shared", "off"])
@pytest.mark.parametrize("given", [{}, {"fragments": 2, "overlap_steps": 2, "mix": 0.5}])
def test_all_ranks_meet_at_the_values_of_the_reference(
    pool: RankPool, local: str, given: dict[str, Any]
) -> None:
    """Within rounding: sums are taken node by node."""
    reference = expected(
        4,
        TWO if given else [NAMES],
        steps=4,
        overlap=given.get("overlap_steps", 0),
        mix=given.get("mix", 1.0),
    )
    reference.train(7, loss)
    reference.synchronize()
    reference.train(6, lambda model, rank, step: loss(model, rank, step + 7))
    reference.synchronize()
    found = pool.run(PROGRAM, given={"steps": 4, **given}, local=local)
    for name in ("at 7", "closed"):
        assert len({one[name] for one in found}) == 1
    for one, other in zip(found[0]["values"], reference.models[0].parameters(), strict=True):
        torch.testing.assert_close(torch.tensor(one), other.detach(), rtol=1e-5, atol=1e-6)


def test_codecs_with_residuals_on_nodes(pool: RankPool) -> None:
    found = pool.run(PROGRAM, given={"steps": 4, "fragments": 2}, local="leader", codec="onebit")
    assert len({one["closed"] for one in found}) == 1
    assert found[0]["metrics"]["codec_ratio"] > 2.5
