"""The line at the end and the scalars, from numbers that are known."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from gradlane.formats.live_state import StepTimes
from gradlane.training.monitoring.metrics import Metrics, metrics_of
from gradlane.training.monitoring.observer import ModelWatch
from gradlane.training.monitoring.summary import late_ranks, summary_line
from gradlane.training.monitoring.tensorboard import ScalarLog
from gradlane.training.options.option_fields import with_environment
from gradlane.training.options.option_groups import Monitoring
from gradlane.training.rendezvous.bounded_store import BoundedStore
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from tests.training.monitoring.test_metrics import late, reading, wait

STEPS: StepTimes = {
    "count": 4,
    "last_s": 0.2,
    "mean_s": 0.2,
    "median_s": 0.2,
    "max_s": 0.3,
    "wait_last_s": 0.05,
    "wait_median_s": 0.05,
    "wait_share": 0.25,
}


def metrics(**changes: Any) -> Metrics:
    return metrics_of(0, 2, STEPS, [reading(**changes)])


def reports(*last: int) -> list[dict[str, Any]]:
    rows = [late(count, 0.004 * count, 0.01, 1) for count in last]
    return [{"stragglers": rows, "gathered_slices": 100}]


def test_the_line_names_layer_and_rank() -> None:
    line = summary_line(metrics(), late_ranks(reports(10, 80)))
    assert line == (
        "5 steps, 200 ms each (median); 25% of the time waiting for other ranks "
        "(50 ms a step on average), most of it for 'a' (100%, 2 s in step 3 at worst); rank 1 came "
        "last for 80% of the slices, by 4 ms on average"
    )


def test_the_line_has_one_kind_of_mean_of_the_waits() -> None:
    """Where few steps wait for long, the median is zero and the share is not."""
    steps = {**STEPS, "wait_median_s": 0.0, "mean_s": 0.22, "wait_share": 0.11}
    line = summary_line({**metrics(), "steps": steps}, [])  # type: ignore[typeddict-item]
    assert "11% of the time waiting for other ranks (24.2 ms a step on average)" in line


def test_the_line_says_where_to_stay_with_ddp() -> None:
    faster = summary_line(metrics(), [], 0.25)
    assert "; DDP with its best bucket size would take 250 ms a step, 1.25 times as long" in faster
    assert faster.endswith(" (simulated with the profile and the links of the plan)")
    stays = summary_line(metrics(), [], 0.203)
    assert "would take 203 ms a step: stay with DDP" in stays
    assert "DDP" not in summary_line(metrics(), [])


def test_a_rank_that_is_last_as_often_as_chance_has_it_is_not_named() -> None:
    assert "no rank stands out" in summary_line(metrics(), late_ranks(reports(45, 55)))


@pytest.mark.parametrize(
    "report",
    [
        *(b"", b"\xff\x1b[2J", b"[" * 100_000, b"null", b"[1]", b'{"stragglers": 3}'),
        *(b'{"stragglers": [{}]}', b'{"stragglers": [{"last_count": "\\u001b", "late_s": 1}]}'),
    ],
)
def test_a_report_that_is_none_is_left_out(report: bytes) -> None:
    """A store holds whatever anybody writes into it, and no word there ends a training."""
    store = BoundedStore.wrapping(HashStore(), 0, "this process", 5.0)
    scope, first, second = (
        RendezvousScope(store.as_rank(rank), RankInfo(rank, 3, job="a", restart=0), 1, 5.0)
        for rank in range(3)
    )
    first.put("metrics/1", report)
    second.put("metrics/2", json.dumps(reports(10, 80)[0]))
    watch = ModelWatch(1, lambda watch, step: None)
    watch.collect_lateness(scope)
    assert watch.peer_reports == reports(10, 80)


def test_a_single_rank_has_no_late_rank() -> None:
    alone = metrics_of(0, 1, STEPS, [reading(waits=[], stragglers=[late(0, 0.0, 0.0, 0)])])
    assert summary_line(alone, []).endswith("(50 ms a step on average)")


def test_waits_that_do_not_matter_are_not_explained() -> None:
    quick = metrics_of(0, 2, {**STEPS, "wait_share": 0.004}, [reading()])
    assert "0% of the time" in summary_line(quick, []) and "most of it" not in summary_line(
        quick, []
    )


def test_owners_are_added_up() -> None:
    rows = late_ranks([*reports(10, 0), *reports(90, 10)])
    assert [(row.rank, row.last_share) for row in rows] == [(0, 0.5), (1, 0.05)]
    assert rows[0].late_s_mean == pytest.approx(0.004)
    assert late_ranks([{"stragglers": None, "gathered_slices": None}]) == []


@pytest.mark.parametrize(
    ("option", "environment", "expected"),
    [
        (None, {}, True),
        (None, {"GRADLANE_SUMMARY": "0"}, False),
        (None, {"GRADLANE_SUMMARY": "1"}, True),
        (True, {"GRADLANE_SUMMARY": "0"}, True),
        (False, {}, False),
    ],
)
def test_the_summary_line_can_be_disabled(
    option: bool | None, environment: dict[str, str], expected: bool
) -> None:
    given = Monitoring() if option is None else Monitoring(summary=option)
    assert with_environment(given, environment).summary is expected


class Writer:
    def __init__(self) -> None:
        self.rows: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.rows.append((tag, scalar_value, global_step))


def test_scalars_are_of_the_steps_in_between() -> None:
    samples = [
        metrics(),
        metrics(
            tx_bytes=500,
            gathered_slices=20,
            waits=[wait("a.weight", 3, 4.0, 3.0, 6), wait("b.weight", 1, 8.0, 8.0, 6)],
            stragglers=[late(1, 0.1, 0.1, 2), late(14, 2.8, 0.5, 3)],
        ),
    ]
    samples[1]["steps"] = {**STEPS, "count": 8, "mean_s": 0.3, "wait_share": 0.5}
    writer = Writer()
    log = ScalarLog(writer, 4, iter(samples).__next__)
    for step in range(5, 9):
        log.after_step(step)
    found = {tag: value for tag, value, _ in writer.rows}
    assert {step for _, _, step in writer.rows} == {8}
    assert found["gradlane/step_s"] == pytest.approx((8 * 0.3 - 4 * 0.2) / 4)
    assert found["gradlane/wait_s"] == pytest.approx((0.5 * 2.4 - 0.25 * 0.8) / 4)
    assert found["gradlane/wait_share"] == pytest.approx(1.0 / 1.6)
    assert found["gradlane/tx_bytes"] == 100.0
    assert found["gradlane/wait_s/b"] == 2.0 and found["gradlane/wait_s/a"] == 0.25
    assert found["gradlane/last_share/rank1"] == pytest.approx(0.8)
    assert found["gradlane/late_s/rank1"] == pytest.approx(0.2)


def test_a_function_takes_all_scalars_of_a_step_at_once() -> None:
    later = metrics(tx_bytes=500)
    later["steps"] = {**STEPS, "count": 8}
    samples = [metrics(), later, metrics(), later]
    writer, calls = Writer(), list[tuple[dict[str, float], int]]()
    for target in (writer, lambda values, step: calls.append((values, step))):
        ScalarLog(target, 4, lambda: samples.pop(0)).after_step(8)
    assert calls == [({tag: value for tag, value, _ in writer.rows}, 8)]


def test_without_a_step_there_is_nothing_to_write() -> None:
    writer, calls = Writer(), list[int]()
    ScalarLog(writer, 1, metrics).after_step(1)
    ScalarLog(lambda _, step: calls.append(step), 1, metrics).after_step(1)
    assert writer.rows == [] and calls == []


def test_writers_that_cannot_write_are_refused() -> None:
    with pytest.raises(TypeError, match=r"object has no add_scalar.* and is no function"):
        ScalarLog(object(), 1, metrics)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every is 0"):
        ScalarLog(Writer(), 0, metrics)
