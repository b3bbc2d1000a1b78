"""Rank processes for all tests of the planner: starting torch takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.adapter.pool import RankPool


@pytest.fixture(scope="package")
def pool() -> Iterator[RankPool]:
    ranks = RankPool(3)
    yield ranks
    ranks.close()
