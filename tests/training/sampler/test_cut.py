"""The arithmetic of cuts."""

from __future__ import annotations

from gradlane.training.sampler.cut import Cut


def test_repeated_samples_are_not_left_when_their_rank_is_lost() -> None:
    cut = Cut(2, ((0, 2),), [[], [], []], 4, drop_last=False)
    assert cut.batches(0) == [((0, 1),), ((1, 2),), ((2, 3),)]
    assert cut.untrained([1, 1, 0]) == ()
    assert cut.untrained([0, 1, 0]) == ((0, 1),)


def test_batches_drawn_ahead_return_where_others_would_have_none() -> None:
    one = Cut(8, (), [[((0, 4),), ((4, 8),)], []], 4, drop_last=False)
    assert (one.steps, one.batches(0)) == (1, [((0, 4),), ((4, 8),)])
    shared = Cut(4, (), [[((0, 4),)], [], []], 4, drop_last=False)
    assert shared.batches(0) == [((0, 2),), ((2, 3),), ((3, 4),)]
    held = Cut(4, (), [[((0, 4),)], [], []], 4, drop_last=False, least_steps=1)
    assert held.batches(0) == [((0, 4),), ((4, 5),), ((5, 6),)]


def test_steps_of_full_batches_alone_leave_out_the_rest() -> None:
    cut = Cut(20, ((8, 20),), [[((0, 4),)], [((4, 8),)]], 4, drop_last=True)
    assert [cut.batches(step) for step in range(cut.steps)] == [
        [((0, 4),), ((4, 8),)],
        [((8, 12),), ((12, 16),)],
    ]
    assert cut.untrained([2, 2]) == ((16, 20),)
    uneven = Cut(10, ((8, 10),), [[((0, 4),), ((4, 8),)], []], 4, drop_last=True)
    assert (uneven.steps, uneven.batches(0)) == (1, [((0, 4),), ((4, 8),)])
