"""Four ranks on two nodes whose gradients are added up by collectives: Gloo's, as on no device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.built import needs_core
from tests.training.model.pool import RankPool
from tests.training.node.rank_loss import check_that_all_name_the_lost_rank

pytestmark = needs_core
HERE = "tests.training.node.node_programs"


def digests(ranks: list[dict[str, Any]]) -> set[str]:
    """Return the different states that ranks have ended with."""
    return {rank["digest"] for rank in ranks}


def test_two_ranks_a_node_have_the_bits_of_sums_in_shared_memory(pool: RankPool) -> None:
    """Layers that some steps leave out, frozen ones, several dtypes, batch statistics."""
    host = pool.run(f"{HERE}:trained", local="leader")
    led = pool.run(f"{HERE}:trained", local="leader", local_sums="collective")
    shared = pool.run(f"{HERE}:trained", local="shared", local_sums="collective")
    assert len(digests([*host, *led, *shared])) == 1
    for rank in (*led, *shared):
        assert rank["channel"]["local_sums"] == "gloo"
        assert rank["channel"]["collective_bytes"] > 0
    for one, other in zip(host, led, strict=True):
        assert one["channel"]["local_sums"] == "host"
        assert one["channel"]["collective_bytes"] == 0
        # Votes, batch statistics and the values of step 0 are still copied.
        assert other["channel"]["local_bytes"] < one["channel"]["local_bytes"]
        assert one["losses"] == other["losses"]
    assert [rank["tx"] > 0 for rank in led] == [True, False, True, False]
    assert all(rank["tx"] > 0 for rank in shared)


@pytest.mark.parametrize(
    "options",
    [
        {"clip": 0.1, "accumulate": 2},
        {"defer": False, "buffers": "average", "strategy": "ring"},
        {"strategy": "wfbp", "slice_elems": 1000, "codec": "qsgd:bits=8"},
    ],
)
def test_clipping_accumulation_strategies_and_codecs(
    pool: RankPool, options: dict[str, Any]
) -> None:
    host = pool.run(f"{HERE}:trained", local="leader", steps=3, **options)
    led = pool.run(f"{HERE}:trained", local="leader", local_sums="collective", steps=3, **options)
    assert len(digests([*host, *led])) == 1


@pytest.mark.parametrize("local", ["leader", "shared"])
def test_gradients_that_become_ready_in_another_order_on_each_rank(
    pool: RankPool, local: str
) -> None:
    """Collectives that were issued as gradients become ready would wait for each other for ever."""
    host = pool.run(f"{HERE}:in_any_order", local=local)
    found = pool.run(f"{HERE}:in_any_order", local=local, local_sums="collective", timeout_s=60.0)
    assert {rank["sums"] for rank in found} == {"gloo"}
    assert len(digests([*host, *found])) == 1


def test_four_ranks_a_node_agree_among_themselves(pool: RankPool) -> None:
    host = pool.run(f"{HERE}:trained", local="leader", local_size=4, steps=3)
    led = pool.run(
        f"{HERE}:trained", local="leader", local_sums="collective", local_size=4, steps=3
    )
    again = pool.run(
        f"{HERE}:trained", local="leader", local_sums="collective", local_size=4, steps=3
    )
    assert len(digests(led)) == 1
    assert digests(led) == digests(again)
    for one, other in zip(host, led, strict=True):
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-3)


def test_the_last_ranks_state_is_handed_over(pool: RankPool) -> None:
    found = pool.run(f"{HERE}:uneven", local="leader", local_sums="collective")
    assert len(set(found)) == 1


def test_by_itself_it_takes_collectives_on_devices_alone(pool: RankPool) -> None:
    found = pool.run(f"{HERE}:trained", local="leader", local_sums="auto", steps=2)
    assert {rank["channel"]["local_sums"] for rank in found} == {"host"}


def test_arrays_are_added_up_in_the_hosts_memory(pool: RankPool) -> None:
    host = pool.run(f"{HERE}:means", local="leader")
    assert pool.run(f"{HERE}:means", local="leader", local_sums="collective") == host


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"local": "off", "local_sums": "collective"}, 'local_sums="collective" with local="off"'),
        ({"local": "leader", "local_sums": "somewhere"}, "unknown local_sums 'somewhere'"),
        ({"local": "leader", "local_sums": "collective", "update": "server"}, 'update="server"'),
        ({"local": "auto", "local_sums": "collective"}, "opened"),
    ],
)
def test_what_does_not_go_together(pool: RankPool, options: dict[str, Any], words: str) -> None:
    for said in pool.run(f"{HERE}:refused", **options):
        assert words in said


def test_a_rank_that_gives_up_is_named_everywhere(pool: RankPool) -> None:
    heard = pool.run(f"{HERE}:lost", victim=3, how="abort", local="leader", local_sums="collective")
    for words in heard[:3]:
        assert words[0] == 3
        assert words[1] in (2, 3)
        assert "the test says so" in words[2]


@pytest.mark.parametrize(
    ("victim", "how", "local"), [(3, "kill", "leader"), (0, "kill in step", "shared")]
)
def test_a_rank_that_is_killed_is_noticed_at_once(victim: int, how: str, local: str) -> None:
    check_that_all_name_the_lost_rank(victim, how, local=local, local_sums="collective")


@pytest.mark.parametrize(("victim", "local"), [(3, "leader"), (0, "shared")])
def test_a_rank_that_stands_still_is_named_by_its_node(victim: int, local: str) -> None:
    check_that_all_name_the_lost_rank(
        victim, "stop", local=local, local_sums="collective", silence_timeout_s=2.0
    )


def test_nothing_of_a_group_outlives_its_session(pool: RankPool) -> None:
    for found in pool.run(f"{HERE}:opened_again", times=3, local="leader", local_sums="collective"):
        assert found[-1] == found[-2]
