"""Each sample of an epoch is trained once, whatever the history of losses and joins."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import event, given, settings
from hypothesis import strategies as st

from gradlane.training.sampler.sampler import ElasticSampler
from tests.training.sampler.world import AheadLoader, World


@dataclass(frozen=True)
class Event:
    """What happens in the step that is so many steps after the last one with an event."""

    after: int
    lost: tuple[int, ...]
    joining: int
    late: int
    fail: int


EVENTS = st.builds(
    Event,
    st.integers(0, 6),
    st.lists(st.integers(0, 5), unique=True, max_size=3).map(tuple),
    st.integers(0, 2),
    st.integers(0, 4),
    st.integers(0, 1),
)


@settings(max_examples=200)
@given(
    size=st.integers(1, 5),
    samples=st.integers(1, 160),
    batch_size=st.integers(1, 7),
    ahead=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    batches_per_step=st.integers(1, 3),
    events=st.lists(EVENTS, max_size=6),
)
def test_each_sample_is_trained_once(
    size: int,
    samples: int,
    batch_size: int,
    ahead: list[int],
    drop_last: bool,
    shuffle: bool,
    batches_per_step: int,
    events: list[Event],
) -> None:
    depths = itertools.cycle(ahead)
    world = World(
        size,
        lambda session: ElasticSampler(
            range(samples), batch_size, session, shuffle=shuffle, drop_last=drop_last
        ),
        lambda sampler: AheadLoader(sampler, next(depths)),
        batches_per_step,
    )
    coming = iter(events)
    upcoming = next(coming, None)
    since = 0
    for epoch in range(3):
        world.begin_epoch()
        largest, changes, held, suffices = size, 0, False, batch_size > 1 and samples >= size
        going = True
        while going:
            if upcoming is not None and since >= upcoming.after:
                now, upcoming, since = upcoming, next(coming, None), 0
                ranks = len(world.members)
                lost = [rank for rank in now.lost if rank < ranks][: ranks - 1]
                stay = ranks - len(lost)
                fail = min(now.fail, stay - 1)
                late = min(now.late, stay - fail)
                going = world.train(lost, now.joining, late, fail)
                changes += going and bool(lost or now.joining or fail)
                held |= going and late > 0
            else:
                going = world.train()
                since += 1
            assert len(world.steps_left(epoch)) <= 1
            largest = max(largest, len(world.members))
            left = samples - len(world.trained)
            suffices &= left == 0 or left >= len(world.members)
        size = len(world.members)
        assert {world.samplers[name].epoch for name in world.members} == {epoch + 1}
        repeated = sum(world.trained.values()) - len(world.trained)
        if drop_last:
            assert samples - len(world.trained) < batch_size * largest
            if not held:
                assert repeated == 0
                assert {len(batch) for batch in world.batches} <= {batch_size}
        else:
            assert len(world.trained) == samples
            if not held:
                assert repeated <= (0 if suffices else (largest - 1) * (changes + 1))
        assert max(map(len, world.batches), default=0) <= batch_size
        event(f"changes {changes}, repeated {repeated > 0}")
