"""Conversion of the core's counters into the metrics of a session."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradlane.training.monitoring.metrics import (
    Reading,
    join_readings,
    layer_of,
    metrics_of,
    renumber_steps,
    sum_by_layer,
    tensor_wait_row,
)
from gradlane.training.monitoring.step_timer import RECENT_STEPS, StepTimer

NO_STEPS = StepTimer().times()


def wait(name: str, count: int, wait_s: float, longest_s: float, step: int) -> Reading:
    return {
        "name": name,
        "count": count,
        "wait_s": wait_s,
        "wait_s_max": longest_s,
        "wait_step_max": step,
        "wait_step_last": step,
        "last_of_step_count": 0,
        "last_of_step_wait_s": 0.0,
    }


def late(count: int, late_s: float, longest_s: float, step: int) -> Reading:
    return {"last_count": count, "late_s": late_s, "late_s_max": longest_s, "late_step_max": step}


def reading(**changes: Any) -> Reading:
    base: Reading = {
        "step": 5,
        "tx_bytes": 100,
        "queued_bytes": 7,
        "wait_s": 3.0,
        "raw_bytes": 80,
        "encoded_bytes": 20,
        "plan_version": 1,
        "gathered_slices": 10,
        "peers": [{"tx_bytes": 0, "queued_bytes": 0}, {"tx_bytes": 100, "queued_bytes": 7}],
        "waits": [wait("a.weight", 2, 1.0, 0.9, 4), wait("a.bias", 1, 2.0, 2.0, 3)],
        "stragglers": [late(1, 0.1, 0.1, 2), late(6, 1.2, 0.5, 3)],
    }
    return {**base, **changes}


def test_waits_add_up_by_layer_and_keep_the_step_of_the_longest() -> None:
    metrics = metrics_of(0, 2, NO_STEPS, [reading()])
    (layer,) = metrics["layer_waits"]
    assert (layer["name"], layer["count"], layer["wait_s"]) == ("a", 3, 3.0)
    assert (layer["wait_s_max"], layer["max_step"], layer["last_step"]) == (2.0, 3, 4)
    assert layer["wait_share"] == 1.0
    assert [one["name"] for one in metrics["tensor_waits"]] == ["a.bias", "a.weight"]
    assert metrics["tensor_waits"][0]["wait_share"] == pytest.approx(2 / 3)


def test_late_ranks_have_shares_and_means() -> None:
    first, second = metrics_of(0, 2, NO_STEPS, [reading()])["stragglers"]
    assert (second["rank"], second["last_share"], second["max_step"]) == (1, 0.6, 3)
    assert second["late_s_mean"] == pytest.approx(0.2)
    assert first["last_share"] == 0.1


def test_models_of_a_session_add_up_and_are_told_apart() -> None:
    metrics = metrics_of(1, 2, NO_STEPS, [reading(), reading(step=9, plan_version=3)])
    assert metrics["tx_bytes"] == 200 and metrics["queued_bytes"] == 14
    assert metrics["peers"][1] == {"rank": 1, "tx_bytes": 200, "queued_bytes": 14}
    assert (metrics["step"], metrics["plan_version"]) == (9, 3)
    assert metrics["codec_ratio"] == 4.0
    assert {(one["model"], one["name"]) for one in metrics["layer_waits"]} == {(1, "a"), (2, "a")}
    assert metrics["stragglers"][1]["last_count"] == 12
    assert metrics["stragglers"][1]["last_share"] == 0.6
    json.dumps(metrics)


def test_a_session_without_models_has_zeros() -> None:
    metrics = metrics_of(0, 1, NO_STEPS, [])
    assert metrics["tx_bytes"] == 0 and metrics["codec_ratio"] == 1.0
    assert metrics["peers"] == [] and metrics["layer_waits"] == []


def test_counters_go_on_over_another_channel_and_states_do_not() -> None:
    now = reading(tx_bytes=1, queued_bytes=2, step=1)
    now["waits"] = [wait("b.weight", 1, 0.5, 0.5, 1), wait("a.bias", 1, 5.0, 5.0, 1)]
    joined = join_readings(reading(), now)
    assert (joined["tx_bytes"], joined["queued_bytes"], joined["step"]) == (101, 2, 6)
    assert joined["peers"][1] == {"tx_bytes": 200, "queued_bytes": 7}
    rows = {row["name"]: row for row in joined["waits"]}
    assert set(rows) == {"a.weight", "a.bias", "b.weight"}
    assert (rows["a.bias"]["wait_s"], rows["a.bias"]["wait_step_max"]) == (7.0, 1)
    assert rows["a.weight"]["wait_step_max"] == 4


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "a", "a.b"]),
            st.integers(0, 50),
            st.floats(0, 10),
            st.integers(1, 99),
        ),
        max_size=12,
    )
)
def test_layers_have_all_waits_of_their_tensors(rows: list[tuple[str, int, float, int]]) -> None:
    waits = [
        tensor_wait_row(1, wait(f"{layer}.p{number}".lstrip("."), count, seconds, seconds, step))
        for number, (layer, count, seconds, step) in enumerate(rows)
    ]
    layers = sum_by_layer(waits)
    assert math.isclose(sum(one["wait_s"] for one in layers), sum(row[2] for row in rows))
    assert sum(one["count"] for one in layers) == sum(row[1] for row in rows)
    for one in layers:
        own = [wait for wait in waits if layer_of(wait["name"]) == one["name"]]
        longest = max(own, key=lambda wait: wait["wait_s_max"])
        assert (one["wait_s_max"], one["max_step"]) == (longest["wait_s_max"], longest["max_step"])


def test_steps_are_numbered_as_the_program_does() -> None:
    numbered = renumber_steps(reading(), lambda step: step - 1)
    assert [row["wait_step_max"] for row in numbered["waits"]] == [3, 2]
    assert [row["late_step_max"] for row in numbered["stragglers"]] == [1, 2]
    assert numbered["stragglers"][1]["late_s"] == 1.2


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0
        self.waited_ns = 0

    def pass_step(self, took_ns: int, waited_ns: int) -> None:
        self.now_ns += took_ns
        self.waited_ns += waited_ns


def test_steps_take_from_beginning_to_beginning() -> None:
    clock = Clock()
    step_timer = StepTimer(lambda: clock.now_ns)
    step_timer.use_channel(lambda: clock.waited_ns)
    for took_ns, waited_ns in ((0, 500), (1000, 100), (3000, 1300), (2000, 100)):
        clock.pass_step(took_ns, waited_ns)
        step_timer.step_begins()
    assert step_timer.times() == {
        "count": 3,
        "last_s": pytest.approx(2e-6),
        "mean_s": pytest.approx(2e-6),
        "median_s": pytest.approx(2e-6),
        "max_s": pytest.approx(3e-6),
        "wait_last_s": pytest.approx(1e-7),
        "wait_median_s": pytest.approx(1e-7),
        "wait_share": pytest.approx(0.25),
    }


def test_a_step_in_which_the_channel_changed_does_not_count() -> None:
    clock = Clock()
    step_timer = StepTimer(lambda: clock.now_ns)
    step_timer.use_channel(lambda: clock.waited_ns)
    step_timer.step_begins()
    clock.pass_step(1000, 10)
    step_timer.use_channel(lambda: 0)
    step_timer.step_begins()
    clock.pass_step(7, 0)
    step_timer.step_begins()
    assert step_timer.times()["count"] == 1 and step_timer.times()["max_s"] == pytest.approx(7e-9)


def test_only_recent_steps_are_kept() -> None:
    clock = Clock()
    step_timer = StepTimer(lambda: clock.now_ns)
    for took_ns in [10] * (RECENT_STEPS + 1) + [20] * RECENT_STEPS:
        step_timer.step_begins()
        clock.pass_step(took_ns, 0)
    step_timer.step_begins()
    assert step_timer.times()["median_s"] == pytest.approx(20e-9)
    assert step_timer.times()["count"] == 2 * RECENT_STEPS + 1
