"""Samples of shards go on from part to part."""

from __future__ import annotations

import pytest
import torch

from gradlane.training.sharded.status import checksum


@pytest.mark.parametrize(("count", "parts"), [(1, 1), (63, 1), (64, 1), (65, 2), (1000, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_each_element_is_in_one_of_the_parts(count: int, parts: int, dtype: torch.dtype) -> None:
    values = torch.arange(count, dtype=dtype)
    before = [checksum([values], part) for part in range(2 * parts)]
    assert before[:parts] == before[parts:]
    for place in {0, count // 2, count - 1}:
        changed = values.clone()
        changed[place] += 1
        after = [checksum([changed], part) for part in range(parts)]
        assert sum(map(int.__ne__, before, after)) == 1
        assert checksum([changed]) != checksum([values])
