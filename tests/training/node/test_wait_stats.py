"""The waits of a rank on a node, as the core counts them elsewhere."""

from __future__ import annotations

from gradlane.training.node.wait_stats import WaitStats


def test_the_longest_wait_is_of_either_kind_and_of_a_training_step() -> None:
    waits = WaitStats(["a", "b"])
    waits.record(1, 0, 9_000_000_000, whole_step=True)
    waits.record(1, 3, 2_000_000_000, whole_step=True)
    waits.record(1, 4, 1_000_000_000, whole_step=False)
    (row,) = waits.rows()
    assert (row["name"], row["wait_s_max"], row["wait_step_max"]) == ("b", 2.0, 3)
    assert (row["count"], row["wait_s"], row["wait_step_last"]) == (1, 1.0, 4)
    assert (row["last_of_step_count"], row["last_of_step_wait_s"]) == (2, 11.0)
    assert waits.waited_ns == 12_000_000_000
