"""The planner's tests run on three ranks."""

from __future__ import annotations

import pytest

from tests.training.model.pool import FirstRanks, RankPool


@pytest.fixture
def pool(pool: RankPool) -> FirstRanks:
    """Three of the ranks that all tests share."""
    return FirstRanks(pool, 3)
