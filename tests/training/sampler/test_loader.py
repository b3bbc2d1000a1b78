"""Losses and joins under real data loaders, whose workers draw ahead."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from gradlane.training.sampler.sampler import ElasticSampler
from tests.training.sampler.world import World

SAMPLES = 223


class Data:
    """Samples that are their own numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


# Workers are forked while the queues of other loaders have threads.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True},
    ],
    ids=["no workers", "two workers", "workers that stay"],
)
def test_ranks_are_lost_and_join_under_data_loaders(settings: dict[str, Any]) -> None:
    data = Data()

    def load(sampler: ElasticSampler) -> DataLoader[int]:
        return DataLoader(data, batch_sampler=sampler, collate_fn=list, **settings)  # type: ignore[arg-type]

    world = World(4, lambda session: ElasticSampler(data, 8, session, seed=3), load)
    world.begin_epoch()
    for _ in range(2):
        assert world.train()
    assert world.train(lost=[1], late=2)
    assert world.train(joining=1)
    # In the last step: the loaders have ended, and the samples of rank 0 come back after that.
    while world.steps_left(0) != {1}:
        assert world.train()
    assert world.train(lost=[0])
    assert world.train()
    while world.train():
        pass
    assert world.trained == dict.fromkeys(range(SAMPLES), 1)
    world.begin_epoch()
    order = [index for batch in world.batches for index in batch]
    while world.train():
        pass
    assert world.trained == dict.fromkeys(range(SAMPLES), 1)
    assert order != [index for batch in world.batches for index in batch]
