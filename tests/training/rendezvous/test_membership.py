"""Members of a session, with losses that the core has agreed on and ranks that join."""

from __future__ import annotations

from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.membership import Membership

OLD, NEW, NEWEST = "job", "job/join/1", "job/join/2"


def members_of_four(rank: int = 0) -> Membership:
    """Return a member of a world of four."""
    return Membership(RankInfo(rank, 4, OLD, restart=0))


def test_a_lost_rank_is_known_by_its_number_of_each_world() -> None:
    membership = members_of_four()
    membership.note(1, (0, 2, 3), 5, "rank 1 was lost")
    assert [membership.has_lost(number, OLD) for number in range(4)] == [False, True, False, False]
    membership.put_into_force([1], lambda step: step)
    # Of ranks 0, 2 and 3 the last two are 1 and 2 from now on, and rank 3 has joined.
    membership.open_with(RankInfo(0, 4, NEW, restart=0), 2, 9, "rank 3 has joined")
    assert [membership.has_lost(number, OLD) for number in range(4)] == [False, True, False, False]
    assert not any(membership.has_lost(number, NEW) for number in range(4))
    membership.note(3, (0, 1, 3), 2, "rank 2 was lost")
    assert [membership.has_lost(number, NEW) for number in range(4)] == [False, False, True, False]
    assert [membership.has_lost(number, OLD) for number in range(4)] == [False, True, False, True]
    membership.put_into_force([3], membership.training_step_of)
    membership.open_with(RankInfo(0, 4, NEWEST, restart=0), 4, 12, "rank 3 has joined")
    assert [membership.has_lost(number, OLD) for number in range(4)] == [False, True, False, True]
    assert [membership.has_lost(number, NEW) for number in range(4)] == [False, False, True, False]
    assert [(one.rank, one.step) for one in membership.lost] == [(1, 5), (2, 10)]


def test_each_lost_rank_has_the_reason_of_its_own_loss() -> None:
    membership = members_of_four()
    assert membership.loss_of(0, OLD) is None and membership.loss_of(2, NEW) is None
    membership.note(1, (1, 2, 3), 5, "rank 0 was lost")
    membership.note(2, (1, 3), 5, "rank 2 gave up: rank 0 was lost")
    reasons = [membership.loss_of(number, OLD) for number in range(4)]
    assert reasons == ["rank 0 was lost", None, "rank 2 gave up: rank 0 was lost", None]
    # A world that is being connected.
    membership.hear(NEW, 1, (0, 1), 0, "rank 2 was lost there")
    assert membership.loss_of(2, NEW) == "rank 2 was lost there"
    assert membership.loss_of(1, NEW) is None


def test_a_rank_that_is_lost_while_worlds_change_is_lost_once() -> None:
    """The old world's last change is not in force any more; the new one makes its own."""
    membership = members_of_four()
    membership.note(1, (0, 1, 2), 7, "rank 3 was lost")
    membership.open_with(RankInfo(0, 5, NEW, restart=0), 1, 8, "rank 4 has joined")
    assert not membership.lost and membership.members == tuple(range(5))
    assert not membership.is_pending and not membership.has_lost(3, OLD)
    membership.note(2, (0, 1, 2, 4), 1, "rank 3 was lost")
    assert [(one.rank, one.step) for one in membership.lost] == [(3, 8)]
    assert membership.has_lost(3, OLD) and not membership.has_lost(4, NEW)


def test_all_ranks_write_down_a_loss_in_the_same_step() -> None:
    """One hears of it before it has counted a step that is none of training."""
    members = [members_of_four(rank) for rank in range(2)]
    members[1].training_step_of = lambda step: step - 1
    for membership in members:
        membership.note(1, (0, 1, 3), 5, "rank 2 was lost")
    assert [membership.lost[0].step for membership in members] == [5, 4]
    for membership in members:
        membership.put_into_force([1, 1, 1], lambda step: step - 1)
        assert [(one.rank, one.step) for one in membership.lost] == [(2, 4)]


def test_members_that_a_rank_has_never_heard_of_do_not_come_into_force() -> None:
    """Rank 1 has begun the first change, and the second one overtook its end there."""
    members = [members_of_four(rank) for rank in range(2)]
    members[0].note(1, (0, 1, 3), 5, "rank 2 was lost")
    for known in ([0, 0, 0], [1, 2, 2]):
        for membership in members:
            membership.put_into_force(known, lambda step: step)
            assert membership.generation == 0 and membership.world_size == 4
    members[0].note(2, (0, 1), 6, "rank 3 was lost")
    members[1].note(2, (0, 1), 6, "ranks 2 and 3 were lost")
    members[0].note(3, (0,), 8, "rank 1 was lost")
    for membership in members:
        membership.put_into_force([2, 2], lambda step: step)
        assert membership.members == (0, 1)
        assert [(one.rank, one.step) for one in membership.lost][:2] == [(2, 6), (3, 6)]
    # Its change is not in force.
    assert [(one.rank, one.step) for one in members[0].lost][2:] == [(1, 8)]
